"""Bulk deletion: concurrency limit, failures and interrupts."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.cli.commands.checkpoint import delete
from tinkex.cli.commands.checkpoint.delete import (
    FATAL_ERRORS,
    MAX_IN_FLIGHT,
    BulkDeletion,
    DeletionResult,
)
from tinkex.cli.context import Context
from tinkex.cli.main import run
from tinkex.errors import (
    APIConnectionError,
    AuthenticationError,
    InvalidInput,
    NotFoundError,
    TinkexError,
)

GONE = NotFoundError("there is no such checkpoint")

#: A full id, which needs no lookup.
RUN_ID = "82810c9f-dd83-49e2-8069-20d10792b196:train:0"


def done(error: BaseException | None = None) -> Future[None]:
    """A completed future."""
    future: Future[None] = Future()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
    return future


@given(verdicts=st.lists(st.booleans(), max_size=3 * MAX_IN_FLIGHT))
def test_each_path_has_one_outcome(verdicts: list[bool]) -> None:
    paths = [f"p{number}" for number in range(len(verdicts))]
    by_path = dict(zip(paths, verdicts, strict=True))
    counts: list[int] = []
    outcome = BulkDeletion(lambda path: done(None if by_path[path] else GONE), paths).run(
        counts.append
    )
    assert list(outcome.deleted) == [path for path in paths if by_path[path]]
    assert [path for path, _ in outcome.failed] == [path for path in paths if not by_path[path]]
    assert (outcome.unknown, outcome.untried) == ([], [])
    assert sum(counts) == len(paths)
    assert outcome.exit_code == int(not all(verdicts))


def test_in_flight_requests_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    open_futures: list[Future[None]] = []
    most: list[int] = []

    def send(path: str) -> Future[None]:
        open_futures.append(Future())
        most.append(len(open_futures))
        return open_futures[-1]

    def answer_one(under_way: set[Future[None]], return_when: str) -> tuple[Any, Any]:
        first = open_futures.pop(0)
        first.set_result(None)
        return {first}, under_way - {first}

    monkeypatch.setattr("concurrent.futures.wait", answer_one)
    outcome = BulkDeletion(send, [str(n) for n in range(100)]).run()
    assert len(outcome.deleted) == 100
    assert max(most) == MAX_IN_FLIGHT


@pytest.mark.parametrize("error", [APIConnectionError("no answer"), AuthenticationError("no")])
def test_fatal_error_stops_sending(error: TinkexError) -> None:
    sent: list[str] = []

    def send(path: str) -> Future[None]:
        sent.append(path)
        return done(error)

    paths = [str(n) for n in range(100)]
    outcome = BulkDeletion(send, paths).run()
    assert isinstance(error, FATAL_ERRORS)
    assert outcome.shared_error is error
    assert len(sent) == MAX_IN_FLIGHT
    assert list(outcome.untried) == paths[MAX_IN_FLIGHT:]


def test_deletions_before_fatal_error_are_reported() -> None:
    answers = iter([done(), done(APIConnectionError("no answer"))])
    outcome = BulkDeletion(lambda path: next(answers), ["a", "b"]).run()
    assert outcome.shared_error is None
    assert (outcome.deleted, outcome.exit_code) == (["a"], 1)


def test_send_error_fails_only_that_path() -> None:
    def send(path: str) -> Future[None]:
        if path == "bad":
            raise InvalidInput("Invalid tinker path: 'bad'")
        return done()

    outcome = BulkDeletion(send, ["a", "bad", "b"]).run()
    assert outcome.deleted == ["a", "b"]
    assert outcome.to_dict()["failed"] == [
        {"tinker_path": "bad", "error": "Invalid tinker path: 'bad'"}
    ]


def interrupted_at(path: str, answer: Future[None]) -> Callable[[str], Future[None]]:
    """A send function that is interrupted at one path; the next path gets this result."""

    def send(asked: str) -> Future[None]:
        if asked == path:
            raise KeyboardInterrupt
        return answer if asked == "b" else done()

    return send


def test_interrupt_reports_all_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delete, "SETTLE_SECONDS", 0.0)
    outcome = BulkDeletion(interrupted_at("c", Future()), ["a", "b", "c", "d"]).run()
    assert outcome == DeletionResult(
        deleted=["a"], failed=[], unknown=["b", "c"], untried=["d"], is_interrupted=True
    )
    assert outcome.exit_code == 130
    text = outcome.to_text()
    assert text.splitlines()[:3] == ["Interrupted.", "Deleted 1 checkpoint.", "  a"]
    assert "may or may not be deleted (2):\n  b\n  c" in text
    assert "Not deleted (1):\n  d" in text


def test_second_interrupt_stops_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("concurrent.futures.wait", interrupt)
    outcome = BulkDeletion(lambda path: Future(), ["a", "b"]).run()
    assert (outcome.unknown, outcome.is_interrupted) == (["a", "b"], True)


class StubService(SimpleNamespace):
    """Fake of the service client and its REST client."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        return None

    def rest_client(self) -> Self:
        return self


@pytest.mark.parametrize("error", [APIConnectionError("no answer"), AuthenticationError("no")])
def test_shared_error_is_reported_once(
    error: TinkexError, capsys: pytest.CaptureFixture[str]
) -> None:
    stub: Any = StubService(delete_checkpoint_from_tinker_path=lambda path: done(error))
    context = Context(make_service=lambda config: stub)
    paths = [f"tinker://{RUN_ID}/weights/{number}" for number in range(3)]
    outcome = run(["checkpoint", "delete", "-y", *paths], context)
    assert (outcome.exit_code, outcome.error) == (1, error)
    told = capsys.readouterr()
    assert told.err.count("Error: ") == 1
    assert len(told.err.splitlines()) == 2
