"""How much a request may bring: bytes, seconds, JSON values, metadata, cells of sparse tensors."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import msgspec
from litestar.types import Receive

from tinkex.errors import (
    APIStatusError,
    InternalServerError,
    InvalidInput,
    RateLimitError,
    UnprocessableEntityError,
)
from tinkex.server.config import ServerConfig
from tinkex.types import (
    ForwardBackwardInput,
    ForwardBackwardRequest,
    ForwardRequest,
    SampleRequest,
    TensorData,
)
from tinkex.wire.codec import decompress_zstd, zstd_content_size

#: Sparse tensors are filled up with zeros before they are used; this many cells of one request.
MAX_SPARSE_CELLS: Final = 64 * 1024 * 1024
#: Bodies up to this are decoded on the loop: handing them over would take longer.
MAX_INLINE_DECODE_BYTES: Final = 32 * 1024
#: A length of more digits is too large whatever they are.
_MAX_LENGTH_DIGITS = 18
#: An escaped NUL, which no text of ours contains and PostgreSQL cannot store.
_NUL: Final = rb"\u0000"
_BACKSLASH: Final = ord("\\")
#: The most objects and lists, and the most values, of one JSON body: each becomes a Python object.
MAX_JSON_CONTAINERS: Final = 1_000_000
MAX_JSON_VALUES: Final = 4_000_000
MAX_METADATA_BYTES: Final = 64 * 1024
#: A body may take `body_seconds`, and a second more for so many of its bytes.
MIN_BYTES_PER_SECOND: Final = 16 * 1024


class PayloadTooLarge(APIStatusError):
    """HTTP 413: the body is larger than this server takes."""

    status_code = 413


class UnsupportedMediaType(APIStatusError):
    """HTTP 415: the body is written in a way this server does not read."""

    status_code = 415


class RequestTimeout(APIStatusError):
    """HTTP 408: the body did not arrive in time."""

    status_code = 408


class ClientDisconnected(APIStatusError):
    """The client closed the connection before its request was complete; nobody hears this."""

    status_code = 499


def _ignore_chunk(num_bytes: int) -> None:
    """Count nothing."""


async def read_body(
    receive: Receive,
    content_length: str | None,
    max_bytes: int,
    timeout_seconds: float,
    on_chunk: Callable[[int], None] = _ignore_chunk,
) -> bytes:
    """Read a body; raises as soon as it is known to be too large or too slow.

    `count` is called with the size of each piece, and may raise.
    """
    # What is no number at all is the HTTP parser's to refuse; here the bytes themselves count.
    if (
        content_length is not None
        and content_length.isdecimal()
        and int(content_length[:_MAX_LENGTH_DIGITS]) > max_bytes
    ):
        raise _too_large_error(int(content_length[:_MAX_LENGTH_DIGITS]), max_bytes)
    try:
        async with asyncio.timeout(timeout_seconds) as deadline:
            return await _receive_chunks(receive, max_bytes, on_chunk, deadline)
    except TimeoutError:
        raise RequestTimeout(
            "the body did not arrive in time; send the request again",
            should_retry=True,
        ) from None


async def _receive_chunks(
    receive: Receive, max_bytes: int, on_chunk: Callable[[int], None], deadline: asyncio.Timeout
) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    message: Any = await receive()
    while message["type"] == "http.request":
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise _too_large_error(num_bytes, max_bytes)
        on_chunk(len(part))
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)
        ends_at = deadline.when()
        assert ends_at is not None
        deadline.reschedule(ends_at + len(part) / MIN_BYTES_PER_SECOND)
        message = await receive()
    raise ClientDisconnected()


def _too_large_error(num_bytes: int, max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"the body has {num_bytes} bytes or more; this server takes {max_bytes}, send less at once"
    )


def is_zstd_encoded(encoding: str) -> bool:
    """Whether a body of this Content-Encoding must be unpacked; 415 if nobody here can."""
    if encoding in {"", "identity"}:
        return False
    if encoding == "zstd":
        return True
    raise UnsupportedMediaType(
        f"Content-Encoding {encoding[:80]!r} is not read here; use zstd or none"
    )


def decompressed_bytes(body: bytes, max_bytes: int) -> int:
    """How much memory the content of a zstd body may take: what it says, or else the limit."""
    num_bytes = zstd_content_size(body)
    return max_bytes if num_bytes is None else min(num_bytes, max_bytes)


def decompress_body(body: bytes, max_bytes: int) -> bytes:
    """The content of a zstd body, at most so many bytes of it."""
    return decompress_zstd(body, max_bytes)


class _MetadataEnvelope(msgspec.Struct):
    user_metadata: msgspec.Raw = msgspec.Raw()


_METADATA_DECODER = msgspec.json.Decoder(_MetadataEnvelope)


def check_metadata(body: bytes) -> None:
    """Refuse a message whose user_metadata is too long, before any of it becomes an object."""
    num_bytes = len(bytes(_METADATA_DECODER.decode(body).user_metadata))
    if num_bytes > MAX_METADATA_BYTES:
        raise UnprocessableEntityError(
            f"user_metadata has {num_bytes} bytes; at most {MAX_METADATA_BYTES} are kept"
        )


def check_json(body: bytes) -> None:
    """Refuse JSON that would become too many objects, is not UTF-8, or has a NUL in a text."""
    num_containers = body.count(b"{") + body.count(b"[")
    if num_containers > MAX_JSON_CONTAINERS:
        raise UnprocessableEntityError(
            f"the body has {num_containers} objects and lists; {MAX_JSON_CONTAINERS} is the most"
        )
    num_values = body.count(b",")
    if num_values > MAX_JSON_VALUES:
        raise UnprocessableEntityError(
            f"the body has {num_values} values; {MAX_JSON_VALUES} is the most, send less at once"
        )
    if not body.isascii():
        # Fields that are unknown here are skipped by the decoder, whatever their bytes are.
        body.decode("utf-8")
    if _has_nul(body):
        raise UnprocessableEntityError("a text contains the character \\u0000; leave it out")


def _has_nul(body: bytes) -> bool:
    """Whether an escape of NUL follows an even number of backslashes."""
    at = body.find(_NUL)
    while at >= 0:
        start = at
        while start > 0 and body[start - 1] == _BACKSLASH:
            start -= 1
        if (at - start) % 2 == 0:
            return True
        at = body.find(_NUL, at + 1)
    return False


def check_sparse_size(request: object) -> None:
    """Refuse sparse tensors that would be huge once they are filled up."""
    num_cells = sum(prod(tensor.shape) for tensor in _iter_tensors(request) if tensor.is_sparse)
    if num_cells > MAX_SPARSE_CELLS:
        raise InvalidInput(
            f"the sparse tensors of this request have {num_cells} cells; {MAX_SPARSE_CELLS} is "
            "the most, "
            "send fewer examples at once"
        )


def _iter_tensors(request: object) -> Iterable[TensorData]:
    work: ForwardBackwardInput | None = None
    if isinstance(request, ForwardBackwardRequest):
        work = request.forward_backward_input
    elif isinstance(request, ForwardRequest):
        work = request.forward_input
    elif isinstance(request, SampleRequest) and request.target_prompt_logprobs is not None:
        yield request.target_prompt_logprobs
    for datum in work.data if work is not None else ():
        yield from datum.loss_fn_inputs.values()


T = TypeVar("T")
#: When a client that was refused because memory is short should send its request again.
OVERLOAD_RETRY_SECONDS = 2.0
#: Decoding holds the interpreter's lock for most of its time, so more threads gain nothing.
NUM_DECODER_THREADS = 2


class Overloaded(InternalServerError):
    """HTTP 503: the server holds as many request bytes as it may."""

    status_code = 503


class BodyMemoryBudget:
    """What one API process holds of request bodies, of all tenants together."""

    def __init__(self, config: ServerConfig) -> None:
        self.max_body_bytes = config.max_body_bytes
        self.body_seconds = config.body_seconds
        self.max_bytes = max(config.max_inflight_bytes, config.max_body_bytes)
        """A budget smaller than one body would refuse that body for ever."""
        self.max_bytes_per_tenant = max(self.max_bytes // 2, config.max_body_bytes)
        self.num_bytes = 0
        self._by_tenant: Counter[str] = Counter()
        self._decoders = ThreadPoolExecutor(NUM_DECODER_THREADS, thread_name_prefix="decoder")

    def reserve(self, tenant_id: str) -> BodyReservation:
        """A share of the budget that is given back when the block ends."""
        return BodyReservation(self, tenant_id)

    def acquire(self, tenant_id: str, num_bytes: int) -> None:
        """Count bytes of a tenant; RateLimitError or Overloaded if they are too many."""
        if self._by_tenant[tenant_id] + num_bytes > self.max_bytes_per_tenant:
            raise RateLimitError(
                f"your requests in flight have more than {self.max_bytes_per_tenant} bytes; "
                "send fewer at once",
                retry_after_seconds=OVERLOAD_RETRY_SECONDS,
            )
        if self.num_bytes + num_bytes > self.max_bytes:
            raise Overloaded(
                f"the requests in flight have more than {self.max_bytes} bytes; try again",
                retry_after_seconds=OVERLOAD_RETRY_SECONDS,
            )
        self.num_bytes += num_bytes
        self._by_tenant[tenant_id] += num_bytes

    def release(self, tenant_id: str, num_bytes: int) -> None:
        """Count bytes of a tenant as gone."""
        self.num_bytes -= num_bytes
        self._by_tenant[tenant_id] -= num_bytes
        if not self._by_tenant[tenant_id]:
            del self._by_tenant[tenant_id]

    async def run_decoder(self, function: Callable[[], T]) -> T:
        """Run what decodes a large body on one of few threads."""
        return await asyncio.get_running_loop().run_in_executor(self._decoders, function)


class BodyReservation:
    """The bytes that one request holds."""

    __slots__ = ("_intake", "_num_bytes", "_tenant_id")

    def __init__(self, body_budget: BodyMemoryBudget, tenant_id: str) -> None:
        self._intake = body_budget
        self._tenant_id = tenant_id
        self._num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._num_bytes:
            self._intake.release(self._tenant_id, self._num_bytes)
            self._num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Hold more; raises if the budget does not allow it."""
        self._intake.acquire(self._tenant_id, num_bytes)
        self._num_bytes += num_bytes
