"""Run a trainer in several processes with torchrun, which waits for their last save.

python -m tinkex.pipeline.run.ranks --nproc_per_node=2 trainer/train_pretrain.py ...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

#: Seconds to finish and save an update after a signal; torchrun's default of 30 is too short.
_SHUTDOWN_SECONDS = 3600


def main(argv: Sequence[str] | None = None) -> int:
    """Run all processes; returns their exit code, or 128 + the signal number."""
    words = sys.argv[1:] if argv is None else list(argv)
    options = torchrun.parse_args(
        ["--standalone", f"--shutdown_timeout={_SHUTDOWN_SECONDS}", *words]
    )
    # torchrun would otherwise give each process a single thread.
    if options.nproc_per_node.isdecimal():
        num_threads = max(1, torch.get_num_threads() // int(options.nproc_per_node))
        os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
    try:
        # torchrun.main would print a traceback through torch for signals and errors.
        torchrun.run(options)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        sys.stderr.write(f"Process {rank} failed first; see its message above.\n")
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(main())
