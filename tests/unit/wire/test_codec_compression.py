"""zstd bodies: round trips and limits."""

from __future__ import annotations

import tracemalloc

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.wire.codec import compress_zstd, decompress_zstd, zstd_content_size
from tinkex.wire.proto import WireError


def unsized(data: bytes) -> bytes:
    """Return a frame without a declared content size."""
    return zstandard.ZstdCompressor(write_content_size=False).compress(data)


def test_empty_and_large_bodies_round_trip() -> None:
    for data in (b"", b"x", bytes(3_000_000), bytes(range(256)) * 4000):
        assert decompress_zstd(compress_zstd(data), len(data)) == data
        assert decompress_zstd(unsized(data), len(data)) == data


@settings(derandomize=True, max_examples=50)
@given(st.lists(st.binary(max_size=2000), min_size=1, max_size=4))
def test_concatenated_frames_are_decompressed(parts: list[bytes]) -> None:
    body = b"".join(map(unsized, parts))
    assert decompress_zstd(body, 10_000) == b"".join(parts)


@pytest.mark.parametrize("pack", [compress_zstd, unsized])
def test_limit_is_inclusive(pack: type) -> None:
    body = pack(bytes(5000))
    assert len(decompress_zstd(body, 5000)) == 5000
    with pytest.raises(WireError, match="4999"):
        decompress_zstd(body, 4999)


def test_decompression_bomb_is_stopped_early() -> None:
    bomb = unsized(bytes(400_000_000))
    tracemalloc.start()
    with pytest.raises(WireError, match="more than 1000000 bytes"):
        decompress_zstd(bomb, 1_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 120_000_000


def test_frame_with_wrong_size_is_refused() -> None:
    honest = compress_zstd(b"a" * 200)
    at = honest.index(bytes([200]), 4)
    for claimed in (10, 255):
        lying = honest[:at] + bytes([claimed]) + honest[at + 1 :]
        assert zstandard.frame_content_size(lying) == claimed
        with pytest.raises(WireError, match="damaged"):
            decompress_zstd(lying, 1000)


@pytest.mark.parametrize("pack", [compress_zstd, unsized])
def test_every_prefix_is_refused(pack: type) -> None:
    body = pack(b"some text, some text, some text")
    for end in range(len(body)):
        with pytest.raises(WireError):
            decompress_zstd(body[:end], 1000)


@pytest.mark.parametrize(
    "body", [b"", b"plain", compress_zstd(b"x") + b"!", unsized(b"x") + b"more"]
)
def test_other_data_is_refused(body: bytes) -> None:
    with pytest.raises(WireError):
        decompress_zstd(body, 1000)


def test_frame_with_large_window_is_refused() -> None:
    wide = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    packer = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    body = packer.compress(bytes(1000)) + packer.flush()
    with pytest.raises(WireError, match="damaged"):
        decompress_zstd(body, 10_000)


def test_content_size_is_read_without_decompression() -> None:
    assert zstd_content_size(compress_zstd(bytes(5000))) == 5000
    assert zstd_content_size(unsized(bytes(5000))) is None
    assert zstd_content_size(b"no zstd") == 0
