"""How much a request may bring: bytes on the wire, bytes unpacked, cells of sparse tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod
from typing import Any, Final

from litestar.types import Receive

from tinkex.errors import APIStatusError, InvalidInput, UnprocessableEntityError
from tinkex.types import (
    ForwardBackwardInput,
    ForwardBackwardRequest,
    ForwardRequest,
    SampleRequest,
    TensorData,
)
from tinkex.wire.compression import decompress

#: Sparse tensors are filled up with zeros before they are used; this many cells of one request.
MAX_CELLS: Final = 64 * 1024 * 1024
#: Bodies up to this are decoded on the loop: handing them over would take longer.
SMALL_BYTES: Final = 32 * 1024
#: A length of more digits is too large whatever they are.
_MAX_DIGITS = 18
#: An escaped NUL, which no text of ours contains and PostgreSQL cannot store.
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


class PayloadTooLarge(APIStatusError):
    """HTTP 413: the body is larger than this server takes."""

    status_code = 413


class UnsupportedMedia(APIStatusError):
    """HTTP 415: the body is written in a way this server does not read."""

    status_code = 415


class ClientGone(APIStatusError):
    """The client closed the connection before its request was complete; nobody hears this."""

    status_code = 499


async def read_body(receive: Receive, declared: str | None, max_bytes: int) -> bytes:
    """The whole body; refused as soon as it is known to be too large."""
    # What is no number at all is the HTTP parser's to refuse; here the bytes themselves count.
    if declared is not None and declared.isdecimal() and int(declared[:_MAX_DIGITS]) > max_bytes:
        raise _too_large(int(declared[:_MAX_DIGITS]), max_bytes)
    message: Any = await receive()
    parts: list[bytes] = []
    num_bytes = 0
    while message["type"] == "http.request":
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        if num_bytes > max_bytes:
            raise _too_large(num_bytes, max_bytes)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)
        message = await receive()
    raise ClientGone()


def _too_large(num_bytes: int, max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"the body has {num_bytes} bytes or more; this server takes {max_bytes}, send less at once"
    )


def check_encoding(encoding: str) -> bool:
    """Whether a body of this Content-Encoding must be unpacked; 415 if nobody here can."""
    if encoding in {"", "identity"}:
        return False
    if encoding == "zstd":
        return True
    raise UnsupportedMedia(f"Content-Encoding {encoding[:80]!r} is not read here; use zstd or none")


def unpack(body: bytes, max_bytes: int) -> bytes:
    """The content of a zstd body, at most so many bytes of it."""
    return decompress(body, max_bytes)


def check_text(body: bytes) -> None:
    """Refuse JSON with a NUL in it."""
    if b"\\u0000" in body and _NUL.search(body):
        raise UnprocessableEntityError("a text contains the character \\u0000; leave it out")


def check_cells(request: object) -> None:
    """Refuse sparse tensors that would be huge once they are filled up."""
    num_cells = sum(prod(tensor.shape) for tensor in _tensors(request) if tensor.is_sparse)
    if num_cells > MAX_CELLS:
        raise InvalidInput(
            f"the sparse tensors of this request have {num_cells} cells; {MAX_CELLS} is the most, "
            "send fewer examples at once"
        )


def _tensors(request: object) -> Iterable[TensorData]:
    work: ForwardBackwardInput | None = None
    if isinstance(request, ForwardBackwardRequest):
        work = request.forward_backward_input
    elif isinstance(request, ForwardRequest):
        work = request.forward_input
    elif isinstance(request, SampleRequest) and request.target_prompt_logprobs is not None:
        yield request.target_prompt_logprobs
    for datum in work.data if work is not None else ():
        yield from datum.loss_fn_inputs.values()
