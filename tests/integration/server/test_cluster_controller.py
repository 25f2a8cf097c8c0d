"""The cluster controller on a real store, with a cluster in memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tinkex import clock
from tinkex.errors import ConfigError
from tinkex.jobs.wakeup import ALIVE_SECONDS
from tinkex.server.cluster.controller import COMPLETE_SECONDS, ClusterController
from tinkex.server.cluster.hosted_worker import WorkerStatus
from tinkex.server.cluster.plan import LOST_SECONDS, RETRY_SECONDS, SCALE_UP_SECONDS
from tinkex.server.cluster.views import ClusterNode, PlacedGroup
from tinkex.server.config import ServerConfig
from tinkex.server.config_sources import decode_config
from tinkex.server.pools import PoolConfig, pool_of_group
from tinkex.server.wiring import open_store
from tinkex.store import clusters, groups
from tinkex.store.clusters import ClusterReport, ClusterTarget
from tinkex.store.database import Database
from tinkex.store.records import GroupRecord, GroupState

RUNNING = WorkerStatus(pid=1, num_restarts=0, has_ended=False, error="", version="0")


class MemoryCluster:
    """A cluster whose workers do nothing; groups register when the test says so."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.groups: dict[str, PlacedGroup] = {}
        self.states: dict[str, WorkerStatus | None] = {}
        self.configs: dict[str, ServerConfig] = {}

    def list_nodes(self) -> list[ClusterNode]:
        return [ClusterNode("n1", "host", "127.0.0.1", True, {"CPU": 4.0})]

    def list_groups(self) -> list[PlacedGroup]:
        return sorted(self.groups.values())

    def statuses(self, group_ids: Sequence[str]) -> dict[str, WorkerStatus | None]:
        return {name: self.states[name] for name in group_ids if name in self.states}

    def start(self, group_id: str, digest: str, pool: PoolConfig, config: bytes) -> None:
        self.groups[group_id] = PlacedGroup(group_id, digest, True, ("n1",))
        self.states[group_id] = RUNNING
        self.configs[group_id] = decode_config(config)

    def stop(self, group_id: str) -> None:
        self.states[group_id] = WorkerStatus(
            pid=0, num_restarts=0, has_ended=True, error="", version="0"
        )

    def remove(self, group: PlacedGroup) -> None:
        del self.groups[group.id]
        self.states.pop(group.id, None)

    def register_all(self, **load: float) -> None:
        """Register the groups that run and are not known yet, with this load."""
        for group_id in self.groups:
            known = self.database.read(lambda db, name=group_id: groups.find(db, name))
            if known is None or load:
                self.register(group_id, load)

    def register(self, group_id: str, load: dict[str, float]) -> None:
        now = clock.now()
        record = GroupRecord(
            id=group_id,
            state=GroupState.READY,
            base_models=[{"name": "m"}],
            models_source="",
            host="host",
            load=load,
            num_moves=0,
            started_at=now,
            seen_at=now,
        )
        self.database.write(lambda db: groups.register(db, record))

    def retire(self, group_id: str) -> None:
        self.database.write(lambda db: groups.set_state(db, group_id, GroupState.RETIRED))


class Setup:
    """A controller with a clock that the test sets."""

    def __init__(self, config: ServerConfig, database: Database) -> None:
        self.database = database
        self.cluster = MemoryCluster(database)
        self.now = 0.0
        self.config = config
        self.controller = self._make_controller(config)

    def _make_controller(self, config: ServerConfig) -> ClusterController:
        return ClusterController(config, self.database, self.cluster, monotonic=lambda: self.now)

    def restart(self, **changes: Any) -> None:
        """Replace the controller by one with other settings."""
        self.controller.close()
        self.controller = self._make_controller(replace(self.config, **changes))

    def run(self, seconds: float = 0.0) -> list[str]:
        """Let time pass, run the controller, and return the groups on the cluster."""
        self.now += seconds
        self.controller.run_once()
        return sorted(self.cluster.groups)

    def state(self, group_id: str) -> str:
        group = self.database.read(lambda db: groups.find(db, group_id))
        assert group is not None
        return group.state

    def set_target(self, target: ClusterTarget) -> None:
        self.database.write(lambda db: clusters.write_target(db, target))

    def report(self) -> ClusterReport:
        report = self.database.read(clusters.read_report)
        assert report is not None
        return report


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    config = ServerConfig(home=tmp_path, engine="fake", cluster="ray", store="postgresql://unused")
    pool = PoolConfig(name="train", models=("m",), resources={"CPU": 2.0}, min=2, max=3)
    config = replace(config, pools=(pool,), api_key="tml-secret")
    with open_store(replace(config, cluster="", pools=(), store="")) as database:
        setup = Setup(config, database)
        yield setup
        setup.controller.close()


