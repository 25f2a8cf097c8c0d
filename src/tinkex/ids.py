"""Ids and names: tinker:// paths, URL path segments, new ids, lifetimes."""

from __future__ import annotations

import re
import uuid
from typing import NamedTuple
from urllib.parse import quote

from tinkex.errors import InvalidInput

SCHEME = "tinker://"
EXTERNAL_SEGMENT = "external_weights"
SAMPLER_SEGMENT = "sampler_weights"
#: The checkpoint type of each middle segment of a path.
TYPE_BY_SEGMENT = {
    "weights": "training",
    SAMPLER_SEGMENT: "sampler",
    EXTERNAL_SEGMENT: "external",
}
SEGMENT_BY_TYPE = {kind: segment for segment, kind in TYPE_BY_SEGMENT.items()}
CHECKPOINT_ID_SHAPE = f"<{'|'.join(TYPE_BY_SEGMENT)}>/<name>"
PATH_SHAPE = f"{SCHEME}<run>/{CHECKPOINT_ID_SHAPE}"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:+=@~-]{0,254}")


class TinkerPath(NamedTuple):
    """A parsed checkpoint path: tinker://<run>/<segment>/<name>."""

    run_id: str
    segment: str
    name: str

    @property
    def checkpoint_type(self) -> str:
        """training, sampler or external."""
        return TYPE_BY_SEGMENT[self.segment]

    @property
    def checkpoint_id(self) -> str:
        """The id within its run, e.g. weights/0001."""
        return f"{self.segment}/{self.name}"

    def __str__(self) -> str:
        return f"{SCHEME}{self.run_id}/{self.segment}/{self.name}"


def parse_tinker_path(text: str) -> TinkerPath:
    """Parse a tinker:// path; raises InvalidInput that names the wrong part."""
    shape = f"expected {PATH_SHAPE}"
    if not isinstance(text, str) or not text.startswith(SCHEME):
        raise InvalidInput(f"Invalid tinker path: {text!r}; {shape}{_suggest_path(text)}")
    parts = text.removeprefix(SCHEME).split("/")
    if len(parts) != 3 or not all(parts):
        raise InvalidInput(f"Invalid tinker path: {text!r}; {shape}")
    if parts[1] not in TYPE_BY_SEGMENT:
        kinds = ", ".join(TYPE_BY_SEGMENT)
        raise InvalidInput(f"Invalid tinker path: {text!r}; {parts[1]!r} is not one of {kinds}")
    return TinkerPath(check_id("run id", parts[0]), parts[1], check_name(parts[2]))


def _suggest_path(text: object) -> str:
    """Return a hint for a path without its scheme."""
    parts = text.split("/") if isinstance(text, str) else []
    if len(parts) == 3 and all(parts) and parts[1] in TYPE_BY_SEGMENT:
        return f"; did you mean {SCHEME + '/'.join(parts)!r}?"
    return ", as `tinkex checkpoint list` shows it"


def looks_like_checkpoint(text: str) -> bool:
    """Return whether a text without a scheme is more likely a checkpoint id than a model name."""
    return text.isdecimal() or not TYPE_BY_SEGMENT.keys().isdisjoint(text.split("/"))


def check_checkpoint_id(value: str) -> str:
    """Return a checkpoint id such as weights/0001; raises InvalidInput if it is invalid."""
    segment, _, name = value.partition("/")
    # The server decides which characters a name may have.
    if segment in TYPE_BY_SEGMENT and "/" not in name and name not in {"", ".", ".."}:
        return value
    raise InvalidInput(
        f"Invalid checkpoint id: {value!r}; expected {CHECKPOINT_ID_SHAPE}, such as weights/0001"
    )


def check_name(name: str) -> str:
    """Return a checkpoint name that is safe in paths and URLs; raises InvalidInput otherwise."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidInput(
            f"Invalid checkpoint name: {name!r}; use 1 to 255 letters, digits or . _ : + = @ ~ - "
            "and begin with a letter, digit or _"
        )
    return name


def check_id(what: str, value: str) -> str:
    """Return an id that is one path segment; raises InvalidInput otherwise."""
    if not isinstance(value, str) or not value or value in {".", ".."}:
        raise InvalidInput(f"Invalid {what}: {value!r}")
    if any(ch in "/?#%\\" or ord(ch) <= 32 or ord(ch) == 127 for ch in value):
        raise InvalidInput(f"Invalid {what}: {value!r} contains a character that ids cannot have")
    return value


#: The longest name of a tenant or an API key.
MAX_LABEL_CHARS = 200


def is_label(text: str) -> bool:
    """Whether a text can name a tenant or an API key: printable, without surrounding spaces."""
    return 1 <= len(text) <= MAX_LABEL_CHARS and text.isprintable() and text == text.strip()


def path_segment(value: str) -> str:
    """Quote an id for a URL path; colons stay, slashes are quoted."""
    return quote(value, safe=":")


def new_id() -> str:
    """Return a new unique id."""
    return str(uuid.uuid4())


MAX_TTL_SECONDS = 10 * 365 * 24 * 3600


def check_ttl(ttl_seconds: int | None) -> int | None:
    """Return a lifetime of one second to ten years, or None; raises InvalidInput otherwise."""
    if ttl_seconds is None:
        return None
    is_whole = isinstance(ttl_seconds, int) and not isinstance(ttl_seconds, bool)
    if not is_whole or not 1 <= ttl_seconds <= MAX_TTL_SECONDS:
        raise InvalidInput(
            f"ttl_seconds is {ttl_seconds!r:.80}; expected 1 to {MAX_TTL_SECONDS} (ten years), "
            "or None to keep it"
        )
    return ttl_seconds
