"""`keep_checkpoints` deletes old training checkpoints of a run, and only those."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.conftest import TIMEOUT_SECONDS
from tests.integration.recipes.conftest import make_plan, start
from tinkex import ServiceClient
from tinkex.recipes.checkpoint_limit import choose_surplus
from tinkex.recipes.run_directory import RunDirectory
from tinkex.testing import Fault, StubServer


def names(service: ServiceClient) -> list[str]:
    """The names of all checkpoints, sorted."""
    listed = service.rest_client().list_user_checkpoints().result(TIMEOUT_SECONDS).checkpoints
    return sorted(each.tinker_path.rpartition("/")[2] for each in listed)


def test_surplus_is_the_oldest() -> None:
    assert list(choose_surplus(("a", "b", "c"), 2)) == ["a"]
    assert list(choose_surplus(("a", "b"), 3)) == []
    assert list(choose_surplus(("a", "b"), None)) == []


@pytest.mark.parametrize(("num_kept", "kept"), [(1, [6]), (2, [5, 6]), (9, [1, 2, 3, 4, 5, 6])])
def test_newest_checkpoints_and_the_final_weights_stay(
    service: ServiceClient, tmp_path: Path, num_kept: int, kept: list[int]
) -> None:
    plan = make_plan(tmp_path, "sft", save_every=1, keep_checkpoints=num_kept)
    run = start(plan, service, tmp_path / "run")
    for _ in run:
        pass
    assert names(service) == [*(f"sft-sft-00000{n}" for n in kept), "sft-sft-final"]
    saved = RunDirectory(tmp_path / "run").read_progress()
    assert saved is not None
    assert len(saved.checkpoints) == len(kept)
    assert saved.state_path == saved.checkpoints[-1]


def test_chosen_checkpoints_stay(service: ServiceClient, tmp_path: Path) -> None:
    plan = make_plan(tmp_path, "sft", save_every=1, keep_checkpoints=1)
    run = start(plan, service, tmp_path / "run")
    rest = service.rest_client()
    for report in run:
        path = RunDirectory(tmp_path / "run").read_progress().state_path  # type: ignore[union-attr]
        if report.step == 1:
            rest.publish_checkpoint_from_tinker_path(path).result(TIMEOUT_SECONDS)
        if report.step == 2:
            rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result(TIMEOUT_SECONDS)
        if report.step == 3:
            rest.set_alias(path, "good").result(TIMEOUT_SECONDS)
    assert names(service) == [*(f"sft-sft-00000{n}" for n in (1, 2, 3, 6)), "sft-sft-final"]


def test_resumed_run_deletes_checkpoints_of_the_stopped_one(
    service: ServiceClient, tmp_path: Path
) -> None:
    plan = make_plan(tmp_path, "sft", save_every=1, keep_checkpoints=2)
    stopped = start(plan, service, tmp_path / "run")
    for report in stopped:
        if report.step == 2:
            stopped.stop()
    for _ in start(plan, service, tmp_path / "run"):
        pass
    assert names(service) == ["sft-sft-000005", "sft-sft-000006", "sft-sft-final"]


def test_failed_deletion_is_repeated(
    server: StubServer, service: ServiceClient, tmp_path: Path
) -> None:
    plan = make_plan(tmp_path, "sft", save_every=1, keep_checkpoints=1)
    run = start(plan, service, tmp_path / "run")
    server.inject("delete_checkpoint", Fault(status=403))
    for _ in run:
        pass
    assert len(server.calls("delete_checkpoint")) == 6
    assert names(service) == ["sft-sft-000006", "sft-sft-final"]


def test_number_is_not_a_training_setting(tmp_path: Path) -> None:
    few, all_ = (make_plan(tmp_path, "sft", keep_checkpoints=number) for number in (1, None))
    assert few.training_settings() == all_.training_settings()
    # Run directories are named by these settings: unset options must not change the name.
    assert not {"alpha", "use_rslora", "target_modules"} & all_.training_settings().keys()
