"""Old ways of calling that still work, and what to use instead."""

from __future__ import annotations

import warnings

from tinkex.errors import InvalidInput


def warn_moved(old: str, new: str, stacklevel: int = 3) -> None:
    """Say that a method has a new home."""
    warnings.warn(f"{old} is deprecated; use {new}", FutureWarning, stacklevel=stacklevel)


def warn_loss_type_input(value: str | None) -> None:
    """Say that loss_type_input is not needed; refuse a value that never was."""
    if value is None:
        return
    if value != "logprobs":
        raise InvalidInput(f"loss_type_input must be 'logprobs', got {value!r}")
    text = "loss_type_input is deprecated: a custom loss always receives log-probabilities"
    warnings.warn(text, FutureWarning, stacklevel=3)


def warn_unused_name(name: str | None) -> None:
    """Say that a snapshot for sampling has no name."""
    if name is not None:
        text = (
            "name is deprecated and has no effect here; for weights that stay, use "
            "save_weights_for_sampler(name) and create_sampling_client(path)"
        )
        warnings.warn(text, FutureWarning, stacklevel=3)
