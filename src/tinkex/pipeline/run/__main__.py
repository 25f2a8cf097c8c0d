"""`python -m tinkex.pipeline.run`: the pipeline as run.sh starts it."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from tinkex.errors import TinkexError
from tinkex.logs import attach_logger
from tinkex.pipeline.config import list_ignored_variables, read_config
from tinkex.pipeline.run.plan import parse_flags
from tinkex.pipeline.run.report import RunOutput, summary_line, table_rows, write_table
from tinkex.pipeline.run.runner import run_pipeline

#: Exit codes after Ctrl-C and SIGTERM; not reported as errors.
SIGNALLED = frozenset({130, 143})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the pipeline; returns 0, 1 after an error, 2 for a wrong flag, 130 or 143 (signal)."""
    flags = parse_flags(argv)
    started = time.monotonic()
    attach_logger("warning")
    output = RunOutput(sys.stdout)
    try:
        for note in list_ignored_variables():
            output.write_line(f"note: {note}")
        outcomes = run_pipeline(read_config(is_smoke=flags.smoke_test), flags, output)
        write_table(table_rows(outcomes), sys.stdout)
        output.write_line(summary_line(outcomes, time.monotonic() - started))
    except TinkexError as error:
        sys.stdout.flush()
        code = int(getattr(error, "exit_code", 1))
        sys.stderr.write(f"{'' if code in SIGNALLED else 'Error: '}{error.message}\n")
        if error.hint:
            sys.stderr.write(f"{error.hint}\n")
        return code
    except OSError as error:
        sys.stderr.write(f"Error: {error.filename or 'the disk'}: {error.strerror or error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
