"""The state of requests and sequences, and their random streams."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.sampling.request import SampleSpec
from tinkex.engine.sampling.request_state import RequestState, SequenceState
from tinkex.engine.sampling.stop_conditions import StopConditions
from tinkex.engine.sampling.token_sampler import RandomStream

SPEC = SampleSpec(
    prompt=np.array([1, 2]),
    num_samples=3,
    max_tokens=3,
    seed=5,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    stops=StopConditions(frozenset({9})),
    num_topk=0,
    prompt_logprobs=None,
)


def _new_request(**fields: object) -> RequestState:
    request = RequestState("job", 1, None, replace(SPEC, **fields))  # type: ignore[arg-type]
    request.create_sequences(None)
    return request


def _run(sequence: SequenceState, *tokens: int) -> list[bool]:
    return [sequence.append_token(token, -1.0) for token in tokens]


def test_sequence_keeps_its_stop_token() -> None:
    sequence = _new_request().unstarted[0]
    assert _run(sequence, 4, 9) == [False, True]
    result = sequence.result()
    assert (result.tokens, result.stop_reason) == ([4, 9], "stop")


def test_sequence_ends_at_max_tokens() -> None:
    sequence = _new_request().unstarted[0]
    assert _run(sequence, 4, 5, 6) == [False, False, True]
    assert sequence.result().stop_reason == "length"


def test_stop_token_at_max_tokens_is_a_stop() -> None:
    sequence = _new_request().unstarted[0]
    _run(sequence, 4, 5, 9)
    assert sequence.result().stop_reason == "stop"


@given(st.integers(-(2**70), 2**70), st.integers(0, 1000))
def test_random_stream_is_reproducible(seed: int, index: int) -> None:
    one, other = RandomStream(seed, index), RandomStream(seed, index)
    numbers = [one.uniform() for _ in range(70)]
    assert numbers == [other.uniform() for _ in range(70)]
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert numbers[0] != RandomStream(seed, index + 1).uniform()
    assert numbers[0] != RandomStream(seed + 1, index).uniform()


def test_request_finishes_with_last_sequence_in_order() -> None:
    request = _new_request(max_tokens=1)
    started = request.start_next(3)
    assert not request.unstarted
    for sequence, token in zip(started, (7, 8, 9), strict=True):
        sequence.append_token(token, -1.0)
    assert [request.finish_sequence(started[index]) for index in (2, 0, 1)] == [False, False, True]
    assert [one.tokens for one in request.build_response().sequences] == [[7], [8], [9]]


def test_preempted_sequence_resumes_from_all_tokens() -> None:
    request = _new_request()
    first, *_ = request.start_next(3)
    first.append_token(4, -1.0)
    request.preempt(first)
    tokens = request.tokens_to_prefill()
    assert tokens is not None
    assert tokens.tolist() == [1, 2, 4]
    assert request.next_sequences == [first]
    assert request.start_next(1) == [first]
