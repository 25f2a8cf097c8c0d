from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.server.http.run_summaries import RunProgressState, RunSummary, RunWorkload
from tinkex.server.http.serializers import serialize_run, serialize_session, stringify_metadata
from tinkex.store.records import RunRecord, RunState, SessionRecord
from tinkex.store.sessions import SessionWithStorage


@given(st.dictionaries(st.text(), st.none() | st.text() | st.integers() | st.lists(st.booleans())))
def test_metadata_values_become_strings(metadata: dict[str, Any]) -> None:
    shown = stringify_metadata(metadata)

    assert shown is not None and shown.keys() == metadata.keys()
    for name, value in metadata.items():
        assert isinstance(shown[name], str)
        assert not isinstance(value, str) or shown[name] == value


def run(**fields: Any) -> RunRecord:
    values: dict[str, Any] = {
        "id": "s:train:0",
        "tenant_id": "t",
        "session_id": "s",
        "base_model": "m",
        "spec": {"rank": 8},
        "user_metadata": {"k": "v"},
        "state": RunState.READY,
        "created_at": 0.0,
        "used_at": 1.0,
    }
    return RunRecord(**(values | fields))


def session(**fields: Any) -> SessionRecord:
    values: dict[str, Any] = {
        "id": "s",
        "tenant_id": "t",
        "project_id": "p",
        "display_name": None,
        "tags": [],
        "user_metadata": {},
        "sdk_version": "1",
        "created_at": 0.0,
        "seen_at": 0.0,
    }
    return SessionRecord(**values | fields)


def summary() -> RunSummary:
    return RunSummary(
        run=run(),
        session=session(),
        name="mine",
        state=RunProgressState.IDLE,
        workload=RunWorkload(),
        metrics={"loss": 1.5},
        active_at=0.0,
    )


@pytest.mark.parametrize("state", list(RunState))
def test_only_corrupted_run_is_marked_corrupted(state: RunState) -> None:
    shown = serialize_run(run(state=state), {}, None)

    assert shown.corrupted is (state is RunState.CORRUPTED)


def test_run_metadata_hidden_from_other_tenants() -> None:
    own = serialize_run(run(num_steps=3), {}, summary())
    other = serialize_run(run(num_steps=3), {}, None)

    assert (own.user_metadata, own.name, own.state) == ({"k": "v"}, "mine", "idle")
    assert (own.step, own.metrics) == (3, {"loss": 1.5})
    hidden = (other.user_metadata, other.name, other.state, other.step, other.metrics)
    assert hidden == (None,) * 5


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({}, "active"),
        ({"expired_at": 5.0}, "cancelled"),
        ({"finished_at": 5.0, "finish_reason": "interrupted"}, "client_finished"),
        ({"finished_at": 5.0, "finish_reason": "errored", "expired_at": 6.0}, "client_finished"),
    ],
)
def test_session_status_depends_on_its_end(fields: dict[str, Any], status: str) -> None:
    shown = serialize_session(SessionWithStorage(session(**fields), 2, 30))

    assert shown.status is not None and shown.status.type == status
    assert (shown.checkpoints_count, shown.checkpoint_storage_bytes) == (2, 30)
