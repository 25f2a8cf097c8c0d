"""Every option of a sample request, compared with the model's own output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.support.sampling_runner import (
    adapter,
    answer,
    failure,
    inference_request,
    model_logits,
    new_runner,
    prompt_of,
    request,
    shared_host,
    tokens_of,
)
from tinkex.errors import RequestErrorCategory
from tinkex.types import TensorData
from tinkex.types.sampling import FILLER_LOGPROB

PROMPT = prompt_of(40)


def _logprobs(tokens: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    logits = model_logits(shared_host(), tokens, adapter(1))
    return (logits / temperature).log_softmax(-1).numpy()


# --- sampled tokens ------------------------------------------------------------------------------
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_topk_sample_logprobs_are_after_temperature(temperature: float) -> None:
    asked = request(PROMPT, 2, topk_sample_logprobs=5, temperature=temperature, top_k=3, seed=1)
    for one in answer(new_runner(), asked, adapter(1)).sequences:
        wanted = _logprobs(PROMPT + one.tokens[:-1], temperature or 1.0)[len(PROMPT) - 1 :]
        topk = one.topk_logprobs_np
        assert topk is not None
        assert topk.token_ids.shape == topk.logprobs.shape == (8, 5)
        assert topk.token_ids.dtype == np.int32
        assert (topk.token_ids == np.argsort(-wanted, axis=1, kind="stable")[:, :5]).all()
        assert np.allclose(topk.logprobs, -np.sort(-wanted, axis=1)[:, :5], atol=1e-4)


def test_greedy_reports_logprobs_at_temperature_one() -> None:
    one = answer(new_runner(), request(PROMPT, temperature=0.0), adapter(1)).sequences[0]
    wanted = _logprobs(PROMPT + one.tokens[:-1])[len(PROMPT) - 1 :]
    assert one.tokens == wanted.argmax(axis=1).tolist()
    assert np.allclose(one.logprobs, wanted.max(axis=1), atol=1e-4)


def test_truncation_does_not_change_logprobs() -> None:
    asked = request(PROMPT, top_k=2, top_p=0.5, seed=4)
    one = answer(new_runner(), asked, adapter(1)).sequences[0]
    wanted = _logprobs(PROMPT + one.tokens[:-1])[len(PROMPT) - 1 :]
    assert np.allclose(one.logprobs, wanted[range(8), one.tokens], atol=1e-4)


def test_top_k_one_tiny_top_p_and_tiny_temperature_are_greedy() -> None:
    greedy = answer(new_runner(), request(PROMPT, temperature=0.0, max_tokens=30))
    hot = answer(new_runner(), request(PROMPT, temperature=5.0, top_k=1, max_tokens=30))
    tiny = answer(new_runner(), request(PROMPT, top_p=1e-9, max_tokens=30))
    cold = answer(new_runner(), request(PROMPT, temperature=1e-40, max_tokens=30))
    assert tokens_of(greedy) == tokens_of(hot) == tokens_of(tiny) == tokens_of(cold)


# --- stop conditions -----------------------------------------------------------------------------
class _Letters:
    """Decodes every token to one letter."""

    def decode(self, token_ids: Sequence[int], /) -> str:
        return "".join(chr(0x4E00 + token) for token in token_ids)


def test_every_stop_condition_ends_a_sequence() -> None:
    plain = tokens_of(answer(new_runner(), request(PROMPT, temperature=0.0, max_tokens=60)))[0]
    ends = {
        "tokens": [plain[7]],
        "text": _Letters().decode(plain[6:9]),
        "texts": ["nothing", _Letters().decode(plain[6:9])],
    }
    for name, stop in ends.items():
        asked = request(PROMPT, temperature=0.0, max_tokens=60, stop=stop)
        one = answer(new_runner(texts=_Letters()), asked).sequences[0]
        end = plain.index(plain[7]) + 1 if name == "tokens" else 9
        assert one.tokens == plain[:end], name
        assert one.stop_reason == "stop"


def test_eos_ends_a_sequence_unless_stop_is_given() -> None:
    # At a high temperature every token is sampled soon.
    params = {"temperature": 50.0, "max_tokens": 400, "seed": 2}
    short = answer(new_runner(), request(PROMPT, stop=None, **params)).sequences[0]
    assert short.stop_reason == "stop"
    assert short.tokens.index(2) == len(short.tokens) - 1
    long = answer(new_runner(), request(PROMPT, stop=[], **params)).sequences[0]
    assert long.stop_reason == "length"
    assert len(long.tokens) == 400
    assert long.tokens[: len(short.tokens)] == short.tokens


def test_stop_texts_and_tokens_are_added_to_eos() -> None:
    params = {"temperature": 50.0, "max_tokens": 400, "seed": 2}
    whole = tokens_of(answer(new_runner(), request(PROMPT, stop=None, **params)))[0]
    text = _Letters().decode(whole[5:7])
    ends = {
        len(whole): {"stop_texts": ("nothing",)},
        7: {"stop_texts": (text,)},
        whole.index(whole[3]) + 1: {"stop_texts": (text,), "stop_token_ids": (whole[3],)},
    }
    for end, stops in ends.items():
        asked = inference_request(PROMPT, **params, **stops)
        one = answer(new_runner(texts=_Letters()), asked).sequences[0]
        assert (one.tokens, one.stop_reason) == (whole[:end], "stop")


@pytest.mark.parametrize("length", [40, 512])
def test_prompt_is_scored_without_sampling(length: int) -> None:
    prompt = prompt_of(length)
    scores = {"prompt_logprobs": True, "topk_prompt_logprobs": 3, "topk_sample_logprobs": 3}
    asked = inference_request(prompt, 2, is_prompt_only=True, max_tokens=None, **scores)
    scored = answer(new_runner(), asked, adapter(1))
    assert [(one.tokens, one.stop_reason) for one in scored.sequences] == [([], "length")] * 2
    wanted = _logprobs(prompt)[range(length - 1), prompt[1:]]
    assert np.allclose(scored.prompt_logprobs_np[1:], wanted, atol=1e-4)


def test_max_tokens_defaults_to_context_length() -> None:
    one = answer(new_runner(), request(PROMPT, max_tokens=None)).sequences[0]
    assert len(one.tokens) == 512 - 40


# --- prompt scores -------------------------------------------------------------------------------
@pytest.mark.parametrize("pass_tokens", [4096, 7])
def test_prompt_logprobs_match_model(pass_tokens: int) -> None:
    asked = request(
        PROMPT, max_tokens=1, prompt_logprobs=True, topk_prompt_logprobs=4, temperature=0.3
    )
    found = answer(new_runner(pass_tokens=pass_tokens), asked, adapter(1))
    wanted = _logprobs(PROMPT)
    scores, topk = found.prompt_logprobs_np, found.topk_prompt_logprobs_np
    assert scores is not None and topk is not None
    assert scores.dtype == np.float32
    assert np.isnan(scores[0])
    assert np.allclose(scores[1:], wanted[range(39), PROMPT[1:]], atol=1e-4)
    assert (topk.token_ids[0] == 0).all()
    assert (topk.logprobs[0] == FILLER_LOGPROB).all()
    assert (topk.token_ids[1:] == np.argsort(-wanted[:-1], axis=1, kind="stable")[:, :4]).all()
    assert np.allclose(topk.logprobs[1:], -np.sort(-wanted[:-1], axis=1)[:, :4], atol=1e-4)
    assert len(found.sequences[0].tokens) == 1


def test_last_n_prompt_logprobs_use_prefix_cache() -> None:
    runner = new_runner()
    fields = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "prompt_logprobs_last_n": 6}
    first = answer(runner, request(PROMPT, **fields), adapter(1))
    again = answer(runner, request(PROMPT, **fields), adapter(1))
    assert first.prompt_cache_hit_tokens == 0
    assert again.prompt_cache_hit_tokens == 33
    wanted = _logprobs(PROMPT)
    for found in (first, again):
        scores, topk = found.prompt_logprobs_np, found.topk_prompt_logprobs_np
        assert scores is not None and topk is not None
        assert np.isnan(scores[:34]).all()
        assert np.allclose(scores[34:], wanted[range(33, 39), PROMPT[34:]], atol=1e-4)
        assert (topk.logprobs[:34] == FILLER_LOGPROB).all()
        assert np.allclose(topk.logprobs[34:, 0], wanted[33:39].max(axis=1), atol=1e-4)


def test_dense_and_sparse_targets_are_scored() -> None:
    cells = np.full((39, 2), -1)
    cells[3], cells[20, 0], cells[38, 1] = (5, 6), 7, 8
    sparse = TensorData.from_numpy_sparse(cells, pad_value=-1)
    wanted = np.where(cells < 0, 0.0, np.take_along_axis(_logprobs(PROMPT)[:-1], cells.clip(0), 1))
    for tensor in (TensorData.from_numpy(cells), sparse):
        asked = request(PROMPT, target_prompt_logprobs=tensor)
        found = answer(new_runner(pass_tokens=11), asked, adapter(1)).target_prompt_logprobs
        assert found is not None
        assert found.dtype == "float32"
        assert list(found.shape) == [39, 2]
        assert found.is_sparse == tensor.is_sparse
        assert np.allclose(found.to_numpy(), wanted, atol=1e-4)


def test_prompt_alternatives_are_seeded() -> None:
    asked = request(PROMPT, prompt_alt_tokens_k=3, temperature=0.7, seed=5)
    drawn = [
        answer(new_runner(pass_tokens=size), asked, adapter(1)).prompt_alt_tokens
        for size in (4096, 9)
    ]
    wanted = _logprobs(PROMPT, 0.7)[:-1]
    for one in drawn:
        assert one is not None
        ids, scores = one.tokens.to_numpy(), one.logprobs.to_numpy()
        assert ids.shape == scores.shape == (39, 3)
        assert ids.dtype == np.int64
        assert np.allclose(scores, np.take_along_axis(wanted, ids, 1), atol=1e-4)
        assert len(np.unique(ids)) > 10
        first = drawn[0]
        assert first is not None
        assert (ids == first.tokens.to_numpy()).all()


def test_unrequested_scores_are_none() -> None:
    found = answer(new_runner(), request([5]))
    assert found.prompt_logprobs is None
    assert found.topk_prompt_logprobs is None
    assert found.target_prompt_logprobs is None
    assert found.prompt_alt_tokens is None
    assert found.sequences[0].topk_logprobs is None


def test_prompt_of_one_token() -> None:
    asked = request([5], prompt_logprobs=True, topk_prompt_logprobs=2, prompt_alt_tokens_k=2)
    found = answer(new_runner(), asked)
    assert found.prompt_logprobs == [None]
    assert found.topk_prompt_logprobs == [None]
    assert found.prompt_alt_tokens is not None
    assert found.prompt_alt_tokens.tokens.shape == [0, 2]


def test_invalid_request_is_a_user_failure() -> None:
    bad = failure(new_runner(), request([999]))
    assert bad.category is RequestErrorCategory.User
    assert "999" in bad.message


def test_sampling_ignores_torch_global_rng() -> None:
    asked = request(PROMPT, seed=3, max_tokens=20)
    torch.manual_seed(1)
    one = tokens_of(answer(new_runner(), asked))
    torch.manual_seed(2)
    assert tokens_of(answer(new_runner(), asked)) == one
