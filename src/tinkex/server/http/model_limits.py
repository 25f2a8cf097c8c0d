"""Check a request against the limits of its base model before it is queued.

Covers what can be checked without weights: lengths, token ids, parameters. The engine checks again.
"""

from __future__ import annotations

from collections.abc import Callable

from tinkex import types
from tinkex.engine.examples import parse_examples
from tinkex.engine.protocol import BaseModel
from tinkex.engine.sampling.request import DEFAULT_MAX_TOKENS, ModelLimits, parse_sample_request
from tinkex.errors import APIStatusError, InvalidInput
from tinkex.server.http.model_specs import find_model, list_served_models
from tinkex.server.http.request_context import Services, run_in_thread
from tinkex.server.http.store_access import read
from tinkex.store.database import Connection

#: Requests with more tokens than this are checked in a thread.
MAX_INLINE_TOKENS = 4096


async def find_base_model(
    services: Services, owner: tuple[str, str], find: Callable[[Connection], str]
) -> BaseModel | None:
    """The base model of a run or a sampling session; None if it is unknown.

    `owner` is the tenant and the id; `find` looks up the name of the base model. If it raises, the
    request is not checked here: a repeated request gets its first response, and a new one fails
    when it is stored.
    """
    cached = services.cache.base_models.get(owner)
    if cached is not None:
        return cached
    try:
        model = await read(services, lambda db: find_model(list_served_models(db), find(db)))
    except APIStatusError:
        return None
    if model is not None:
        services.cache.base_models.put(owner, model)
    return model


async def check_pass(
    services: Services, batch: types.ForwardBackwardInput, model: BaseModel | None
) -> int:
    """Return the number of tokens of a pass; raises InvalidInput if it exceeds a limit."""
    num_tokens = sum(datum.model_input.length for datum in batch.data)
    limit = services.config.max_request_tokens
    if num_tokens > limit:
        raise InvalidInput(
            f"the request has {num_tokens} tokens; the limit of one training request is {limit}; "
            "split the batch, or ask the operator to raise max_request_tokens"
        )
    if model is not None:
        await _run_check(num_tokens, lambda: _validate_pass(batch, model))
    return num_tokens


def _validate_pass(batch: types.ForwardBackwardInput, model: BaseModel) -> None:
    parse_examples(
        batch, vocab_size=_vocab_size(model), max_context_tokens=model.max_context_tokens
    )


async def check_sample(request: types.SampleRequest, model: BaseModel | None) -> int:
    """Return the maximum number of tokens of a sample request; raises InvalidInput."""
    num_prompt = request.prompt.length
    if model is not None:
        await _run_check(num_prompt, lambda: _validate_sample(request, model))
    max_tokens = request.sampling_params.max_tokens
    if max_tokens is None:
        max_tokens = DEFAULT_MAX_TOKENS
    return num_prompt + request.num_samples * max_tokens


def _validate_sample(request: types.SampleRequest, model: BaseModel) -> None:
    limits = ModelLimits(
        vocab_size=_vocab_size(model),
        max_context_tokens=model.max_context_tokens,
        eos_tokens=frozenset(),
        # Only the engine knows whether the model has a tokenizer.
        has_tokenizer=True,
    )
    parse_sample_request(request, limits)


def _vocab_size(model: BaseModel) -> int:
    """The vocabulary size; if it is unknown, any token id is accepted."""
    return model.vocab_size or 1 << 31


async def _run_check(num_tokens: int, check: Callable[[], None]) -> None:
    if num_tokens > MAX_INLINE_TOKENS:
        await run_in_thread(check)
    else:
        check()
