from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.server.describe import describe_run, describe_session, texts
from tinkex.store.records import Run, RunState, Session
from tinkex.store.searching import SessionFacts


@given(st.dictionaries(st.text(), st.none() | st.text() | st.integers() | st.lists(st.booleans())))
def test_what_users_attach_is_shown_as_text(metadata: dict[str, Any]) -> None:
    shown = texts(metadata)

    assert shown is not None and shown.keys() == metadata.keys()
    for name, value in metadata.items():
        assert isinstance(shown[name], str)
        assert not isinstance(value, str) or shown[name] == value


def run(**fields: Any) -> Run:
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
    return Run(**(values | fields))


@pytest.mark.parametrize("state", list(RunState))
def test_only_a_run_that_lost_its_state_is_called_corrupted(state: RunState) -> None:
    shown = describe_run(run(state=state), {}, is_own=True)

    assert shown.corrupted is (state is RunState.CORRUPTED)


def test_others_do_not_see_what_was_attached_to_a_run() -> None:
    assert describe_run(run(), {}, is_own=True).user_metadata == {"k": "v"}
    assert describe_run(run(), {}, is_own=False).user_metadata is None


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({}, "active"),
        ({"expired_at": 5.0}, "cancelled"),
        ({"finished_at": 5.0, "finish_reason": "interrupted"}, "client_finished"),
        ({"finished_at": 5.0, "finish_reason": "errored", "expired_at": 6.0}, "client_finished"),
    ],
)
def test_a_session_shows_how_it_is_doing(fields: dict[str, Any], status: str) -> None:
    session = Session(
        id="s",
        tenant_id="t",
        project_id="p",
        display_name=None,
        tags=[],
        user_metadata={},
        sdk_version="1",
        created_at=0.0,
        seen_at=0.0,
        **fields,
    )

    shown = describe_session(SessionFacts(session, 2, 30))

    assert shown.status is not None and shown.status.type == status
    assert (shown.checkpoints_count, shown.checkpoint_storage_bytes) == (2, 30)
