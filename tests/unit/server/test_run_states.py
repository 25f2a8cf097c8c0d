"""The state of a run, derived from queue, session and model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.server.http.test_serializers import run, session
from tinkex.server.http.run_summaries import ACTIVE_SECONDS, RunWorkload, derive_state, run_name
from tinkex.store.records import RunState

NOW = 1000.0
BUSY = {"num_queued": 2, "num_running": 1}
OVER: dict[str, Any] = {"finished_at": 900.0, "finish_reason": "success"}


@pytest.mark.parametrize(
    ("run_state", "ending", "work", "idle_seconds", "state"),
    [
        (RunState.READY, {}, BUSY, 500, "training"),
        (RunState.READY, {}, {"num_queued": 2}, 0, "waiting"),
        (RunState.READY, {}, {}, 1, "training"),
        (RunState.READY, {}, {}, ACTIVE_SECONDS, "idle"),
        (RunState.CREATING, {}, {}, 0, "waiting"),
        (RunState.CREATING, {"expired_at": 1.0}, {}, 0, "interrupted"),
        (RunState.UNLOADED, {}, {}, 0, "finished"),
        (RunState.READY, OVER, {}, 0, "finished"),
        (RunState.READY, OVER, BUSY, 0, "training"),
        (RunState.READY, OVER | {"finish_reason": "errored"}, {}, 0, "failed"),
        (RunState.UNLOADED, OVER | {"finish_reason": "interrupted"}, {}, 0, "interrupted"),
        (RunState.READY, {"expired_at": 900.0}, {}, 0, "interrupted"),
        (RunState.FAILED, {}, BUSY, 0, "failed"),
        (RunState.CORRUPTED, OVER, {}, 0, "failed"),
    ],
)
def test_derive_state(
    run_state: RunState,
    ending: dict[str, Any],
    work: dict[str, int],
    idle_seconds: float,
    state: str,
) -> None:
    derived = derive_state(
        run(state=run_state), session(**ending), RunWorkload(**work), NOW - idle_seconds, NOW
    )

    assert derived == state


@pytest.mark.parametrize(
    ("metadata", "session_name", "name"),
    [
        ({"name": "mine"}, "sweep", "mine"),
        ({"name": "  "}, "sweep", "sweep"),
        ({"name": 7}, None, None),
        (None, "sweep", "sweep"),
    ],
)
def test_run_name_falls_back_to_session_name(
    metadata: dict[str, Any] | None, session_name: str | None, name: str | None
) -> None:
    assert run_name(run(user_metadata=metadata), session(display_name=session_name)) == name
