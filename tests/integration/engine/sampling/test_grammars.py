"""Structured output: sampled texts follow their JSON schema, whatever else is in the batch."""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import numpy as np
import pytest

from tests.support.sampling_runner import (
    EOS,
    adapter,
    answer,
    answered,
    drain,
    failure,
    inference_request,
    model_logits,
    new_runner,
    prompt_of,
    request,
    tokens_of,
)
from tests.support.tiny_models import tiny_host
from tinkex import text
from tinkex.engine.grammar_schemas import build_grammar
from tinkex.engine.inference_request import InferenceRequest
from tinkex.engine.sampling.continuous_batching import ContinuousBatcher
from tinkex.errors import RequestErrorCategory
from tinkex.models import TINY_FOLDER
from tinkex.nn.hosted_model import HostedModel

TOKENIZER = text.load_tokenizer(str(TINY_FOLDER))
PROMPT = prompt_of(30)
ANIMAL = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "maximum": 9}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}
#: A document of it is long, so that its sequence can be preempted.
DIGITS = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 60, "maxItems": 60}
#: Keys and values of two heads in two layers.
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4


@functools.cache
def host() -> HostedModel:
    """A model with random weights and the vocabulary of a real tokenizer."""
    return tiny_host(vocab_size=1536)


def runner(**settings: Any) -> ContinuousBatcher:
    return new_runner(host(), TOKENIZER, **settings)


def asked(schema: dict[str, Any], num_samples: int = 1, **fields: Any) -> InferenceRequest:
    grammar = build_grammar(schema)
    fields = {"max_tokens": 400, "grammar": grammar, "temperature": 1.0, **fields}
    return inference_request(PROMPT, num_samples, **fields)


def decode(tokens: list[int]) -> str:
    assert tokens[-1] in EOS
    return TOKENIZER.decode(tokens[:-1])


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"seed": 1}, {"seed": 2, "top_k": 3, "top_p": 0.9}]
)
def test_text_follows_the_schema_and_ends(params: dict[str, Any]) -> None:
    response = answer(runner(), asked(ANIMAL, 3, **params))
    for sequence in response.sequences:
        animal = json.loads(decode(sequence.tokens))
        assert animal.keys() == {"kind", "legs"}
        assert animal["kind"] in {"cat", "dog"}
        assert animal["legs"] <= 9
        assert sequence.stop_reason == "stop"


def test_empty_schema_means_any_object() -> None:
    for seed in range(3):
        [tokens] = tokens_of(answer(runner(), asked({}, seed=seed, max_tokens=480)))
        assert TOKENIZER.decode(tokens).startswith("{")
        if tokens[-1] in EOS:
            assert isinstance(json.loads(decode(tokens)), dict)


def test_logprobs_are_those_before_the_mask() -> None:
    [sequence] = answer(runner(), asked(ANIMAL, seed=1, topk_sample_logprobs=4)).sequences
    logits = model_logits(host(), [*PROMPT, *sequence.tokens[:-1]])[len(PROMPT) - 1 :]
    logprobs = logits.log_softmax(-1).numpy()
    rows = range(len(sequence.tokens))
    assert np.allclose(sequence.logprobs, logprobs[rows, sequence.tokens], atol=1e-4)
    assert sequence.topk_logprobs_np is not None
    assert np.allclose(sequence.topk_logprobs_np.logprobs, -np.sort(-logprobs)[:, :4], atol=1e-4)


def test_very_unlikely_tokens_can_be_required() -> None:
    # At this temperature, the probability of almost every token is 0 in float32.
    [sequence] = answer(runner(), asked(ANIMAL, seed=1, temperature=1e-4)).sequences
    assert json.loads(decode(sequence.tokens)).keys() == {"kind", "legs"}
    assert min(sequence.logprobs or ()) < -1000
    assert np.isfinite(sequence.logprobs).all()


def test_tokens_are_reported_from_the_first_one() -> None:
    """Also if the request is watched while its grammar is compiled."""
    batcher, expected = runner(), answer(runner(), asked(DIGITS, seed=3)).sequences[0].tokens
    batcher.add("job", None, asked(DIGITS, seed=3))
    batcher.watched.watch("job")
    tokens: list[int] = []
    assert batcher.watched.take_progress() == []
    while len(batcher):
        batcher.step()
        tokens += [token for part in batcher.watched.take_progress() for token in part.tokens]
    assert tokens
    assert tokens == expected[: len(tokens)]
    assert not batcher.watched


def test_other_requests_do_not_change_a_sequence_or_are_changed() -> None:
    jobs = {
        "json": asked(ANIMAL, 2, seed=5),
        "digits": asked(DIGITS, seed=6, top_k=20),
        "plain": request(PROMPT, 2, seed=7, max_tokens=60),
        "greedy": request(PROMPT, temperature=0.0, max_tokens=60, topk_sample_logprobs=3),
    }
    together = runner()
    for job_id, one in jobs.items():
        together.add(job_id, None, one)
    for job_id, outcome in drain(together).items():
        alone = answer(runner(), jobs[job_id])
        assert tokens_of(answered(outcome)) == tokens_of(alone), job_id


