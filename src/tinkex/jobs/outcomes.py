"""What came of a piece of work, before it is written down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from tinkex.checkpoint.disk import DISK_FULL_MESSAGE, is_disk_full
from tinkex.engine.protocol import StepRefused
from tinkex.errors import InvalidInput, RequestErrorCategory, TinkexError
from tinkex.logs import get_logger
from tinkex.store.database import Connection

LOG = get_logger(__name__)
Effect: TypeAlias = Callable[[Connection], None]
"""Something to write down together with the outcome, in the same transaction."""


#: A metric of a pass that the store alone keeps: what its tokens weigh together.
TOTAL_WEIGHT_METRIC = "weight:sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """It worked."""

    result: bytes
    """As it goes to the client."""
    is_model_change: bool = False
    """Whether it changed its model, so that it is replayed after a crash."""
    num_tokens: int = 0
    metrics: Mapping[str, float] | None = None
    effects: tuple[Effect, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """It did not."""

    message: str
    category: RequestErrorCategory
    is_model_change: bool = False
    """Whether it changed its model all the same."""
    num_tokens: int = 0
    effects: tuple[Effect, ...] = ()


JobOutcome: TypeAlias = Completed | Failed
CANCELLED = Failed(message="the request was cancelled", category=RequestErrorCategory.User)


def to_failed(error: Exception, operation: str) -> Failed:
    """An exception as the client is told it; what nobody foresaw is logged in full."""
    if isinstance(error, InvalidInput):
        is_change = isinstance(error, StepRefused)
        return Failed(
            message=error.message, category=RequestErrorCategory.User, is_model_change=is_change
        )
    if isinstance(error, TinkexError):
        return Failed(message=error.message, category=error.category)
    if isinstance(error, ValueError):
        return Failed(message=str(error), category=RequestErrorCategory.User)
    if is_disk_full(error):
        LOG.error("%s failed: %s", operation, error)
        reason = f"the server could not use its disk: {DISK_FULL_MESSAGE}"
        return Failed(message=reason, category=RequestErrorCategory.Server)
    if isinstance(error, OSError) and error.strerror:
        LOG.error("%s failed: %s", operation, error)
        reason = f"the server could not use its disk: {error.strerror}"
        return Failed(message=reason, category=RequestErrorCategory.Server)
    LOG.error("%s failed", operation, exc_info=error)
    reason = f"{operation} failed in the server: {type(error).__name__}: {error}"
    return Failed(message=reason, category=RequestErrorCategory.Server)
