"""Checkpoint search, of SDK 0.39."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from msgspec import Meta, field

from tinkex.types.base import Message, Reply
from tinkex.types.checkpoints import Checkpoint, CheckpointType
from tinkex.types.session_search import OwnSearchOwner, SearchOwner


class CheckpointSearchCursor(Reply):
    """The start of the next page; pass it back unchanged."""

    last_created_at: Annotated[datetime, Meta(tz=True)]
    last_checkpoint_uuid: str


class CheckpointSearchRequest(Message):
    """Request checkpoints; all conditions must match."""

    project_ids: Annotated[list[str], Meta(max_length=1000)] | None = None
    """In these projects; None means all that the caller may list."""
    user_metadata: Annotated[dict[str, str], Meta(max_length=100)] = field(default_factory=dict)
    """With these key-value pairs."""
    checkpoint_type: CheckpointType | None = None
    """Of this kind; None means all."""
    owner: SearchOwner = OwnSearchOwner()
    """Of these owners."""
    base_models: Annotated[list[str], Meta(max_length=1000)] | None = None
    """Of any of these base models; an empty list matches nothing."""
    limit: Annotated[int, Meta(ge=1, le=200)] = 50
    """The size of a page, 1 to 200."""
    cursor: CheckpointSearchCursor | None = None
    """The previous page's `next_cursor`."""


class CheckpointSearchResponse(Reply):
    """A page of results, newest first."""

    checkpoints: list[Checkpoint]
    next_cursor: CheckpointSearchCursor | None = None
    """For the next page; None if this is the last."""
