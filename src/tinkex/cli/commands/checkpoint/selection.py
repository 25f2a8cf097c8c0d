"""Which checkpoints `tinkex checkpoint delete` means, and how they are shown beforehand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from tinkex.cli.commands.checkpoint.list import all_checkpoints
from tinkex.cli.commands.checkpoint.parameters import in_utc
from tinkex.cli.context import Context
from tinkex.cli.format import UNKNOWN, format_count, format_size, format_timestamp, plain_line
from tinkex.errors import NotFoundError, PermissionDeniedError
from tinkex.ids import TYPE_BY_SEGMENT, parse_tinker_path

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient
    from tinkex.types import Checkpoint

#: The words for a type, and the type: its own name, and the middle of its address.
TYPES = {kind: kind for kind in TYPE_BY_SEGMENT.values()} | TYPE_BY_SEGMENT
#: How many are named before a question; the others are counted.
NUM_NAMED = 20


class Filter(NamedTuple):
    """What checkpoints must be like; None is anything."""

    run_id: str | None = None
    checkpoint_type: str | None = None
    before: datetime | None = None
    after: datetime | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was asked for."""
        asked = (self.run_id, self.checkpoint_type, self.before, self.after)
        return all(value is None for value in asked)

    def fits(self, saved: Checkpoint) -> bool:
        """Whether a checkpoint of the right run is meant."""
        made = in_utc(saved.time)
        return (
            self.checkpoint_type in {None, saved.checkpoint_type}
            and (self.before is None or made < self.before)
            and (self.after is None or made > self.after)
        )


class Chosen(NamedTuple):
    """A checkpoint that is meant, and what the server says about it."""

    path: str
    saved: Checkpoint | None = None


def find_fitting(context: Context, client: RestClient, wanted: Filter) -> list[Chosen]:
    """All checkpoints that fit."""
    if wanted.run_id is not None:
        found: Sequence[Checkpoint] = client.list_checkpoints(wanted.run_id).result().checkpoints
    else:
        found = all_checkpoints(context, client).items
    return [Chosen(saved.tinker_path, saved) for saved in found if wanted.fits(saved)]


def look_up(client: RestClient, paths: Sequence[str]) -> list[Chosen]:
    """What the server says about these; of one that it does not know, nothing."""
    run_ids = {parse_tinker_path(path).run_id for path in paths}
    asked = [client.list_checkpoints(run_id) for run_id in run_ids]
    known: dict[str, Checkpoint] = {}
    for answer in asked:
        try:
            known |= {saved.tinker_path: saved for saved in answer.result().checkpoints}
        except (NotFoundError, PermissionDeniedError):
            # Deleting will say so, of each one.
            continue
    return [Chosen(path, known.get(path)) for path in paths]


def describe(chosen: Sequence[Chosen]) -> str:
    """What will be deleted, in lines for people."""
    lines = [f"{format_count(len(chosen), 'checkpoint')} ({total_size(chosen)}):"]
    lines += [f"  {_describe_one(one)}" for one in chosen[:NUM_NAMED]]
    if len(chosen) > NUM_NAMED:
        lines.append(f"  and {len(chosen) - NUM_NAMED:,} more")
    return "\n".join([*lines, "This cannot be undone."])


def total_size(chosen: Iterable[Chosen]) -> str:
    """How large they are together, as far as that is known."""
    sizes = [one.saved.size_bytes if one.saved else None for one in chosen]
    known = [size for size in sizes if size is not None]
    if not known:
        return "size unknown"
    return ("" if len(known) == len(sizes) else "at least ") + format_size(sum(known))


def _describe_one(one: Chosen) -> str:
    if one.saved is None:
        return f"{plain_line(one.path)}\n    not found"
    size = format_size(one.saved.size_bytes)
    facts = [
        one.saved.checkpoint_type,
        *([size] if size != UNKNOWN else []),
        format_timestamp(one.saved.time),
        *(["public"] if one.saved.public else []),
    ]
    return f"{plain_line(one.path)}\n    {', '.join(facts)}"
