"""Futures of the methods that returned plain values before SDK 0.38, for scripts of both kinds."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar, cast

from tinkex.client.compat import warn_value_use
from tinkex.client.future import APIFuture, map_future
from tinkex.logs import get_logger

T = TypeVar("T")
logger = get_logger(__name__)


def wait_or_return(source: APIFuture[T], value_type: type[T]) -> APIFuture[T]:
    """Return the future of a value; in synchronous code it is already resolved.

    Scripts written for 0.36 catch errors where a client is created, so synchronous code waits here.
    In a coroutine nothing blocks, and the error is raised by await.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _resolved(source.result(), value_type)
    future = StrFuture() if value_type is str else ValueFuture(value_type)
    return map_future(source, lambda value: value, cast("APIFuture[T]", future))


def _resolved(value: T, value_type: type[T]) -> APIFuture[T]:
    if isinstance(value, str):
        return cast("APIFuture[T]", ResolvedStr(value))
    future = ValueFuture(value_type)
    future.settle(value)
    return future


class _ClassOfValue:
    """Makes isinstance() true for the class of the value, as it was when methods returned it."""

    _value_type: type

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._value_type


class ValueFuture(_ClassOfValue, APIFuture[T]):
    """A future that has the attributes of its value too, which wait for it; deprecated since 0.38.

    An error that is never retrieved is logged.
    """

    def __init__(self, value_type: type[T]) -> None:
        super().__init__()
        self._value_type = value_type
        self._is_retrieved = False

    def result(self, timeout: float | None = None) -> T:
        """Wait for the value; raises WrongThread on an I/O thread, where it would deadlock."""
        self._is_retrieved = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the error, or None; raises WrongThread on an I/O thread like result()."""
        self._is_retrieved = True
        return super().exception(timeout)

    def __getattr__(self, name: str) -> Any:
        # Tools probe for private names; that must not block.
        if name.startswith("__") or (name.startswith("_") and not self.done()):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warn_value_use(self._value_type.__name__, name)
        return getattr(self.result(), name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._value_type)})

    def __repr__(self) -> str:
        return repr(self.result()) if self._has_value() else super().__repr__()

    def __eq__(self, other: object) -> bool:
        return self is other or (self._has_value() and self.result() == other)

    # By identity, like every future: the tools of concurrent.futures keep futures in sets.
    __hash__ = APIFuture.__hash__

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        return self.result().__reduce_ex__(protocol)

    def __del__(self) -> None:
        if not self._is_retrieved and self.done() and not self.cancelled():
            error = APIFuture.exception(self)
            if error is not None:
                logger.error("%s was not created: %s", self._value_type.__name__, error)

    def _has_value(self) -> bool:
        return self.done() and not self.cancelled() and APIFuture.exception(self) is None


class StrFuture(ValueFuture[str]):
    """The future of a string that is not known yet; used as a string, it waits."""

    def __init__(self) -> None:
        super().__init__(str)

    def __str__(self) -> str:
        return self.result()

    def __format__(self, spec: str) -> str:
        return format(self.result(), spec)

    def __len__(self) -> int:
        return len(self.result())

    def __contains__(self, part: str) -> bool:
        return part in self.result()

    def __eq__(self, other: object) -> bool:
        return self is other or self.result() == other

    def __hash__(self) -> int:
        return hash(self.result())


class ResolvedStr(str, APIFuture[str]):
    """A string that is its own resolved future."""

    def __init__(self, value: str) -> None:
        APIFuture.__init__(self)
        self.settle(str(value))

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return (str, (str(self),))
