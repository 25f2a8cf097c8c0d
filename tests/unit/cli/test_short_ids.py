"""Resolving short ids with a fake client."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, cast

import pytest

from tinkex.cli.errors import CliError
from tinkex.cli.id_arguments import resolve_path, resolve_run, resolve_session
from tinkex.client.rest import RestClient
from tinkex.types import Checkpoint, Cursor, TrainingRun

SESSIONS = (
    "aaaa1111-0000-4000-8000-000000000000",
    "aaaa2222-0000-4000-8000-000000000000",
    "bbbb0000-0000-4000-8000-000000000000",
)
RUNS = (f"{SESSIONS[0]}:train:0", f"{SESSIONS[1]}:train:0", f"{SESSIONS[1]}:train:1")


class Ready:
    """A completed future."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)

    def result(self) -> Any:
        return self


class Lists:
    """A fake client of a server without search."""

    def __init__(self, run_ids: tuple[str, ...] = RUNS, names: dict[str, str] | None = None):
        self.run_ids, self.names, self.num_asked = run_ids, names or {}, 0

    def find_training_runs(self, search: str, limit: int, offset: int) -> Ready:
        return self.list_training_runs(limit, offset)

    def list_training_runs(self, limit: int, offset: int = 0) -> Ready:
        self.num_asked += 1
        runs = [
            TrainingRun(
                training_run_id=run_id,
                base_model="m",
                model_owner="me",
                is_lora=True,
                last_request_time=datetime.now(UTC),
                name=self.names.get(run_id),
            )
            for run_id in self.run_ids[offset : offset + limit]
        ]
        cursor = Cursor(offset=offset, limit=limit, total_count=len(self.run_ids))
        return Ready(training_runs=runs, cursor=cursor)

    def list_sessions(self, limit: int, offset: int = 0) -> Ready:
        self.num_asked += 1
        return Ready(sessions=list(SESSIONS[offset : offset + limit]) if self.run_ids else [])

    def list_user_checkpoints(self, limit: int) -> Ready:
        saved = [
            Checkpoint(
                checkpoint_id=name,
                checkpoint_type="training",
                time=datetime.now(UTC),
                tinker_path=f"tinker://{run_id}/{name}",
            )
            for run_id in self.run_ids
            for name in ("weights/2", "sampler_weights/1")
        ]
        return Ready(checkpoints=saved)

    @property
    def client(self) -> RestClient:
        return cast(RestClient, self)


@pytest.mark.parametrize(
    ("text", "run_id"),
    [
        ("aaaa1", RUNS[0]),
        ("aaaa1111-0000-4000", RUNS[0]),
        ("aaaa2:train:1", RUNS[2]),
        ("aaaa2222-0000-4000-8000-000000000000:train:0", RUNS[1]),
        ("latest", RUNS[0]),
        ("first try", RUNS[1]),
        ("nothing-like-it", "nothing-like-it"),
        ("../etc", "../etc"),
    ],
)
def test_run_is_found_by_prefix_or_name(text: str, run_id: str) -> None:
    assert resolve_run(Lists(names={RUNS[1]: "first try"}).client, text) == run_id


def test_full_id_sends_no_request() -> None:
    lists = Lists()

    assert resolve_run(lists.client, RUNS[1]) == RUNS[1]
    assert resolve_session(lists.client, SESSIONS[1]) == SESSIONS[1]
    assert lists.num_asked == 0


def test_ambiguous_prefix_lists_candidates() -> None:
    with pytest.raises(CliError) as caught:
        resolve_run(Lists(names={RUNS[0]: "first try"}).client, "aaaa")

    assert caught.value.message.splitlines() == [
        "'aaaa' matches 3 runs:",
        f"  {RUNS[0]} (first try)",
        f"  {RUNS[1]}",
        f"  {RUNS[2]}",
    ]
    with pytest.raises(CliError, match="matches 2 sessions"):
        resolve_session(Lists().client, "aaaa")


def test_candidate_list_is_limited() -> None:
    many = tuple(f"{SESSIONS[0]}:train:{number}" for number in range(2500))
    lists = Lists(many)

    with pytest.raises(CliError) as caught:
        resolve_run(lists.client, "aaaa")

    assert caught.value.message.splitlines()[-1] == "  and 995 more"
    assert lists.num_asked == 10


def test_latest_without_runs_is_an_error() -> None:
    empty = Lists(())
    for resolve in (resolve_run, resolve_session, resolve_path):
        with pytest.raises(CliError, match=r"No .* exist yet"):
            resolve(empty.client, "latest")


def test_checkpoint_path_resolves_prefix_and_latest() -> None:
    client = Lists().client

    assert resolve_path(client, "latest") == f"tinker://{RUNS[0]}/weights/2"
    newest = resolve_path(client, "latest", "sampler_weights")
    assert newest == f"tinker://{RUNS[0]}/sampler_weights/1"
    short = "tinker://aaaa2:train:1/weights/2"
    assert resolve_path(client, short) == f"tinker://{RUNS[2]}/weights/2"
    assert resolve_path(client, "./folder") == "./folder"
