"""Read request bodies within limits on size, time, memory, JSON values and sparse tensors."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from types import TracebackType
from typing import Final, Self, TypeVar

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

#: Maximum cells of a request's sparse tensors after they are converted to dense ones.
MAX_SPARSE_CELLS: Final = 64 * 1024 * 1024
#: Smaller bodies are decoded on the event loop: passing them to a thread would take longer.
MAX_INLINE_DECODE_BYTES: Final = 32 * 1024
#: A Content-Length with more digits is too large in any case.
_MAX_LENGTH_DIGITS = 18
#: An escaped NUL, which PostgreSQL cannot store.
_NUL: Final = rb"\u0000"
_BACKSLASH: Final = ord("\\")
#: Maximum objects and lists, and values, of a JSON body: each becomes a Python object.
MAX_JSON_CONTAINERS: Final = 1_000_000
MAX_JSON_VALUES: Final = 4_000_000
MAX_METADATA_BYTES: Final = 64 * 1024
#: The body timeout is extended by a second for each of this many received bytes.
MIN_BYTES_PER_SECOND: Final = 16 * 1024


class PayloadTooLarge(APIStatusError):
    """HTTP 413: the body exceeds the server's limit."""

    status_code = 413


class UnsupportedMediaType(APIStatusError):
    """HTTP 415: the media type or encoding of the body is not supported."""

    status_code = 415


class RequestTimeout(APIStatusError):
    """HTTP 408: the body did not arrive in time."""

    status_code = 408


class ClientDisconnected(APIStatusError):
    """The client disconnected before its request was complete; no response can be sent."""

    status_code = 499


def _ignore_chunk(num_bytes: int) -> None:
    """Do nothing."""


async def read_body(
    receive: Receive,
    content_length: str | None,
    max_bytes: int,
    timeout_seconds: float,
    on_chunk: Callable[[int], None] = _ignore_chunk,
) -> bytes:
    """Read a body; raises as soon as it is known to be too large or too slow.

    `on_chunk` is called with the size of each chunk and may raise.
    """
    # The HTTP parser rejects invalid lengths; below, the received bytes are counted as well.
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
    chunks: list[bytes] = []
    num_bytes = 0
    message = await receive()
    while message["type"] == "http.request":
        chunk = message.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_large_error(num_bytes, max_bytes)
        on_chunk(len(chunk))
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)
        ends_at = deadline.when()
        assert ends_at is not None
        deadline.reschedule(ends_at + len(chunk) / MIN_BYTES_PER_SECOND)
        message = await receive()
    raise ClientDisconnected()


def _too_large_error(num_bytes: int, max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"the body has {num_bytes} bytes or more; the limit is {max_bytes}; send less at once"
    )


def is_zstd_encoded(encoding: str) -> bool:
    """Whether a body with this Content-Encoding is zstd; raises for unsupported encodings."""
    if encoding in {"", "identity"}:
        return False
    if encoding == "zstd":
        return True
    raise UnsupportedMediaType(
        f"Content-Encoding {encoding[:80]!r} is not supported; use zstd or none"
    )


def decompressed_bytes(body: bytes, max_bytes: int) -> int:
    """Memory needed to decompress a zstd body: its declared size, or else the limit."""
    num_bytes = zstd_content_size(body)
    return max_bytes if num_bytes is None else min(num_bytes, max_bytes)


def decompress_body(body: bytes, max_bytes: int) -> bytes:
    """Decompress a zstd body of at most `max_bytes`."""
    return decompress_zstd(body, max_bytes)


class _MetadataEnvelope(msgspec.Struct):
    user_metadata: msgspec.Raw = msgspec.Raw()


_METADATA_DECODER = msgspec.json.Decoder(_MetadataEnvelope)


def check_metadata(body: bytes) -> None:
    """Raise if user_metadata is too large; runs before it is decoded to objects."""
    num_bytes = len(bytes(_METADATA_DECODER.decode(body).user_metadata))
    if num_bytes > MAX_METADATA_BYTES:
        raise UnprocessableEntityError(
            f"user_metadata has {num_bytes} bytes; the limit is {MAX_METADATA_BYTES}"
        )


