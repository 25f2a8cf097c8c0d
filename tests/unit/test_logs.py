"""Loggers: warnings by default, more on request, and rate limits."""

from __future__ import annotations

import io
import logging

import pytest

from tinkex.logs import ROOT, OncePerMinute, attach_logger, detach_logger, get_logger


def test_loggers_are_named_after_their_module() -> None:
    assert get_logger("tinkex.client.ordered_queue").parent is not None
    assert get_logger("tinkex.client.ordered_queue").name == "tinkex.client.ordered_queue"


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("debug", ["d", "i", "w", "e"]),
        ("INFO", ["i", "w", "e"]),
        ("warning", ["w", "e"]),
        ("error", ["e"]),
    ],
)
def test_level_filters_messages(level: str, shown: list[str]) -> None:
    stream = io.StringIO()
    handler = attach_logger(level, stream)
    logger = get_logger("tinkex.client.x")
    logger.debug("d")
    logger.info("i")
    logger.warning("w")
    logger.error("e")
    detach_logger(handler)
    logger.error("after")
    lines = stream.getvalue().splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == shown
    assert all("tinkex.client.x" in line for line in lines)


def test_unknown_level_is_refused_with_its_value() -> None:
    before = list(logging.getLogger(ROOT).handlers)
    with pytest.raises(ValueError, match=r"level must be one of debug.*got 'verbose'"):
        attach_logger("verbose")
    assert logging.getLogger(ROOT).handlers == before


def test_default_stream_is_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    handler = attach_logger("info")
    get_logger("tinkex.y").info("hello")
    detach_logger(handler)
    out, err = capsys.readouterr()
    assert out == ""
    assert "hello" in err


def test_once_per_minute() -> None:
    gate = OncePerMinute()
    assert gate.allows("a", now=0.0)
    assert not gate.allows("a", now=59.9)
    assert gate.allows("b", now=59.9)
    assert gate.allows("a", now=60.0)
    # The interval starts with an allowed message, not with a suppressed one.
    assert not gate.allows("a", now=119.0)


def test_rate_limit_state_is_per_instance() -> None:
    one, other = OncePerMinute(5.0), OncePerMinute(5.0)
    assert one.allows("a", now=1.0)
    assert other.allows("a", now=1.0)
    assert one.allows("a", now=6.0)


def test_default_clock_is_monotonic() -> None:
    gate = OncePerMinute()
    assert gate.allows("a")
    assert not gate.allows("a")
