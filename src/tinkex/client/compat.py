"""Compatibility with the official package: low-level types and deprecation warnings."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TypedDict

from tinkex.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Timeout:
    """Timeouts in seconds; `timeout` is the default for the others."""

    timeout: float | None = None
    connect: float | None = None
    read: float | None = None
    write: float | None = None
    pool: float | None = None


class RequestOptions(TypedDict, total=False):
    """Options of one low-level request."""

    headers: dict[str, str]
    max_retries: int
    timeout: float | Timeout | None
    params: dict[str, object]
    extra_json: dict[str, object]
    idempotency_key: str


def warn_moved(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that a method is deprecated."""
    warnings.warn(f"{old} is deprecated; use {new}", FutureWarning, stacklevel=stacklevel)


def warn_loss_type_input(value: str | None) -> None:
    """Warn that loss_type_input is deprecated; reject invalid values."""
    if value is None:
        return
    if value != "logprobs":
        raise InvalidInput(f"loss_type_input must be 'logprobs', got {value!r}")
    text = "loss_type_input is deprecated: a custom loss always receives log-probabilities"
    warnings.warn(text, FutureWarning, stacklevel=3)


def warn_unused_name(name: str | None) -> None:
    """Warn that a snapshot for sampling has no name."""
    if name is not None:
        text = (
            "name is deprecated and has no effect here; to save weights permanently, use "
            "save_weights_for_sampler(name) and create_sampling_client(path)"
        )
        warnings.warn(text, FutureWarning, stacklevel=3)
