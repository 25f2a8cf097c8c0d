"""zstd bodies: packed for the network, unpacked within a limit whatever their headers claim."""

from __future__ import annotations

from tinkex.wire.proto.wire_format import WireError

#: What is unpacked at a time. zstd can turn four bytes into 128 KiB, so the limit may be passed
#: by at most 32 MiB before anybody notices.
DECOMPRESS_CHUNK_BYTES = 1024
#: The most memory that a frame may ask for to look back in; zstd's levels up to 19 need no more.
MAX_WINDOW_BYTES = 8 * 1024 * 1024


def compress_zstd(data: bytes) -> bytes:
    """One zstd frame that says how large its content is."""
    import zstandard

    return zstandard.ZstdCompressor().compress(data)


def zstd_content_size(data: bytes) -> int | None:
    """How large the content of a zstd body says it is; None if it does not say."""
    import zstandard

    try:
        num_bytes = zstandard.frame_content_size(data)
    except zstandard.ZstdError:
        return 0
    return None if num_bytes < 0 else num_bytes


def decompress_zstd(data: bytes, limit_bytes: int) -> bytes:
    """The content of a zstd body; WireError if it is damaged or larger than the limit."""
    import zstandard

    try:
        num_bytes = zstandard.frame_content_size(data)
        if num_bytes > limit_bytes:
            raise WireError(f"a zstd body unpacks to {num_bytes} bytes; the limit is {limit_bytes}")
        if num_bytes > 0:
            return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
        return _decompress_unsized(data, limit_bytes)
    except zstandard.ZstdError as error:
        raise WireError(f"a zstd body is damaged: {error}") from None


def _decompress_unsized(data: bytes, limit_bytes: int) -> bytes:
    """Unpack frames that do not say how large they are, a little at a time."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    content = bytearray()
    frame = decompressor.decompressobj()
    for start in range(0, len(data), DECOMPRESS_CHUNK_BYTES):
        rest = data[start : start + DECOMPRESS_CHUNK_BYTES]
        while rest:
            if frame.eof:
                frame = decompressor.decompressobj()
            content += frame.decompress(rest)
            rest = frame.unused_data
            if len(content) > limit_bytes:
                raise WireError(f"a zstd body unpacks to more than {limit_bytes} bytes")
    if not frame.eof:
        raise WireError(f"a zstd body of {len(data)} bytes ends inside a frame")
    return bytes(content)
