"""The sampling client: samples from a base model or from saved weights."""

from __future__ import annotations

import base64
import binascii
from dataclasses import replace
from typing import Any

import msgspec

from tinkex import types
from tinkex.client.compat import deprecate_async_names
from tinkex.client.config import Config
from tinkex.client.future import APIFuture, map_future
from tinkex.client.holder import Holder, SessionPlan
from tinkex.client.metrics import Metrics
from tinkex.client.queue_state import QueueState, QueueStateLogger
from tinkex.client.retry import RetryConfig
from tinkex.client.sample_submission import SampleSubmitter
from tinkex.client.telemetry import Telemetry
from tinkex.client.tokenizers import load_model_tokenizer
from tinkex.client.value_future import wait_or_return
from tinkex.errors import APIResponseValidationError, InvalidInput
from tinkex.ids import parse_tinker_path
from tinkex.text import Tokenizer
from tinkex.wire.endpoints import CREATE_SAMPLING_SESSION, GET_SAMPLER


class SamplerHandle(msgspec.Struct, frozen=True, kw_only=True):
    """What another process needs to sample from the same weights; contains no credential."""

    base_url: str
    session_id: str
    sampling_session_id: str
    record_stability_info: bool = False


@deprecate_async_names
class SamplingClient:
    """Samples from one set of weights. Created by ServiceClient.create_sampling_client().

    It can be pickled and sent to other processes; so can the string of get_sampler_handle(),
    which contains no credential.
    """

    def __init__(
        self,
        holder: Holder,
        *,
        sampling_session_id: str,
        shadow: bool = False,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> None:
        self.holder = holder
        self.sampling_session_id = sampling_session_id
        self._record_stability_info = record_stability_info
        self._retry_config = retry_config or RetryConfig()
        self._queue_logger = QueueStateLogger("sampling", sampling_session_id)
        self._submitter = SampleSubmitter(
            holder, sampling_session_id, self._retry_config, self, is_clone=shadow
        )

    @staticmethod
    def create(
        holder: Holder,
        *,
        model_path: str | None = None,
        base_model: str | None = None,
        sampling_session_id: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> APIFuture[SamplingClient]:
        """Open a sampling session, or join the given one."""
        if sampling_session_id is None:
            _check_model_source(model_path, base_model)

        async def open_session() -> SamplingClient:
            session_id = sampling_session_id or await _create_sampling_session(
                holder, model_path, base_model
            )
            return SamplingClient(
                holder,
                sampling_session_id=session_id,
                # The client that created the session owns its first block of seq ids.
                shadow=sampling_session_id is not None,
                retry_config=retry_config,
                record_stability_info=record_stability_info,
            )

        return holder.start(open_session())

    def sample(
        self,
        prompt: types.ModelInput,
        num_samples: int,
        sampling_params: types.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: types.TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> APIFuture[types.SampleResponse]:
        """Sample completions of a prompt."""
        num_tokens = _count_prompt_tokens(prompt)
        _check_count("num_samples", num_samples, least=1)
        _check_count("topk_prompt_logprobs", topk_prompt_logprobs, least=0)
        _check_count("topk_sample_logprobs", topk_sample_logprobs, least=0)
        _check_count("prompt_alt_tokens_k", prompt_alt_tokens_k, least=0)
        _check_last_n(prompt_logprobs_last_n, include_prompt_logprobs)
        _check_target_logprobs(target_prompt_logprobs)
        request = types.SampleRequest(
            sampling_session_id=self.sampling_session_id,
            num_samples=num_samples,
            prompt=prompt,
            sampling_params=sampling_params,
            prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
            topk_sample_logprobs=topk_sample_logprobs,
            target_prompt_logprobs=target_prompt_logprobs,
            prompt_alt_tokens_k=prompt_alt_tokens_k,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
            record_stability_info=self._record_stability_info,
        )
        sampled = self._submitter.start(request, num_tokens)
        if prompt_alt_tokens_k == 0 and prompt_logprobs_last_n is None:
            return sampled
        return map_future(sampled, lambda response: _check_response(response, request))

    async def sample_async(
        self,
        prompt: types.ModelInput,
        num_samples: int,
        sampling_params: types.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: types.TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> types.SampleResponse:
        """Async version of sample(); returns the response."""
        return await self.sample(
            prompt,
            num_samples,
            sampling_params,
            include_prompt_logprobs,
            topk_prompt_logprobs,
            topk_sample_logprobs,
            target_prompt_logprobs,
            prompt_alt_tokens_k,
            prompt_logprobs_last_n,
        )

    def compute_logprobs(
        self, prompt: types.ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> APIFuture[list[float | None]]:
        """Compute the log-probability of every prompt token; the first one has none (None)."""
        sampled = self.sample(
            prompt,
            1,
            types.SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
        )
        return map_future(sampled, _require_prompt_logprobs)

    async def compute_logprobs_async(
        self, prompt: types.ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> list[float | None]:
        """Async version of compute_logprobs(); returns the list."""
        return await self.compute_logprobs(prompt, prompt_logprobs_last_n)

    # --- about this client ----------------------------------------------------------------

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of the base model."""
        return self._load_tokenizer()

    def get_base_model(self) -> APIFuture[str]:
        """Return the name of the base model."""
        return wait_or_return(self.holder.start(self._base_model()), str)

    async def get_base_model_async(self) -> str:
        """Async version of get_base_model()."""
        return await self.holder.start(self._base_model())

    def get_telemetry(self) -> Telemetry | None:
        """Return the telemetry reporter of this session; None unless telemetry is enabled."""
        return self.holder.telemetry

    def metrics(self) -> Metrics:
        """Return counters and latency percentiles of this client's session."""
        return self.holder.metrics()

    def on_queue_state_change(
        self, queue_state: QueueState, queue_state_reason: str | None
    ) -> None:
        """Log that the server paused or resumed this sampler; called off the I/O loop."""
        self._queue_logger.on_queue_state_change(queue_state, queue_state_reason)

    # --- copies in other processes --------------------------------------------------------

    def get_sampler_handle(self) -> str:
        """Return a string from which from_sampler_handle() creates a client of this sampler."""
        payload = msgspec.json.encode(self._make_handle())
        return base64.urlsafe_b64encode(payload).decode()

    @staticmethod
    def from_sampler_handle(handle: str, *, api_key: str | None = None) -> SamplingClient:
        """Create a client from a sampler handle, with this process's own credential."""
        try:
            raw = base64.urlsafe_b64decode(handle)
            parsed = msgspec.json.decode(raw, type=SamplerHandle)
        except (binascii.Error, ValueError, msgspec.MsgspecError) as error:
            raise InvalidInput(f"Invalid sampler handle: {str(handle)[:40]!r}") from error
        return _clone(parsed, Config.new(base_url=parsed.base_url, api_key=api_key))

    def __reduce__(self) -> tuple[object, ...]:
        # Hooks and loaders are functions of this process and may not be picklable.
        config = replace(self.holder.config, event_hook=None, tokenizer_loader=None)
        return (_clone, (self._make_handle(), config, self._retry_config))

    def _make_handle(self) -> SamplerHandle:
        self.holder.has_exported_handle = True
        return SamplerHandle(
            base_url=self.holder.config.base_url,
            session_id=self.holder.run(self.holder.session_id()),
            sampling_session_id=self.sampling_session_id,
            record_stability_info=self._record_stability_info,
        )

    def _load_tokenizer(self, *, is_minimal: bool = False) -> Tokenizer:
        info = self.holder.run(self._sampler_info())
        return load_model_tokenizer(
            self.holder, info.base_model, info.tokenizer_id, is_minimal=is_minimal
        )

    async def _base_model(self) -> str:
        return (await self._sampler_info()).base_model

    async def _sampler_info(self) -> types.GetSamplerResponse:
        return await self.holder.transport.call(
            GET_SAMPLER, ids={"sampler_id": self.sampling_session_id}
        )


async def _create_sampling_session(
    holder: Holder, model_path: str | None, base_model: str | None
) -> str:
    session_id = await holder.session_id()
    reply = await holder.transport.call(
        CREATE_SAMPLING_SESSION,
        types.CreateSamplingSessionRequest(
            session_id=session_id,
            sampling_session_seq_id=holder.next_sampling_seq_id(),
            base_model=base_model,
            model_path=model_path,
        ),
    )
    return reply.sampling_session_id


def _clone(
    handle: SamplerHandle, config: Config, retry_config: RetryConfig | None = None
) -> SamplingClient:
    holder = Holder(config, SessionPlan(joined_session_id=handle.session_id))
    return SamplingClient(
        holder,
        sampling_session_id=handle.sampling_session_id,
        shadow=True,
        retry_config=retry_config,
        record_stability_info=handle.record_stability_info,
    )


def _check_model_source(model_path: str | None, base_model: str | None) -> None:
    if model_path is None and base_model is None:
        raise InvalidInput("A sampling client needs model_path or base_model")
    if model_path is not None:
        parse_tinker_path(model_path)


def _count_prompt_tokens(prompt: object) -> int:
    """Estimate the length of the prompt; an image counts as 1024 tokens."""
    if not isinstance(prompt, types.ModelInput):
        raise InvalidInput(
            f"prompt must be a ModelInput, got {type(prompt).__name__}; "
            "create one with ModelInput.from_ints(tokenizer.encode(text))"
        )
    return sum(
        len(chunk.tokens) if isinstance(chunk, types.EncodedTextChunk) else 1024
        for chunk in prompt.chunks
    )


def _check_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidInput(f"{name} must be {least} or more, got {value!r}")


def _check_last_n(last_n: int | None, include_prompt_logprobs: bool) -> None:
    if last_n is None:
        return
    _check_count("prompt_logprobs_last_n", last_n, least=1)
    if not include_prompt_logprobs:
        raise InvalidInput(f"prompt_logprobs_last_n={last_n} requires include_prompt_logprobs=True")


def _check_target_logprobs(target: types.TensorData | None) -> None:
    if target is None:
        return
    if target.dtype != "int64" or target.shape is None or len(target.shape) != 2:
        raise InvalidInput(
            "target_prompt_logprobs must be a 2-D int64 tensor of token ids, "
            f"got {target.dtype} of shape {target.shape}"
        )


def _require_prompt_logprobs(response: types.SampleResponse) -> list[float | None]:
    if response.prompt_logprobs is None:
        raise APIResponseValidationError(None, None, "The server returned no prompt logprobs")
    return response.prompt_logprobs


def _check_response(
    response: types.SampleResponse, request: types.SampleRequest
) -> types.SampleResponse:
    """Reject a response that ignores an option of the request, as older servers do."""
    if request.prompt_alt_tokens_k > 0 and response.prompt_alt_tokens is None:
        raise APIResponseValidationError(
            None,
            None,
            f"The server ignored prompt_alt_tokens_k={request.prompt_alt_tokens_k}",
        )
    last_n = request.prompt_logprobs_last_n
    logprobs = response.prompt_logprobs
    if last_n is not None and logprobs and any(v is not None for v in logprobs[:-last_n]):
        raise APIResponseValidationError(
            None, None, f"The server ignored prompt_logprobs_last_n={last_n}"
        )
    return response


def load_minimal_tokenizer(sampler: SamplingClient) -> Tokenizer:
    """Load a tokenizer that only encodes, decodes and renders chats; it needs no transformers."""
    return sampler._load_tokenizer(is_minimal=True)
