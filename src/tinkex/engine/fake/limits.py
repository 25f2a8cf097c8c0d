"""The limits of the fake engine, and checks of requests against them."""

from __future__ import annotations

from collections.abc import Mapping

from tinkex.engine.examples import count_text_tokens
from tinkex.engine.fake.bigram import OptimStepParams
from tinkex.engine.fake.sampler import DEFAULT_MAX_TOKENS
from tinkex.engine.fake.toy_tokenizer import VOCAB_SIZE
from tinkex.engine.protocol import AdapterSpec
from tinkex.errors import InvalidInput
from tinkex.types import AdamParams, SampleRequest
from tinkex.types.optimizers import DimuonParams, OptimParams

#: Context length for prompt and generated tokens.
MAX_CONTEXT_TOKENS = 32768
#: Maximum number of sequences of one request.
MAX_SAMPLES = 1024
OPTIMIZERS = ("adamw", "dimuon")


def check_spec(spec: AdapterSpec) -> None:
    """Raise InvalidInput if the engine cannot create such an adapter."""
    if spec.rank < 1:
        raise InvalidInput(f"rank is {spec.rank}, expected at least 1")
    if not (spec.train_unembed or spec.train_mlp or spec.train_attn):
        raise InvalidInput(
            "train_unembed, train_mlp and train_attn are all false: nothing to train"
        )
    kind = spec.optimizer.get("type")
    if kind not in OPTIMIZERS:
        raise InvalidInput(f"optimizer type {kind!r} is not one of {', '.join(OPTIMIZERS)}")


def parse_step_params(optimizer: Mapping[str, object], params: OptimParams) -> OptimStepParams:
    """Convert the parameters of a step, which must be of the adapter's optimizer type."""
    given = "adamw" if isinstance(params, AdamParams) else params.type
    wanted = optimizer.get("type")
    if given != wanted:
        raise InvalidInput(
            f"the step has parameters of {given!r}, but the adapter trains with {wanted!r}"
        )
    if isinstance(params, AdamParams):
        return OptimStepParams(
            learning_rate=params.learning_rate,
            beta1=params.beta1,
            beta2=params.beta2,
            eps=params.eps,
            weight_decay=params.weight_decay,
            grad_clip_norm=params.grad_clip_norm,
        )
    if isinstance(params, DimuonParams):
        return OptimStepParams(
            learning_rate=params.learning_rate,
            beta1=params.beta1,
            grad_clip_norm=params.grad_clip_norm,
        )
    raise InvalidInput(f"optimizer_params of type {given!r} are not supported; send adam_params")


def check_sample(request: SampleRequest) -> None:
    """Raise InvalidInput for a prompt that is too long or not text, or for too many results."""
    num_prompt = count_text_tokens("the prompt", request.prompt, MAX_CONTEXT_TOKENS)
    num_tokens = request.sampling_params.max_tokens or DEFAULT_MAX_TOKENS
    if num_prompt + num_tokens > MAX_CONTEXT_TOKENS:
        raise InvalidInput(
            f"the prompt has {num_prompt} tokens and max_tokens is {num_tokens}; together they "
            f"may be at most {MAX_CONTEXT_TOKENS}"
        )
    _check_at_most("num_samples", request.num_samples, MAX_SAMPLES)
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        _check_at_most(name, getattr(request, name), VOCAB_SIZE)


def _check_at_most(name: str, value: int, limit: int) -> None:
    if value > limit:
        raise InvalidInput(f"{name} is {value}; expected at most {limit}")
