"""A sequence ends where it should, and its dice depend on the seed and its number alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.sampling.asks import Ask
from tinkex.engine.sampling.case import Case, Sequence
from tinkex.engine.sampling.dice import Dice
from tinkex.engine.sampling.stops import Stops

ASK = Ask(
    prompt=np.array([1, 2]),
    num_samples=3,
    max_tokens=3,
    seed=5,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    stops=Stops(frozenset({9})),
    num_topk=0,
    about_prompt=None,
)


def _case(**fields: object) -> Case:
    case = Case("ticket", 1, None, replace(ASK, **fields))  # type: ignore[arg-type]
    case.open(None)
    return case


def _run(sequence: Sequence, *tokens: int) -> list[bool]:
    return [sequence.take(token, -1.0) for token in tokens]


def test_a_sequence_ends_at_a_stop_token_which_it_keeps() -> None:
    sequence = _case().fresh[0]
    assert _run(sequence, 4, 9) == [False, True]
    result = sequence.result()
    assert (result.tokens, result.stop_reason) == ([4, 9], "stop")


def test_a_sequence_ends_at_its_last_token() -> None:
    sequence = _case().fresh[0]
    assert _run(sequence, 4, 5, 6) == [False, False, True]
    assert sequence.result().stop_reason == "length"


def test_a_stop_at_the_last_token_is_a_stop() -> None:
    sequence = _case().fresh[0]
    _run(sequence, 4, 5, 9)
    assert sequence.result().stop_reason == "stop"


@given(st.integers(-(2**70), 2**70), st.integers(0, 1000))
def test_the_same_stream_gives_the_same_numbers(seed: int, index: int) -> None:
    one, other = Dice(seed, index), Dice(seed, index)
    numbers = [one.throw() for _ in range(70)]
    assert numbers == [other.throw() for _ in range(70)]
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert numbers[0] != Dice(seed, index + 1).throw()
    assert numbers[0] != Dice(seed + 1, index).throw()


def test_a_request_is_over_with_its_last_sample_and_answers_in_order() -> None:
    case = _case(max_tokens=1)
    started = case.take_waiting(3)
    assert not case.fresh
    for sequence, token in zip(started, (7, 8, 9), strict=True):
        sequence.take(token, -1.0)
    assert [case.finish(started[index]) for index in (2, 0, 1)] == [False, False, True]
    assert [one.tokens for one in case.response().sequences] == [[7], [8], [9]]


def test_a_paused_sample_goes_on_from_all_it_has() -> None:
    case = _case()
    first, *_ = case.take_waiting(3)
    first.take(4, -1.0)
    case.pause(first)
    tokens = case.next_tokens()
    assert tokens is not None
    assert tokens.tolist() == [1, 2, 4]
    assert case.waiting == [first]
    assert case.take_waiting(1) == [first]
