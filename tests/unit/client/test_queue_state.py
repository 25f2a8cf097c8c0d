"""Queue states: parsing, notification and logging."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from tinkex.client.queue_state import (
    DEFAULT_REASONS,
    QueueState,
    QueueStateLogger,
    QueueStateNotifier,
)

Changes = list[tuple[QueueState, str | None]]


class Recorder:
    def __init__(self) -> None:
        self.changes: Changes = []

    def on_queue_state_change(
        self, queue_state: QueueState, queue_state_reason: str | None
    ) -> None:
        self.changes.append((queue_state, queue_state_reason))


class Broken:
    def on_queue_state_change(
        self, queue_state: QueueState, queue_state_reason: str | None
    ) -> None:
        raise ZeroDivisionError


def at_once(tell: Callable[[], None]) -> None:
    tell()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("active", QueueState.ACTIVE),
        ("ACTIVE", QueueState.ACTIVE),
        ("paused_rate_limit", QueueState.PAUSED_RATE_LIMIT),
        ("Paused_Capacity", QueueState.PAUSED_CAPACITY),
        ("paused_lunch", QueueState.UNKNOWN),
        ("", QueueState.UNKNOWN),
        (7, QueueState.UNKNOWN),
        # A null state means active.
        (None, QueueState.ACTIVE),
    ],
)
def test_parse_queue_state(text: object, expected: QueueState) -> None:
    assert QueueState.parse(text) is expected


def test_observer_gets_each_change_once() -> None:
    recorder = Recorder()
    watch = QueueStateNotifier(recorder, at_once)
    watch.update(QueueState.ACTIVE, None)
    watch.update(QueueState.PAUSED_CAPACITY, None)
    watch.update(QueueState.PAUSED_CAPACITY, None)
    watch.update(QueueState.PAUSED_CAPACITY, "full")
    watch.update(QueueState.PAUSED_CAPACITY, "full")
    watch.update(QueueState.ACTIVE, None)
    assert recorder.changes == [
        (QueueState.PAUSED_CAPACITY, None),
        (QueueState.PAUSED_CAPACITY, "full"),
        (QueueState.ACTIVE, None),
    ]


def test_event_hook_gets_same_changes() -> None:
    events: Changes = []
    watch = QueueStateNotifier(
        Recorder(), at_once, lambda state, reason: events.append((state, reason))
    )
    watch.update(QueueState.UNKNOWN, "x")
    watch.update(QueueState.UNKNOWN, "x")
    assert events == [(QueueState.UNKNOWN, "x")]


def test_observer_runs_on_given_executor() -> None:
    recorder = Recorder()
    later: list[Callable[[], None]] = []
    watch = QueueStateNotifier(recorder, later.append)
    watch.update(QueueState.PAUSED_RATE_LIMIT, None)
    assert recorder.changes == []
    later[0]()
    assert recorder.changes == [(QueueState.PAUSED_RATE_LIMIT, None)]


def test_raising_observer_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    watch = QueueStateNotifier(Broken(), at_once)
    with caplog.at_level(logging.WARNING, "tinkex"):
        watch.update(QueueState.PAUSED_CAPACITY, None)
    assert "observer raised" in caplog.text
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"queue_state": "paused_capacity"}, [(QueueState.PAUSED_CAPACITY, None)]),
        (
            {"queue_state": "PAUSED_RATE_LIMIT", "queue_state_reason": "why"},
            [(QueueState.PAUSED_RATE_LIMIT, "why")],
        ),
        ({"queue_state": None}, []),
        ({"detail": "slow down"}, []),
        ("slow down", []),
        (None, []),
    ],
)
def test_error_body_updates_state(body: object, expected: Changes) -> None:
    recorder = Recorder()
    QueueStateNotifier(recorder, at_once).update_from_body(body)
    assert recorder.changes == expected


def logged(
    caplog: pytest.LogCaptureFixture, kind: str, *changes: tuple[QueueState, str | None]
) -> list[str]:
    observer = QueueStateLogger(kind, "model-1")
    with caplog.at_level(logging.DEBUG, "tinkex"):
        for state, reason in changes:
            observer.on_queue_state_change(state, reason)
    return [record.getMessage() for record in caplog.records]


def test_active_state_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert logged(caplog, "training", (QueueState.ACTIVE, "fine")) == []


def test_server_reason_is_preferred(caplog: pytest.LogCaptureFixture) -> None:
    lines = logged(caplog, "training", (QueueState.PAUSED_RATE_LIMIT, "three are enough"))
    assert lines == ["Training of model-1 is paused: three are enough"]


@pytest.mark.parametrize(
    ("kind", "state", "words"),
    [
        ("training", QueueState.PAUSED_RATE_LIMIT, "concurrent training clients limit"),
        ("sampling", QueueState.PAUSED_RATE_LIMIT, "concurrent sampler weights limit"),
        ("training", QueueState.PAUSED_CAPACITY, "short of capacity"),
        ("sampling", QueueState.PAUSED_CAPACITY, "short of capacity"),
    ],
)
def test_default_reason_depends_on_kind(
    caplog: pytest.LogCaptureFixture, kind: str, state: QueueState, words: str
) -> None:
    assert words in DEFAULT_REASONS[kind, state]
    [line] = logged(caplog, kind, (state, None))
    assert words in line


def test_each_state_is_logged_once_per_minute(caplog: pytest.LogCaptureFixture) -> None:
    lines = logged(
        caplog,
        "sampling",
        (QueueState.PAUSED_CAPACITY, "one"),
        (QueueState.ACTIVE, None),
        (QueueState.PAUSED_CAPACITY, "two"),
        (QueueState.UNKNOWN, None),
        (QueueState.UNKNOWN, None),
    )
    assert len(lines) == 2
