"""Compatibility with the official package: low-level types and deprecation warnings."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

from tinkex.errors import ConfigError, InvalidInput
from tinkex.settings import read_environment

ClientT = TypeVar("ClientT")


def _warns_of_deprecations() -> bool:
    # An invalid variable is reported where a client reads its configuration, not by an import.
    try:
        return read_environment().deprecations
    except ConfigError:
        return False


#: Off by default: scripts for 0.36 use these names, and some turn warnings into errors.
WARNS_OF_DEPRECATIONS = _warns_of_deprecations()


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


def deprecate_async_names(client: type[ClientT]) -> type[ClientT]:
    """Make the `_async` methods of a client warn, if TINKEX_DEPRECATIONS is set."""
    if WARNS_OF_DEPRECATIONS:
        for name, method in list(vars(client).items()):
            if name.endswith("_async") and inspect.iscoroutinefunction(method):
                setattr(client, name, _warning_method(client.__name__, name, method))
    return client


def _warning_method(owner: str, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    # Not a coroutine function: it must warn at the line of the call, not when it is awaited.
    @functools.wraps(method)
    def call(*args: object, **kwargs: object) -> object:
        warn_moved(f"{owner}.{name}()", f"await {owner}.{name.removesuffix('_async')}()")
        return method(*args, **kwargs)

    return call


def warn_value_use(value: str, attribute: str) -> None:
    """Warn that a future is used as its value, if TINKEX_DEPRECATIONS is set."""
    if WARNS_OF_DEPRECATIONS:
        new = "its result(), or await it"
        warn_moved(f"Using the future of a {value} as the value (.{attribute})", new, stacklevel=4)
