"""The process of vLLM: starts it, exchanges frames with it, and ends it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from tinkex.engine.protocol import EngineLost
from tinkex.engine.vllm.frames import Answer, FailedFrame, ReadyFrame
from tinkex.errors import ConfigError
from tinkex.logs import get_logger
from tinkex.settings import child_environment

LOG = get_logger(__name__)
SERVE_FILE = Path(__file__).with_name("serve.py")
#: vLLM compiles and loads for minutes; after this time something is wrong.
START_SECONDS = 1800.0
#: Interval of progress in the log while vLLM starts.
PROGRESS_SECONDS = 10.0
#: A process that does not read its requests for this time is dead.
SEND_SECONDS = 60.0
STOP_SECONDS = 5.0
_LENGTH_BYTES = 4
_RECEIVE_BYTES = 1 << 20
_STDERR = 2
_DECODER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
#: vLLM must not send statistics or load anything over the network, and listens on loopback only.
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    # A forked process would keep the socket open.
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Threads that are bound to cores stand still when another process uses these.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class VllmProcess:
    """A running `serve.py`, with a socket to it."""

    def __init__(self, python: str, environment: Mapping[str, str], *, serve: Path = SERVE_FILE):
        self._python = python
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(SEND_SECONDS)
        self._buffer = b""
        try:
            self._process = subprocess.Popen(
                [python, str(serve), str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=_STDERR,
                pass_fds=[theirs.fileno()],
                env=child_environment({**_ENVIRONMENT, **environment}),
                # It ends its own children with its process group.
                start_new_session=True,
            )
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"vllm_python is {python!r}, which cannot be run: {error.strerror}",
                hint="Give the Python of an environment that has vLLM; see scripts/install-vllm.sh",
            ) from error
        finally:
            theirs.close()
        LOG.debug("the process of vLLM has pid %d", self.pid)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def load(self, arguments: Mapping[str, object]) -> ReadyFrame:
        """Load the engine; returns its properties. Takes minutes."""
        try:
            return self._wait_until_ready(arguments)
        except EngineLost:
            raise ConfigError(
                f"the process of vLLM ended while it started, with {self._python}",
                hint="The log lines above give the reason; is vLLM installed there?",
            ) from None

    def _wait_until_ready(self, arguments: Mapping[str, object]) -> ReadyFrame:
        started = time.monotonic()
        self.send(arguments)
        while True:
            frames = self.receive(PROGRESS_SECONDS)
            seconds = time.monotonic() - started
            if frames:
                return _check_ready(frames[0], seconds)
            if seconds > START_SECONDS:
                raise ConfigError(f"vLLM did not start within {START_SECONDS:g} s")
            LOG.info("vLLM is starting, since %.0f s", seconds)

    def send(self, frame: Mapping[str, object]) -> None:
        """Send a frame; raises EngineLost if the process is gone or does not read."""
        body = msgspec.msgpack.encode(frame)
        try:
            self._socket.sendall(len(body).to_bytes(_LENGTH_BYTES, "big") + body)
        except OSError as error:
            raise EngineLost(f"vLLM does not take requests any more: {error}") from error

    def receive(self, timeout_seconds: float) -> Sequence[Answer]:
        """Return the frames that have arrived; waits for the first one."""
        if not select.select([self._socket], [], [], timeout_seconds)[0]:
            return []
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except OSError:
            data = b""
        if not data:
            raise EngineLost("the process of vLLM has ended")
        self._buffer += data
        return list(self._take_frames())

    def _take_frames(self) -> list[Answer]:
        frames: list[Answer] = []
        start = 0
        while len(self._buffer) >= start + _LENGTH_BYTES:
            body = start + _LENGTH_BYTES
            end = body + int.from_bytes(self._buffer[start:body], "big")
            if len(self._buffer) < end:
                break
            frames.append(_DECODER.decode(self._buffer[body:end]))
            start = end
        self._buffer = self._buffer[start:]
        return frames

    def close(self) -> None:
        """End the process and its children."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        # The group may have members after its leader has ended.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _check_ready(frame: Answer, seconds: float) -> ReadyFrame:
    if isinstance(frame, FailedFrame):
        raise ConfigError(f"vLLM cannot start: {frame.error}", hint="The log lines above say more.")
    assert isinstance(frame, ReadyFrame)
    LOG.info("vLLM %s is ready, after %.1f s", frame.version, seconds)
    return frame