def test_pool_is_started_with_the_settings_of_a_worker(setup: Setup) -> None:
    ids = setup.run()
    assert [pool_of_group(name) for name in ids] == ["train", "train"]
    assert len(set(ids)) == 2
    config = setup.cluster.configs[ids[0]]
    assert (config.models, config.threads, config.cluster, config.api_key) == (("m",), 2, "", "")
    assert setup.run() == ids


def test_another_controller_goes_on_where_one_was_killed(setup: Setup) -> None:
    ids = setup.run()
    setup.cluster.register_all()
    # The second was killed after it had reserved resources, before it started the worker.
    del setup.cluster.states[ids[1]]
    setup.restart()
    assert setup.run() == ids
    assert setup.cluster.states[ids[1]] == RUNNING


def test_group_without_processes_is_not_started_every_second(setup: Setup) -> None:
    ids = setup.run()
    del setup.cluster.states[ids[0]]
    setup.run()
    del setup.cluster.states[ids[0]]
    setup.run(COMPLETE_SECONDS - 1)
    assert ids[0] not in setup.cluster.states
    setup.run(1)
    assert ids[0] in setup.cluster.states


def test_groups_of_a_lost_cluster_are_restored_under_their_names(setup: Setup) -> None:
    ids = setup.run()
    setup.cluster.register_all()
    setup.cluster.groups.clear()
    setup.cluster.states.clear()
    assert setup.run() == ids


def test_drained_group_is_removed_and_replaced(setup: Setup) -> None:
    first, second = setup.run()
    setup.cluster.register_all()
    setup.cluster.retire(first)
    ids = setup.run()
    assert len(ids) == 2
    assert first not in ids
    assert second in ids


def test_long_queue_adds_a_group_and_an_idle_pool_drains_one(setup: Setup) -> None:
    ids = setup.run()
    setup.cluster.register_all(queued_seconds=50.0, busy=1.0)
    setup.run()
    assert len(setup.run(SCALE_UP_SECONDS)) == 3
    setup.cluster.register_all(queued_seconds=0.0, busy=0.0)
    setup.run(400)
    setup.run(400)
    states = [setup.state(name) for name in setup.cluster.groups]
    assert sorted(states) == ["draining", "ready", "ready"]
    assert setup.report().pools[0].num_wanted == 2
    assert set(ids) <= set(setup.cluster.groups)


def test_new_settings_replace_groups_one_by_one(setup: Setup) -> None:
    old = setup.run()
    setup.cluster.register_all()
    setup.restart(pass_tokens=1024)
    for _ in range(20):
        setup.run(1)
        setup.cluster.register_all()
        draining = [name for name in setup.cluster.groups if setup.state(name) == "draining"]
        assert len(draining) <= 1
        for name in draining:
            setup.cluster.retire(name)
    assert len(setup.cluster.groups) == 2
    assert not set(old) & set(setup.cluster.groups)


def test_down_keeps_the_groups_in_the_store_and_up_restores_them(setup: Setup) -> None:
    ids = setup.run()
    setup.cluster.register_all()
    setup.set_target(ClusterTarget(is_up=False))
    assert setup.run() == ids
    assert setup.run() == []
    assert [setup.state(name) for name in ids] == ["ready", "ready"]
    assert setup.report().pools[0].num_wanted == 0
    setup.set_target(ClusterTarget(is_up=True))
    assert setup.run() == ids


