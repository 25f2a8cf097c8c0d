"""Train the tiny stage on one rank, with a signal or a failure at a given batch."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from tests.integration.pipeline.tiny_stage import RANKS, SignalledStage, run
from tests.support.forkserver import forks_of
from tests.support.ports import free_port
from tinkex.errors import TinkexError


def main(out_dir: Path, changes: dict[str, Any]) -> int:
    torch.set_num_threads(1)
    stage = SignalledStage(
        is_plain=changes.pop("is_plain", False),
        seconds_per_batch=changes.pop("seconds_per_batch", 0.0),
    )
    stage.signal_at = (signal.SIGTERM, changes.pop("stop_at_batch", 0))
    rank, at_batch = changes.pop("fail_at", (-1, -1))
    own = int(os.environ["RANK"])
    stage.fail_at_batch = at_batch if rank == own else -1
    stage.fail_at_evaluation = changes.pop("fail_at_evaluation", -1)
    try:
        return run(out_dir, stage=stage, **changes).exit_code
    except (TinkexError, ValueError) as error:
        (out_dir / f"error-{own}").write_text(str(error))
        return 1


def _run_rank(variables: dict[str, str], out_dir: Path, changes: dict[str, Any]) -> None:
    os.environ.update(variables)
    sys.exit(main(out_dir, changes))


def run_ranks(out_dir: Path, num_ranks: int, **changes: Any) -> list[int | None]:
    """Start ranks with the environment of torchrun and return their exit codes."""
    forks = forks_of(RANKS)
    shared = {
        "TORCHELASTIC_RUN_ID": "test",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_ranks),
    }
    processes = []
    for rank in range(num_ranks):
        variables = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(forks.Process(target=_run_rank, args=(variables, out_dir, changes)))
        processes[-1].start()
    try:
        for process in processes:
            process.join(timeout=120)
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
