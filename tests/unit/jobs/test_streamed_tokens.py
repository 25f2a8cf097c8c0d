"""What a reader of a token stream accepts, and what it takes from the stored result."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.protocol import SampleProgress
from tinkex.jobs.streamed_tokens import StreamDiverged, StreamedTokens
from tinkex.types.sampling import TopkRow

WORKER, OTHER = object(), object()


@dataclass(frozen=True)
class Stored:
    """A sequence of a result, with log-probabilities that are derived from its tokens."""

    tokens: list[int]

    @property
    def logprobs(self) -> list[float]:
        return [-float(token) for token in self.tokens]

    @property
    def topk_logprobs(self) -> list[TopkRow | None]:
        return [[(token, -1.0)] for token in self.tokens]

    def part(self, sequence: int, start: int, end: int) -> SampleProgress:
        return SampleProgress(
            "job",
            sequence,
            start,
            tuple(self.tokens[start:end]),
            tuple(self.logprobs[start:end]),
            tuple(self.topk_logprobs[start:end]),
        )


SEQUENCE = Stored([5, 6, 7, 8])


def started() -> StreamedTokens:
    received = StreamedTokens("job")
    received.start(WORKER, 1)
    return received


def test_tokens_are_appended_at_their_offset() -> None:
    received = started()
    assert received.accept(WORKER, SEQUENCE.part(0, 0, 2)) == SEQUENCE.part(0, 0, 2)
    assert received.accept(WORKER, SEQUENCE.part(0, 2, 3)) == SEQUENCE.part(0, 2, 3)
    assert received.rest([SEQUENCE]) == [SEQUENCE.part(0, 3, 4)]
    assert received.rest([SEQUENCE]) == []


def test_repeated_tokens_are_dropped() -> None:
    received = started()
    received.accept(WORKER, SEQUENCE.part(0, 0, 2))
    assert received.accept(WORKER, SEQUENCE.part(0, 0, 1)) is None
    assert received.accept(WORKER, SEQUENCE.part(0, 1, 4)) == SEQUENCE.part(0, 2, 4)


def test_after_a_gap_the_rest_comes_from_the_result() -> None:
    received = started()
    received.accept(WORKER, SEQUENCE.part(0, 0, 1))
    assert received.accept(WORKER, SEQUENCE.part(0, 2, 3)) is None
    assert received.accept(WORKER, SEQUENCE.part(0, 1, 2)) is None
    assert not received.has_source
    assert received.rest([SEQUENCE]) == [SEQUENCE.part(0, 1, 4)]


def test_a_worker_that_sends_from_the_start_closes_the_gap() -> None:
    received = started()
    received.accept(WORKER, SEQUENCE.part(0, 1, 2))
    received.start(WORKER, 1)
    assert received.accept(WORKER, SEQUENCE.part(0, 0, 3)) == SEQUENCE.part(0, 0, 3)


def test_a_later_attempt_that_repeats_the_tokens_continues() -> None:
    received = started()
    received.accept(WORKER, SEQUENCE.part(0, 0, 3))
    received.start(OTHER, 2)
    assert received.accept(OTHER, SEQUENCE.part(0, 0, 2)) is None
    assert received.accept(OTHER, SEQUENCE.part(0, 2, 4)) == SEQUENCE.part(0, 3, 4)


def test_a_later_attempt_that_draws_other_tokens_ends_the_stream() -> None:
    received = started()
    received.accept(WORKER, SEQUENCE.part(0, 0, 3))
    received.start(OTHER, 2)
    with pytest.raises(StreamDiverged, match="send the request again"):
        received.accept(OTHER, Stored([5, 9]).part(0, 0, 2))


def test_earlier_attempts_and_unknown_workers_are_ignored() -> None:
    received = StreamedTokens("job")
    assert received.accept(OTHER, SEQUENCE.part(0, 0, 1)) is None
    received.start(WORKER, 2)
    received.start(OTHER, 1)
    assert received.accept(OTHER, Stored([1]).part(0, 0, 1)) is None
    assert received.accept(WORKER, SEQUENCE.part(0, 0, 1)) == SEQUENCE.part(0, 0, 1)
    received.lose_source(WORKER)
    assert received.accept(WORKER, SEQUENCE.part(0, 1, 2)) is None


@pytest.mark.parametrize("stored", [Stored([5]), Stored([5, 9, 7]), Stored([])])
def test_a_result_that_differs_from_what_was_sent_is_an_error(stored: Stored) -> None:
    received = started()
    received.accept(WORKER, SEQUENCE.part(0, 0, 2))
    with pytest.raises(StreamDiverged):
        received.rest([stored])


@st.composite
def transmissions(draw: st.DrawFn) -> tuple[list[Stored], list[list[SampleProgress]]]:
    """Sequences, and what connections carried: each from the start, with drops and a cut."""
    stored = [
        Stored(tokens)
        for tokens in draw(st.lists(st.lists(st.integers(0, 99), max_size=12), max_size=4))
    ]
    connections = []
    for _ in range(draw(st.integers(0, 4))):
        sent: list[SampleProgress] = []
        offsets = [0] * len(stored)
        for _ in range(draw(st.integers(0, 20))):
            if not stored:
                break
            index = draw(st.integers(0, len(stored) - 1))
            end = draw(st.integers(offsets[index], len(stored[index].tokens)))
            sent.append(stored[index].part(index, offsets[index], end))
            offsets[index] = end
        is_dropped = draw(st.lists(st.booleans(), min_size=len(sent), max_size=len(sent)))
        connections.append(
            [part for part, dropped in zip(sent, is_dropped, strict=True) if not dropped]
        )
    return stored, connections


@given(transmissions())
def test_drops_and_cuts_never_change_the_text(
    case: tuple[list[Stored], list[list[SampleProgress]]],
) -> None:
    stored, connections = case
    received = StreamedTokens("job")
    accepted = []
    for attempt, parts in enumerate(connections):
        source = object()
        received.start(source, attempt)
        accepted += [received.accept(source, part) for part in parts]
        received.lose_source(source)
    yielded = [part for part in accepted if part is not None] + received.rest(stored)
    for index, sequence in enumerate(stored):
        own = [part for part in yielded if part.sequence == index]
        position = 0
        for part in own:
            assert part == sequence.part(index, position, position + len(part.tokens))
            assert part.tokens
            position += len(part.tokens)
        assert position == len(sequence.tokens)