def test_scale_changes_the_limits_of_a_pool(setup: Setup) -> None:
    setup.run()
    setup.set_target(ClusterTarget(pools={"train": (3, 5)}))
    assert len(setup.run()) == 3
    pool = setup.report().pools[0]
    assert (pool.min, pool.max) == (3, 5)


def test_groups_of_a_removed_pool_are_drained_while_another_can_take_their_models(
    setup: Setup,
) -> None:
    old = setup.run()
    setup.cluster.register_all()
    pool = PoolConfig(name="other", models=("m",))
    setup.restart(pools=(pool,))
    setup.run()
    assert sorted(setup.state(name) for name in old) == ["draining", "ready"]
    setup.cluster.register_all()
    for _ in range(6):
        for name in old:
            if setup.state(name) == "draining":
                setup.cluster.retire(name)
        setup.run()
    (left,) = setup.cluster.groups
    assert pool_of_group(left) == "other"


def test_error_of_the_first_worker_ends_the_start(setup: Setup) -> None:
    ids = setup.run()
    failed = WorkerStatus(
        pid=0, num_restarts=0, has_ended=True, error="the model is missing", version="0"
    )
    setup.cluster.states[ids[0]] = failed
    with pytest.raises(ConfigError, match=r"no worker can start .*: the model is missing"):
        setup.run()


def test_group_that_fails_later_is_started_again(setup: Setup) -> None:
    ids = setup.run()
    setup.cluster.register_all()
    failed = WorkerStatus(pid=0, num_restarts=0, has_ended=True, error="no memory", version="0")
    setup.cluster.states[ids[0]] = failed
    setup.run()
    assert setup.report().groups[0].error == "no memory"
    setup.run(RETRY_SECONDS)
    setup.run()
    assert setup.cluster.states[ids[0]] == RUNNING


def test_group_whose_actor_is_lost_is_restored_unless_its_worker_reports(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = setup.run()
    setup.cluster.register_all()
    setup.cluster.states[ids[0]] = None
    setup.run()
    setup.run(LOST_SECONDS)
    assert setup.run() == ids
    assert setup.cluster.states[ids[0]] is None

    registered_at = clock.now()
    monkeypatch.setattr(clock, "now", lambda: registered_at + ALIVE_SECONDS + 1)
    setup.run()
    setup.run(LOST_SECONDS)
    assert setup.run() == ids
    assert setup.cluster.states[ids[0]] == RUNNING


def test_report_shows_nodes_and_groups(setup: Setup) -> None:
    ids = setup.run()
    setup.run()
    report = setup.report()
    assert report.nodes[0].groups == tuple(ids)
    assert [group.node for group in report.groups] == ["n1", "n1"]


#: Calls of Ray that are blocked: in a round of the controller, and in the connection.
BLOCKED = """
import sys
import threading
from types import SimpleNamespace
from tinkex.server.cluster import cluster_process

cluster_process.MAX_BLOCKED_SECONDS = 0.2
"""
BLOCKED_ROUND = """
blocked_controller = SimpleNamespace(run_once=threading.Event().wait)
cluster_process._run_once(blocked_controller, SimpleNamespace(hold=lambda: True))
"""
BLOCKED_CONNECTION = """
from pathlib import Path
from tinkex.server.config import ServerConfig

actors = SimpleNamespace(RayCluster=lambda *_: threading.Event().wait())
sys.modules["tinkex.server.cluster.actors"] = actors
config = ServerConfig(home=Path(sys.argv[1]))
cluster_process.run_controller(config, threading.Event())
"""


@pytest.mark.parametrize(
    ("script", "function"),
    [(BLOCKED_ROUND, "in _run_once"), (BLOCKED_CONNECTION, "in run_controller")],
    ids=["round", "connection"],
)
def test_controller_that_is_blocked_ends(script: str, function: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BLOCKED + script, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert function in ended.stderr
