"""Several processes for one trainer: torchrun, which waits for their save and tells how they ended.

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

#: Seconds after a signal in which an update is finished and saved; torchrun's own 30 are too few.
_SHUTDOWN_SECONDS = 3600


def main(argv: Sequence[str] | None = None) -> int:
    """Run all processes to their end; the exit code is theirs, or 128 and the signal."""
    words = sys.argv[1:] if argv is None else list(argv)
    known = torchrun.parse_args(["--standalone", f"--shutdown_timeout={_SHUTDOWN_SECONDS}", *words])
    # Otherwise each would have one, whatever the machine has.
    if known.nproc_per_node.isdecimal():
        num_threads = max(1, torch.get_num_threads() // int(known.nproc_per_node))
        os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
    try:
        # Not torchrun.main, which shows where in torch a signal or an error was met.
        torchrun.run(known)
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        sys.stderr.write(f"Process {rank} failed first; its own message says why.\n")
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(main())
