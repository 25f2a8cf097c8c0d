"""Which checkpoints `tinkex checkpoint delete` means, and how they are shown beforehand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from tinkex.cli.commands.checkpoint.list import fetch_checkpoints
from tinkex.cli.commands.checkpoint.parameters import to_utc
from tinkex.cli.context import Context
from tinkex.cli.format import UNKNOWN, escape_line, format_count, format_size, format_timestamp
from tinkex.errors import NotFoundError, PermissionDeniedError
from tinkex.ids import TYPE_BY_SEGMENT, parse_tinker_path

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient
    from tinkex.types import Checkpoint

#: The words for a type, and the type: its own name, and the middle of its address.
CHECKPOINT_TYPES = {kind: kind for kind in TYPE_BY_SEGMENT.values()} | TYPE_BY_SEGMENT
#: How many are named before a question; the others are counted.
MAX_LISTED = 20


class CheckpointFilter(NamedTuple):
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

    def matches(self, saved: Checkpoint) -> bool:
        """Whether a checkpoint of the right run is meant."""
        made = to_utc(saved.time)
        return (
            self.checkpoint_type in {None, saved.checkpoint_type}
            and (self.before is None or made < self.before)
            and (self.after is None or made > self.after)
        )


class SelectedCheckpoint(NamedTuple):
    """A checkpoint that is meant, and what the server says about it."""

    path: str
    checkpoint: Checkpoint | None = None


def find_matching(
    context: Context, client: RestClient, filters: CheckpointFilter
) -> list[SelectedCheckpoint]:
    """All checkpoints that fit."""
    if filters.run_id is not None:
        found: Sequence[Checkpoint] = client.list_checkpoints(filters.run_id).result().checkpoints
    else:
        found = fetch_checkpoints(context, client).items
    return [
        SelectedCheckpoint(saved.tinker_path, saved) for saved in found if filters.matches(saved)
    ]


def fetch_selected(client: RestClient, paths: Sequence[str]) -> list[SelectedCheckpoint]:
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
    return [SelectedCheckpoint(path, known.get(path)) for path in paths]


def describe_selection(selected: Sequence[SelectedCheckpoint]) -> str:
    """What will be deleted, in lines for people."""
    lines = [f"{format_count(len(selected), 'checkpoint')} ({format_total_size(selected)}):"]
    lines += [f"  {_describe_checkpoint(one)}" for one in selected[:MAX_LISTED]]
    if len(selected) > MAX_LISTED:
        lines.append(f"  and {len(selected) - MAX_LISTED:,} more")
    return "\n".join([*lines, "This cannot be undone."])


def format_total_size(selected: Iterable[SelectedCheckpoint]) -> str:
    """How large they are together, as far as that is known."""
    sizes = [one.checkpoint.size_bytes if one.checkpoint else None for one in selected]
    known = [size for size in sizes if size is not None]
    if not known:
        return "size unknown"
    return ("" if len(known) == len(sizes) else "at least ") + format_size(sum(known))


def _describe_checkpoint(one: SelectedCheckpoint) -> str:
    if one.checkpoint is None:
        return f"{escape_line(one.path)}\n    not found"
    size = format_size(one.checkpoint.size_bytes)
    facts = [
        one.checkpoint.checkpoint_type,
        *([size] if size != UNKNOWN else []),
        format_timestamp(one.checkpoint.time),
        *(["public"] if one.checkpoint.public else []),
    ]
    return f"{escape_line(one.path)}\n    {', '.join(facts)}"