def check_json(body: bytes, max_containers: int = MAX_JSON_CONTAINERS) -> None:
    """Raise if JSON has too many objects or values, is not UTF-8, or has a NUL in a string."""
    num_containers = body.count(b"{") + body.count(b"[")
    if num_containers > max_containers:
        raise UnprocessableEntityError(
            f"the body has {num_containers} objects and lists; the limit is {max_containers}"
        )
    num_values = body.count(b",")
    if num_values > MAX_JSON_VALUES:
        raise UnprocessableEntityError(
            f"the body has {num_values} values; the limit is {MAX_JSON_VALUES}; send less at once"
        )
    if not body.isascii():
        # The decoder skips unknown fields without checking their bytes.
        body.decode("utf-8")
    if _has_nul(body):
        raise UnprocessableEntityError("a string contains the character \\u0000; remove it")


def _has_nul(body: bytes) -> bool:
    """Whether an escape of NUL follows an even number of backslashes."""
    index = body.find(_NUL)
    while index >= 0:
        start = index
        while start > 0 and body[start - 1] == _BACKSLASH:
            start -= 1
        if (index - start) % 2 == 0:
            return True
        index = body.find(_NUL, index + 1)
    return False


def check_sparse_size(request: object) -> None:
    """Raise if a request's sparse tensors are too large when converted to dense ones."""
    num_cells = sum(prod(tensor.shape) for tensor in _iter_tensors(request) if tensor.is_sparse)
    if num_cells > MAX_SPARSE_CELLS:
        raise InvalidInput(
            f"the sparse tensors of this request have {num_cells} cells; the limit is "
            f"{MAX_SPARSE_CELLS}; send fewer examples at once"
        )


def _iter_tensors(request: object) -> Iterable[TensorData]:
    batch: ForwardBackwardInput | None = None
    if isinstance(request, ForwardBackwardRequest):
        batch = request.forward_backward_input
    elif isinstance(request, ForwardRequest):
        batch = request.forward_input
    elif isinstance(request, SampleRequest) and request.target_prompt_logprobs is not None:
        yield request.target_prompt_logprobs
    for datum in batch.data if batch is not None else ():
        yield from datum.loss_fn_inputs.values()


T = TypeVar("T")
#: Retry-After for requests that exceed the memory budget.
OVERLOAD_RETRY_SECONDS = 2.0
#: Decoding holds the GIL most of the time, so more threads would not help.
NUM_DECODER_THREADS = 2


class Overloaded(InternalServerError):
    """HTTP 503: the memory budget for request bodies is used up."""

    status_code = 503


class BodyMemoryBudget:
    """Memory budget for the request bodies of one API process."""

    def __init__(self, config: ServerConfig) -> None:
        self.max_body_bytes = config.max_body_bytes
        self.body_seconds = config.body_seconds
        self.max_bytes = max(config.max_inflight_bytes, config.max_body_bytes)
        """At least one body: a smaller budget would always reject the largest bodies."""
        self.max_bytes_per_tenant = max(self.max_bytes // 2, config.max_body_bytes)
        self.num_bytes = 0
        self._by_tenant: Counter[str] = Counter()
        self._decoders = ThreadPoolExecutor(NUM_DECODER_THREADS, thread_name_prefix="decoder")

    def reserve(self, tenant_id: str) -> BodyReservation:
        """A context manager that releases its share of the budget at the end."""
        return BodyReservation(self, tenant_id)

    def acquire(self, tenant_id: str, num_bytes: int) -> None:
        """Reserve bytes for a tenant; raises RateLimitError or Overloaded above the budget."""
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
        """Return bytes of a tenant to the budget."""
        self.num_bytes -= num_bytes
        self._by_tenant[tenant_id] -= num_bytes
        if not self._by_tenant[tenant_id]:
            del self._by_tenant[tenant_id]

    async def run_decoder(self, function: Callable[[], T]) -> T:
        """Run a function that decodes a large body on one of a few threads."""
        return await asyncio.get_running_loop().run_in_executor(self._decoders, function)


class BodyReservation:
    """The bytes reserved by one request."""

    __slots__ = ("_body_budget", "_num_bytes", "_tenant_id")

    def __init__(self, body_budget: BodyMemoryBudget, tenant_id: str) -> None:
        self._body_budget = body_budget
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
            self._body_budget.release(self._tenant_id, self._num_bytes)
            self._num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Reserve more bytes; raises if the budget does not allow it."""
        self._body_budget.acquire(self._tenant_id, num_bytes)
        self._num_bytes += num_bytes
