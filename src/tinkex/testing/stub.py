"""The stub server as a test holds it: start, look inside, break things, stop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from tinkex.errors import InvalidInput
from tinkex.testing.app import StubApp
from tinkex.testing.calls import Call, CallLog
from tinkex.testing.dialects import check_endpoint, find_dialect
from tinkex.testing.faults import Fault, FaultPlan, Match
from tinkex.testing.loopback import HOST, Loopback
from tinkex.testing.state import Session, StubConfig, World
from tinkex.testing.tenants import Tenants


class StubServer:
    """A Tinker server in this process, on a free port of this machine.

    It trains and samples a real, tiny model: a bigram table over 512 tokens, of which the first 256
    are bytes. Use it as a context manager, or call `start` and `stop`.
    """

    def __init__(  # noqa: PLR0913 - every knob has a default, and tests name the ones they turn
        self,
        *,
        client_config: Mapping[str, Any] | None = None,
        dynamic_config: Mapping[str, Any] | None = None,
        api_keys: Iterable[str] | None = None,
        models: Iterable[str] = ("tinkex/bigram",),
        long_poll_seconds: float = 5.0,
        work_seconds: float = 0.0,
        gap_seconds: float = 1.0,
        token_seconds: float = 3600.0,
        dialect: str = "current",
        port: int = 0,
        record: bool = True,
    ) -> None:
        if isinstance(models, str):
            raise InvalidInput(f"models is a list of names, got the text {models!r}")
        config = StubConfig(
            dialect=find_dialect(dialect),
            client_config=dict(client_config or {}),
            dynamic_config=dict(dynamic_config or {}),
            models=tuple(models),
            long_poll_seconds=long_poll_seconds,
            work_seconds=work_seconds,
            gap_seconds=gap_seconds,
        )
        self._world = World(config, Tenants(api_keys, token_seconds))
        self._faults = FaultPlan()
        self._log = CallLog() if record else None
        self._app = StubApp(self._world, self._faults, self._log)
        self._port = port
        self._loopback: Loopback | None = None

    # --- life -------------------------------------------------------------------------------
    def start(self) -> Self:
        """Begin to serve; a port that was chosen once stays the same."""
        if self._loopback is not None:
            raise RuntimeError("the stub server is running already")
        clock = self._world.clock
        self._loopback = Loopback(self._app, self._port, clock.attach, clock.detach)
        self._port = self._loopback.port
        self._world.url = self.url
        return self

    def stop(self) -> None:
        """Close every connection and stop serving; what the server knows is kept."""
        loopback, self._loopback = self._loopback, None
        if loopback is not None:
            loopback.stop()

    def restart(self) -> None:
        """Stop if running, then serve on the same port with the same state."""
        self.stop()
        self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Where the server is: http://127.0.0.1:port."""
        if self._port == 0:
            raise RuntimeError("the stub server has not been started")
        return f"http://{HOST}:{self._port}"

    # --- looking inside ---------------------------------------------------------------------
    def calls(self, endpoint: str | None = None) -> list[Call]:
        """The calls in order of arrival, of one endpoint (by its name in the table) or of all."""
        if endpoint is not None:
            check_endpoint(endpoint)
        return self._recorded().calls(endpoint)

    def wait_for(self, endpoint: str, count: int = 1, timeout: float = 30.0) -> list[Call]:
        """Block until that many calls arrived, else raise AssertionError with what was seen."""
        return self._recorded().wait_for(check_endpoint(endpoint), count, timeout)

    def _recorded(self) -> CallLog:
        if self._log is None:
            raise RuntimeError("this stub server was made with record=False and keeps no calls")
        return self._log

    @property
    def executed(self) -> list[tuple[str, int | None, str]]:
        """(model_id, seq_id, kind) of the models' operations, in the order they were executed."""
        return list(self._world.executed)

    @property
    def sessions(self) -> dict[str, Session]:
        """The sessions by id, oldest first."""
        return dict(self._world.sessions)

    @property
    def finish_reasons(self) -> dict[str, str]:
        """success, errored or interrupted, by the id of each session that was finished."""
        return {
            session_id: session.finish_reason
            for session_id, session in self.sessions.items()
            if session.finish_reason is not None
        }

    def heartbeats(self, session_id: str | None = None) -> list[float]:
        """When heartbeats arrived, on the monotonic clock; of one session or of all."""
        return sorted(
            beat
            for session in self.sessions.values()
            if session_id in {None, session.session_id}
            for beat in list(session.heartbeats)
        )

    # --- breaking things --------------------------------------------------------------------
    def inject(
        self, endpoint: str, fault: Fault, times: int | None = 1, match: Match | None = None
    ) -> None:
        """Let the next calls of an endpoint go wrong; `times` None means all of them.

        `match` is called in the server's thread and picks the calls that are meant.
        """
        self._faults.add(check_endpoint(endpoint), fault, times, match)

    def clear_faults(self) -> None:
        """Let nothing more go wrong."""
        self._faults.clear()
