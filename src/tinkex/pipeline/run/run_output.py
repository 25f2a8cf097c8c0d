"""What a run tells: lines on a stream, and the same with the time in OUT_DIR's run.log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TextIO

from tinkex import clock

LOG_NAME = "run.log"
_STDERR = 2


class RunOutput:
    """Says what happens, to people now and to whoever reads the log later."""

    def __init__(
        self, stream: TextIO | None, *, log: Path | None = None, reserve_stdout: bool = False
    ) -> None:
        """Without a stream, only the log is told; trainers may have to leave stdout alone."""
        self._stream = stream
        self._log = log
        self._reserve_stdout = reserve_stdout

    def with_log_file(self, log: Path) -> RunOutput:
        """The same voice, with a log."""
        return RunOutput(self._stream, log=log, reserve_stdout=self._reserve_stdout)

    def write_line(self, text: str, stage: str | None = None) -> None:
        """One line, or several, about a stage or the whole run."""
        head = f"[{stage}] " if stage else ""
        lines = [f"{head}{line}" for line in text.split("\n")]
        if self._stream is not None:
            self._stream.write("".join(f"{line}\n" for line in lines))
            # Trainers write to the same terminal or file; the order must be theirs and ours.
            self._stream.flush()
        if self._log is not None:
            now = clock.utc_now().astimezone().isoformat(timespec="seconds")
            with self._log.open("a", encoding="utf-8") as file:
                file.writelines(f"{now} {line}\n" for line in lines)

    @contextmanager
    def child_output(self) -> Iterator[tuple[int | IO[bytes] | None, int | IO[bytes] | None]]:
        """Where a trainer's stdout and stderr go; None is where ours go."""
        if self._stream is None and self._log is not None:
            with self._log.open("ab") as file:
                yield file, file
        else:
            yield (_STDERR if self._reserve_stdout else None), None

    @property
    def location_hint(self) -> str:
        """Where a trainer's last lines can be read."""
        return "above" if self._stream is not None else f"in {self._log}"
