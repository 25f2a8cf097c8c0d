"""Tiny hosted models with adapters, and helpers to run a ContinuousBatcher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tests.support.tiny_models import tiny_host
from tinkex.engine.config import EngineConfig
from tinkex.engine.inference_request import InferenceParams, InferenceRequest
from tinkex.engine.protocol import EngineFailure
from tinkex.engine.sampling.continuous_batching import ContinuousBatcher
from tinkex.engine.sampling.request_state import SamplerAdapter
from tinkex.engine.sampling.stop_conditions import TextDecoder
from tinkex.nn.forward_context import ForwardContext
from tinkex.nn.hosted_model import HostedModel
from tinkex.nn.lora_layout import LoraLayout, TargetKind
from tinkex.nn.lora_training import LoraSegment, SegmentedLora
from tinkex.nn.packed_attention import PackedAttention
from tinkex.types import ModelInput, SampleRequest, SampleResponse, SamplingParams

CONTEXT = 512
EOS = frozenset({2})

Job = tuple[SamplerAdapter | None, SampleRequest]


@lru_cache
def shared_host() -> HostedModel:
    """A Qwen3 model shared by tests that do not change it."""
    return tiny_host()


@lru_cache
def adapter(
    seed: int,
    rank: int = 4,
    parts: tuple[TargetKind, ...] = tuple(TargetKind),
    host: HostedModel | None = None,
) -> SamplerAdapter:
    """An adapter that changes the model's output considerably."""
    layout = LoraLayout((host or shared_host()).lora_targets, rank, set(parts))
    flat = layout.init_weights(seed)
    rng = torch.Generator().manual_seed(seed)
    for pair in layout.views(flat):
        for up in pair.ups if pair is not None else ():
            up.normal_(0, 0.2, generator=rng)
    return SamplerAdapter((seed, rank, parts), 32 / 8 / rank, layout.views(flat))


def new_runner(
    host: HostedModel | None = None, texts: TextDecoder | None = None, **settings: Any
) -> ContinuousBatcher:
    """A ContinuousBatcher on a tiny model."""
    return ContinuousBatcher(
        host or shared_host(),
        decoder=texts,
        eos_tokens=EOS,
        max_context_tokens=CONTEXT,
        config=EngineConfig(**settings),
    )


def request(prompt: Sequence[int], num_samples: int = 1, **fields: Any) -> SampleRequest:
    """A request; other keyword arguments are sampling parameters. There is no stop by default."""
    names = SamplingParams.__struct_fields__
    params = {"stop": [], "max_tokens": 8} | {k: v for k, v in fields.items() if k in names}
    others = {k: v for k, v in fields.items() if k not in names}
    return SampleRequest(
        num_samples=num_samples,
        prompt=ModelInput.from_ints(list(prompt)),
        sampling_params=SamplingParams(**params),
        **others,
    )


def inference_request(
    prompt: Sequence[int], num_samples: int = 1, **fields: Any
) -> InferenceRequest:
    """A request of the inference endpoints; other keyword arguments are as for `request`."""
    names = InferenceParams.__struct_fields__
    params = {"max_tokens": 8} | {k: v for k, v in fields.items() if k in names}
    others = {k: v for k, v in fields.items() if k not in names}
    return InferenceRequest(
        num_samples=num_samples,
        prompt=ModelInput.from_ints(list(prompt)),
        sampling_params=InferenceParams(**params),
        **others,
    )


def prompt_of(length: int, seed: int = 0, vocab_size: int = 211) -> list[int]:
    """Random tokens without EOS."""
    rng = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, vocab_size, (length,), generator=rng).tolist()


def drain(runner: ContinuousBatcher) -> dict[str, SampleResponse | EngineFailure]:
    """Run until all requests are finished."""
    outcomes = {}
    while len(runner):
        for job_id, outcome in runner.step():
            assert job_id not in outcomes
            outcomes[job_id] = outcome
    return outcomes


def answers(runner: ContinuousBatcher, jobs: Mapping[str, Job]) -> dict[str, SampleResponse]:
    """Run all requests together; all must succeed."""
    for job_id, (whose, asked) in jobs.items():
        runner.add(job_id, whose, asked)
    return {job_id: answered(outcome) for job_id, outcome in drain(runner).items()}


def answer(
    runner: ContinuousBatcher, asked: SampleRequest, whose: SamplerAdapter | None = None
) -> SampleResponse:
    """Run one request, which must succeed."""
    return answers(runner, {"only": (whose, asked)})["only"]


def failure(runner: ContinuousBatcher, asked: SampleRequest) -> EngineFailure:
    """Run one request, which must fail."""
    runner.add("bad", None, asked)
    outcome = drain(runner)["bad"]
    assert isinstance(outcome, EngineFailure)
    return outcome


def answered(outcome: SampleResponse | EngineFailure) -> SampleResponse:
    """Return an outcome, which must be a response."""
    assert isinstance(outcome, SampleResponse), outcome
    return outcome


def tokens_of(response: SampleResponse) -> list[list[int]]:
    """The tokens of every sequence."""
    return [list(one.tokens) for one in response.sequences]


@torch.no_grad()
def model_logits(
    host: HostedModel, tokens: Sequence[int], whose: SamplerAdapter | None = None
) -> Tensor:
    """The logits of a training pass: (T, V)."""
    segments = (
        [LoraSegment(0, len(tokens), whose.scale, whose.weights)] if whose is not None else []
    )
    context = ForwardContext(SegmentedLora(segments), PackedAttention([len(tokens)]))
    hidden = host.hidden_states(torch.tensor(tokens), torch.arange(len(tokens)), context)
    logits, _ = host.lm_head.logits(hidden, context.lora)
    return logits.float()