def test_plain_requests_have_the_same_bits_beside_a_grammar() -> None:
    plain = request(PROMPT, 2, seed=7, max_tokens=40, topk_sample_logprobs=3)
    beside = request(PROMPT, 1, seed=8, max_tokens=400)
    runners = runner(), runner()
    for each, other in zip(runners, (beside, asked(DIGITS, seed=8)), strict=True):
        each.add("other", None, other)
        while not each._queue:
            each.step()
        each.add("plain", None, plain)
    first, second = (answered(drain(each)["plain"]) for each in runners)
    assert first == second


def test_preempted_sequence_continues_to_follow_its_grammar() -> None:
    jobs = {str(n): asked(DIGITS, seed=n, max_tokens=200) for n in range(3)}
    small = runner(cache_bytes=700 * TOKEN_BYTES)
    for job_id, one in jobs.items():
        small.add(job_id, None, one)
    preempted: set[str] = set()
    outcomes = {}
    while len(small):
        preempted |= {each.job_id for each in small._queue.values() if each.preempted}
        outcomes.update(small.step())
    assert preempted
    for job_id, outcome in outcomes.items():
        tokens = tokens_of(answered(outcome))
        assert set(decode(tokens[0])) <= set("[1, 2]")
        assert tokens == tokens_of(answer(runner(), jobs[job_id]))


def test_sequence_continues_after_the_kv_cache_was_lost() -> None:
    one = asked(DIGITS, seed=3)
    wanted = answer(runner(), one)
    broken = runner()
    broken.add("job", None, one)
    while not any(len(each.tokens) > 20 for job in broken._queue.values() for each in job.running):
        broken.step()
    # As after an error of another request.
    broken._reset_memory()
    for each in broken._queue.values():
        each.reset()
    assert tokens_of(answered(drain(broken)["job"])) == tokens_of(wanted)


def test_grammar_can_begin_after_a_text() -> None:
    free = tokens_of(answer(runner(), request(PROMPT, seed=4, max_tokens=12, stop=[])))[0]
    start = TOKENIZER.decode(free[9:11])
    one = asked(ANIMAL, seed=4, grammar_start_text=start)
    [tokens] = tokens_of(answer(runner(), one))
    end = next(n for n in range(13) if start in TOKENIZER.decode(tokens[:n]))
    assert tokens[:end] == free[:end]
    assert json.loads(decode(tokens[end:])).keys() == {"kind", "legs"}


def test_adapters_follow_grammars() -> None:
    own = adapter(1, host=host())
    [tokens] = tokens_of(answer(runner(), asked(ANIMAL, seed=1), own))
    assert json.loads(decode(tokens)).keys() == {"kind", "legs"}


# --- failures ------------------------------------------------------------------------------------
def test_grammar_that_allows_nothing_fails_only_its_request() -> None:
    endless = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    batch = runner()
    batch.add("bad", None, asked({**endless, "$ref": "#/$defs/a"}, 3))
    batch.add("good", None, asked(ANIMAL, seed=1))
    outcomes = drain(batch)
    alone = answer(runner(), asked(ANIMAL, seed=1))
    assert tokens_of(answered(outcomes["good"])) == tokens_of(alone)
    bad = outcomes["bad"]
    assert "cannot follow the JSON schema" in bad.message
    assert bad.category is RequestErrorCategory.User


def test_complex_pattern_fails_its_request() -> None:
    pattern = {"type": "string", "pattern": "^(.|b)*a(.|b){200}$"}
    reason = failure(runner(), asked(pattern, seed=1, max_tokens=480))
    assert "cannot follow the JSON schema: lexer error: too many states" in reason.message


def test_grammar_that_cannot_be_compiled_fails_its_request() -> None:
    reason = failure(runner(), asked({"type": "integer", "multipleOf": 999999937}))
    assert "the JSON schema cannot be used: fuel exhausted" in reason.message
    assert reason.category is RequestErrorCategory.User


def test_model_needs_a_tokenizer() -> None:
    reason = failure(new_runner(host()), asked(ANIMAL))
    assert "needs a model with a tokenizer" in reason.message


def test_library_may_be_missing_in_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    one = asked(ANIMAL)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    reason = failure(runner(), one)
    assert "needs llguidance" in reason.message
    assert "structured" in reason.message


def test_cancelled_request_is_not_computed() -> None:
    batch = runner()
    batch.add("job", None, asked(ANIMAL))
    assert len(batch) == 1
    batch.cancel("job")
    assert len(batch) == 0
    assert drain(batch) == {}
