"""Samples match transformers, and log-probabilities match training passes."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from tests.support.sampling_runner import (
    adapter,
    answer,
    answers,
    model_logits,
    new_runner,
    prompt_of,
    request,
    shared_host,
    tokens_of,
)
from tests.support.tiny_models import tiny_qwen3
from tinkex.nn.hosted_model import HostedModel
from tinkex.nn.lora_layout import TargetKind
from tinkex.types import SampleResponse

_SMALL = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "max_position_embeddings": 512,
}


def _mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(sliding_window=24, **_SMALL)).eval()


def _gemma2() -> PreTrainedModel:
    fields = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "sliding_window": 20}
    return Gemma2ForCausalLM(Gemma2Config(query_pre_attn_scalar=8, **fields, **_SMALL)).eval()


def _generated(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    with torch.no_grad():
        whole = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    return whole[0, len(prompt) :].tolist()


def test_greedy_matches_transformers() -> None:
    model = tiny_qwen3()
    prompts = {str(length): prompt_of(length) for length in (1, 5, 31, 33, 64, 100, 140)}
    jobs = {
        name: (None, request(prompt, temperature=0.0, max_tokens=90))
        for name, prompt in prompts.items()
    }
    found = answers(new_runner(), jobs)
    for name, prompt in prompts.items():
        assert tokens_of(found[name]) == [_generated(model, prompt, 90)], name


def test_shared_prompt_matches_transformers() -> None:
    prompt = prompt_of(100)
    found = answer(new_runner(), request(prompt, 6, temperature=0.0, max_tokens=150))
    assert tokens_of(found) == [_generated(tiny_qwen3(), prompt, 150)] * 6


@pytest.mark.parametrize("build", [_mistral, _gemma2])
@pytest.mark.parametrize("num_samples", [1, 5])
def test_sliding_window_and_softcap_match_transformers(build: object, num_samples: int) -> None:
    torch.manual_seed(3)
    model = build()  # type: ignore[operator]
    prompts = {str(length): prompt_of(length) for length in (7, 70, 90)}
    wanted = {name: _generated(model, prompt, 40) for name, prompt in prompts.items()}
    jobs = {
        name: (None, request(prompt, num_samples, temperature=0.0, max_tokens=40))
        for name, prompt in prompts.items()
    }
    # Small passes, so that prompts are prefilled in several chunks.
    found = answers(new_runner(HostedModel(model), pass_tokens=29), jobs)
    for name in prompts:
        assert tokens_of(found[name]) == [wanted[name]] * num_samples, name


def _check_logprobs(found: SampleResponse, prompt: list[int], seed: int, temperature: float) -> int:
    whose, count = (adapter(seed) if seed else None), 0
    for one in found.sequences:
        logits = model_logits(shared_host(), prompt + one.tokens[:-1], whose)[len(prompt) - 1 :]
        wanted = (logits / temperature).log_softmax(-1)
        picked = wanted.gather(1, torch.tensor(one.tokens)[:, None]).squeeze(1)
        assert one.logprobs_np is not None
        assert (picked - torch.from_numpy(one.logprobs_np)).abs().max() <= 1e-4
        count += len(one.tokens)
    return count


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_logprobs_match_training_pass(temperature: float) -> None:
    # Several adapters run together with the base model, alone and in groups.
    prompts = {0: prompt_of(10), 1: prompt_of(80), 2: prompt_of(50), 3: prompt_of(90)}
    jobs = {
        str(seed): (
            adapter(seed) if seed else None,
            request(prompt, 4, temperature=temperature, max_tokens=90, seed=seed),
        )
        for seed, prompt in prompts.items()
    }
    found = answers(new_runner(), jobs)
    num = sum(
        _check_logprobs(found[str(seed)], prompt, seed, temperature)
        for seed, prompt in prompts.items()
    )
    assert num >= 1000


def test_adapters_of_different_ranks_are_independent() -> None:
    kinds = [
        adapter(1, rank=2),
        adapter(2, rank=16, parts=(TargetKind.MLP,)),
        adapter(3, rank=4, parts=(TargetKind.ATTENTION, TargetKind.UNEMBED)),
        None,
    ]
    prompts = [prompt_of(9 + index) for index in range(4)]
    jobs = {
        str(index): (kind, request(prompts[index], temperature=0.0, max_tokens=20))
        for index, kind in enumerate(kinds)
    }
    together = answers(new_runner(), jobs)
    for index, kind in enumerate(kinds):
        alone = answer(new_runner(), jobs[str(index)][1], kind)
        assert tokens_of(together[str(index)]) == tokens_of(alone)
    assert len({tuple(tokens_of(one)[0]) for one in together.values()}) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_self_consistent(dtype: torch.dtype) -> None:
    host = HostedModel(tiny_qwen3(dtype=dtype))
    whose = adapter(1, host=host)
    prompt = prompt_of(70)
    found = answer(new_runner(host), request(prompt, 5, temperature=0.0, max_tokens=8), whose)
    one = found.sequences[0]
    logits = model_logits(host, prompt + one.tokens[:-1], whose)[len(prompt) - 1 :]
    picked = logits.log_softmax(-1).gather(1, torch.tensor(one.tokens)[:, None]).squeeze(1)
    assert one.logprobs_np is not None
    assert (picked - torch.from_numpy(one.logprobs_np)).abs().max() < 0.2
