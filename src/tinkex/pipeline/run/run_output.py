"""Output of a run: lines on a stream, and with timestamps in run.log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TextIO

from tinkex import clock

LOG_NAME = "run.log"
_STDERR = 2


class RunOutput:
    """Writes progress lines to a stream and to the log file."""

    def __init__(
        self, stream: TextIO | None, *, log: Path | None = None, reserve_stdout: bool = False
    ) -> None:
        """Without a stream, write only to the log.

        With `reserve_stdout`, trainers write to stderr only.
        """
        self._stream = stream
        self._log = log
        self._reserve_stdout = reserve_stdout

    def with_log_file(self, log: Path) -> RunOutput:
        """Return a copy that also writes to a log file."""
        return RunOutput(self._stream, log=log, reserve_stdout=self._reserve_stdout)

    def write_line(self, text: str, stage: str | None = None) -> None:
        """Write one or more lines, with the stage as prefix if given."""
        head = f"[{stage}] " if stage else ""
        lines = [f"{head}{line}" for line in text.split("\n")]
        if self._stream is not None:
            self._stream.write("".join(f"{line}\n" for line in lines))
            # Trainers write to the same terminal or file, so flush to keep the order.
            self._stream.flush()
        if self._log is not None:
            now = clock.utc_now().astimezone().isoformat(timespec="seconds")
            with self._log.open("a", encoding="utf-8") as file:
                file.writelines(f"{now} {line}\n" for line in lines)

    @contextmanager
    def child_output(self) -> Iterator[tuple[int | IO[bytes] | None, int | IO[bytes] | None]]:
        """Yield stdout and stderr for a trainer; None means inherit."""
        if self._stream is None and self._log is not None:
            with self._log.open("ab") as file:
                yield file, file
        else:
            yield (_STDERR if self._reserve_stdout else None), None

    @property
    def location_hint(self) -> str:
        """Where to find the output of a trainer."""
        return "above" if self._stream is not None else f"in {self._log}"
