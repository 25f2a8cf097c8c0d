"""Files over HTTP: checkpoints and traces, whole or in ranges."""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

import msgspec

from tinkex.testing.answers import Answer, Refusal
from tinkex.testing.calls import Call
from tinkex.testing.state import World
from tinkex.testing.weights import ARCHIVE_NAME, Checkpoint, file_etag

#: Below this, URLs need no key: whoever has one may read.
FILES = "/files/"
TRACE_NAME = "trace.json"
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


def file_urls(server_url: str, checkpoint: Checkpoint) -> dict[str, str]:
    """A URL per file, by the file's name."""
    return {name: _url(server_url, str(checkpoint.path), name) for name in checkpoint.files()}


def archive_url(server_url: str, checkpoint: Checkpoint) -> str:
    """The URL of the files in one tar."""
    return _url(server_url, str(checkpoint.path), ARCHIVE_NAME)


def trace_url(server_url: str, session_id: str) -> str:
    """The URL of a session's trace."""
    return _url(server_url, session_id, TRACE_NAME)


def _url(server_url: str, owner: str, name: str) -> str:
    return f"{server_url}{FILES}{quote(owner, safe='')}/{quote(name)}?signature=stub"


def download(world: World, call: Call) -> Answer:
    """A file, or the part of it that the Range header asks for."""
    owner, _, name = call.path.removeprefix(FILES).partition("/")
    content = _find(world, unquote(owner), unquote(name))
    etag = file_etag(content)
    headers = [
        (b"content-type", b"application/octet-stream"),
        (b"accept-ranges", b"bytes"),
        (b"etag", etag.encode()),
    ]
    asked = call.headers.get("range")
    if asked is None or call.headers.get("if-range", etag) != etag:
        return Answer(200, content, headers)
    bounds = parse_range(asked, len(content))
    if bounds is None:
        headers.append((b"content-range", b"bytes */%d" % len(content)))
        return Answer(416, b"", headers)
    start, stop = bounds
    headers.append((b"content-range", b"bytes %d-%d/%d" % (start, stop - 1, len(content))))
    return Answer(206, content[start:stop], headers)


def _find(world: World, owner: str, name: str) -> bytes:
    if name == TRACE_NAME and owner in world.sessions:
        return msgspec.json.encode({"traceEvents": [], "otherData": {"session_id": owner}})
    checkpoint = world.vault.find(owner)
    if checkpoint is not None and name == ARCHIVE_NAME:
        return checkpoint.archive()
    if checkpoint is None or name not in checkpoint.files():
        raise Refusal(404, f"there is no file {name!r}")
    return checkpoint.files()[name]


def parse_range(text: str, size: int) -> tuple[int, int] | None:
    """Where one byte range starts and stops; None if nothing of the file is in it."""
    match = _RANGE.fullmatch(text.strip())
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        start, stop = max(0, size - int(match[2])), size
    else:
        start = int(match[1])
        stop = min(size, int(match[2]) + 1) if match[2] else size
    return (start, stop) if start < stop else None
