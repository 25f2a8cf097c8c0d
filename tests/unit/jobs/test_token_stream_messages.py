"""Frames and the handshake of token streams."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.engine.protocol import SampleProgress
from tinkex.jobs.token_stream_messages import (
    MAX_FRAME_BYTES,
    MAX_HANDSHAKE_BYTES,
    Finished,
    FrameDecoder,
    Handshake,
    InvalidFrame,
    Message,
    Progress,
    Started,
    Watch,
    encode_frame,
)

MESSAGES: list[Message] = [
    Started("job", 2),
    Progress([SampleProgress("job", 1, 7, (3, 4), (-0.5, -1.25), ([(3, -0.5), (9, -1.0)], None))]),
    Finished("job"),
]


@given(st.lists(st.integers(1, 40), max_size=30))
def test_any_cut_of_the_bytes_gives_the_same_messages(cuts: list[int]) -> None:
    data = encode_frame(MESSAGES) + encode_frame([]) + encode_frame([Watch("other")])
    decoder = FrameDecoder(MAX_FRAME_BYTES)
    received: list[Message] = []
    for size in cuts:
        received += decoder.feed(data[:size])
        data = data[size:]
    received += decoder.feed(data)
    assert received == [*MESSAGES, Watch("other")]
    progress = received[1]
    assert isinstance(progress, Progress)
    assert progress.parts[0].topk == ([(3, -0.5), (9, -1.0)], None)


def test_long_frames_are_refused_before_they_are_received() -> None:
    with pytest.raises(InvalidFrame, match="at most 512"):
        FrameDecoder().feed((MAX_HANDSHAKE_BYTES + 1).to_bytes(4, "big"))


@pytest.mark.parametrize(
    "body", [b"\xc1", b"", msgspec.msgpack.encode({"a": 1}), msgspec.msgpack.encode([["no", 1]])]
)
def test_unreadable_frames_are_refused(body: bytes) -> None:
    with pytest.raises(InvalidFrame, match="unreadable"):
        FrameDecoder().feed(len(body).to_bytes(4, "big") + body)


def test_both_sides_prove_that_they_know_the_secret() -> None:
    worker, api = Handshake(b"secret"), Handshake(b"secret")
    worker.check("api", api.nonce, api.sign("api", worker.nonce))
    api.check("worker", worker.nonce, worker.sign("worker", api.nonce))


def test_other_secrets_roles_and_nonces_are_refused() -> None:
    worker, api = Handshake(b"secret"), Handshake(b"secret")
    stranger = Handshake(b"other")
    attempts = [
        (stranger.nonce, stranger.sign("api", worker.nonce)),
        (api.nonce, api.sign("worker", worker.nonce)),
        (api.nonce, api.sign("api", stranger.nonce)),
        (stranger.nonce, api.sign("api", worker.nonce)),
        (b"", b""),
        # The worker's own signature, reflected.
        (worker.nonce, worker.sign("worker", worker.nonce)),
    ]
    for nonce, signature in attempts:
        with pytest.raises(InvalidFrame, match="does not know the secret"):
            worker.check("api", nonce, signature)
