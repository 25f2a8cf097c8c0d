"""Worker process: owns the engine and runs jobs; the supervisor starts it through `child_entry`."""

from __future__ import annotations

import contextlib
import signal

from tinkex.errors import TinkexError
from tinkex.jobs.result_log import LeaseLost
from tinkex.logs import get_logger
from tinkex.server.process.child_setup import initialize_child
from tinkex.server.process.restart_policy import (
    DRAINED_EXIT_CODE,
    FENCED_EXIT_CODE,
    exit_code_for,
)
from tinkex.server.wiring import open_worker
from tinkex.system.processes import no_garbage_collection

LOG = get_logger(__name__)


def main() -> int:
    """Run jobs until SIGTERM; return the exit code. The next worker runs unfinished jobs."""
    setup = initialize_child()
    try:
        with contextlib.ExitStack() as stack:
            with no_garbage_collection():
                worker = stack.enter_context(open_worker(setup.config, setup.group_id, setup.owner))
            signal.signal(signal.SIGTERM, lambda *_: worker.stop())
            worker.run()
            is_drained = worker.is_draining
    except LeaseLost as error:
        LOG.warning("%s", error.message)
        return FENCED_EXIT_CODE
    except TinkexError as error:
        LOG.error("%s%s", error.message, f". {error.hint}" if error.hint else "")
        return exit_code_for(error)
    return DRAINED_EXIT_CODE if is_drained else 0
