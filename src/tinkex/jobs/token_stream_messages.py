"""Messages between API processes and workers about the tokens of running samples.

A frame is a length of four bytes and a list of messages in msgpack. Both sides prove that they know
the secret of the store before anything else is sent:

worker -> API: Challenge(nonce)
API -> worker: Proof(nonce, HMAC of both nonces)
worker -> API: Proof("", HMAC of both nonces, in the other order)
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from tinkex.engine.protocol import SampleProgress
from tinkex.errors import TinkexError

#: The longest frame that is accepted.
MAX_FRAME_BYTES: Final = 4 << 20
#: The longest frame before the handshake is complete.
MAX_HANDSHAKE_BYTES: Final = 512
#: The longest job id in a watch.
MAX_JOB_ID_CHARS: Final = 128
NONCE_BYTES: Final = 32
_LENGTH_BYTES = 4
_KEY_LABEL = b"tinkex token streams"


class InvalidFrame(TinkexError):
    """The other side does not follow the protocol, or does not know the secret."""


class Challenge(msgspec.Struct, tag="challenge", array_like=True, frozen=True):
    """A nonce that the other side must sign."""

    nonce: bytes


class Proof(msgspec.Struct, tag="proof", array_like=True, frozen=True):
    """A signature of both nonces."""

    nonce: bytes
    signature: bytes


class Watch(msgspec.Struct, tag="watch", array_like=True, frozen=True):
    """Send the tokens of a job, from the first one."""

    job_id: str


class Unwatch(msgspec.Struct, tag="unwatch", array_like=True, frozen=True):
    """Do not send the tokens of a job any more."""

    job_id: str


class Started(msgspec.Struct, tag="started", array_like=True, frozen=True):
    """The worker runs a job; its tokens follow, from the first one."""

    job_id: str
    attempt: int
    """Grows when a job starts again because its worker died."""


class Progress(msgspec.Struct, tag="progress", array_like=True, frozen=True):
    """New tokens of several samples, as the engine reported them."""

    parts: Sequence[SampleProgress]


class Finished(msgspec.Struct, tag="finished", array_like=True, frozen=True):
    """The worker does not run a job any more; its result is or will be in the store."""

    job_id: str


Message: TypeAlias = Challenge | Proof | Watch | Unwatch | Started | Progress | Finished

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[Message])


def encode_frame(messages: Sequence[Message]) -> bytes:
    """Encode messages as one frame."""
    body = _ENCODER.encode(messages)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


class FrameDecoder:
    """Splits received bytes into messages."""

    def __init__(self, max_bytes: int = MAX_HANDSHAKE_BYTES) -> None:
        self.max_bytes = max_bytes
        """The longest accepted frame; raised after the handshake."""
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Add received bytes; return the messages that are complete now."""
        self._buffer += data
        messages: list[Message] = []
        while len(self._buffer) >= _LENGTH_BYTES:
            length = int.from_bytes(self._buffer[:_LENGTH_BYTES], "big")
            if length > self.max_bytes:
                raise InvalidFrame(f"a frame of {length} bytes; expected at most {self.max_bytes}")
            end = _LENGTH_BYTES + length
            if len(self._buffer) < end:
                break
            messages += _decode(bytes(self._buffer[_LENGTH_BYTES:end]))
            del self._buffer[:end]
        return messages


def _decode(body: bytes) -> list[Message]:
    try:
        return _DECODER.decode(body)
    except msgspec.DecodeError as error:
        raise InvalidFrame(f"an unreadable frame: {error}") from None


class Handshake:
    """The proofs of one connection."""

    def __init__(self, secret: bytes) -> None:
        # A key of its own, so that no signature is valid for another purpose.
        self._key = hmac.digest(secret, _KEY_LABEL, "sha256")
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        """The nonce of this side."""

    def sign(self, role: str, other_nonce: bytes) -> bytes:
        """Sign both nonces as `api` or `worker`."""
        text = role.encode() + b":" + other_nonce + self.nonce
        return hmac.new(self._key, text, hashlib.sha256).digest()

    def check(self, role: str, other_nonce: bytes, signature: bytes) -> None:
        """Raise InvalidFrame unless the other side, in this role, signed both nonces."""
        text = role.encode() + b":" + self.nonce + other_nonce
        expected = hmac.new(self._key, text, hashlib.sha256).digest()
        if len(other_nonce) != NONCE_BYTES or not hmac.compare_digest(expected, signature):
            raise InvalidFrame("the other side does not know the secret of the store")
