"""Killed in the middle, and nothing is lost: a run goes on from its last checkpoint.

    python examples/resume.py [--base-model NAME] [--steps 20]

A process trains and saves every few steps. It is killed with kill -9 between two checkpoints and
started again; it ends with the very losses of a process that was left alone. `tinkex train` keeps
such a file for you.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from connection import Progress, connect, make_parser, start
from lessons import make_batch, read_rows

import tinkex
from tinkex import AdamParams

BATCH_SIZE = 2
TOLERANCE = 1e-5


def main() -> int:
    parser = make_parser(__doc__, steps=20, learning_rate=1e-3)
    parser.add_argument("--save-every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--run-file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run_file:
        return train(options)
    if not 2 <= options.save_every <= options.steps // 2:
        parser.error("--save-every must be at least 2, and at most half of --steps")
    # In the middle, and not just after a checkpoint.
    kill_at = options.steps // 2 // options.save_every * options.save_every + 1
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder) / "whole.json", Path(folder) / "killed.json"
        run_child(whole)
        run_child(killed, kill_at)
        at_death = json.loads(killed.read_text())["step"]
        print(f"killed after step {kill_at}; the last checkpoint is of step {at_death}")
        run_child(killed)
        losses, again = (json.loads(file.read_text())["losses"] for file in (whole, killed))
    drift = max(abs(one - other) for one, other in zip(losses, again, strict=True))
    print(f"loss {again[0]:.3f} -> {again[-1]:.3f}")
    print(f"largest difference from a run that was left alone: {drift:.6f}")
    return 0 if drift <= TOLERANCE else 1


def run_child(run_file: Path, kill_at: int | None = None) -> None:
    """Train in a process of its own; kill it when it has told of a step."""
    command = [sys.executable, __file__, *sys.argv[1:], "--run-file", str(run_file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if kill_at is not None and int(line) >= kill_at:
                child.kill()
                print(f"\nkill -9 {child.pid} after step {int(line)}", file=sys.stderr)
                break
    if kill_at is None and child.returncode:
        raise SystemExit(f"Error: the run ended with exit code {child.returncode}")


# --- what the child does -------------------------------------------------------------------------


def train(options: argparse.Namespace) -> int:
    """Begin, or go on where the file says."""
    pairs = [
        (user["content"], assistant["content"])
        for user, assistant in (row["messages"] for row in read_rows("sft.jsonl"))
    ]
    with connect(options) as (service, base_model):
        training, run = begin(service, base_model, options.run_file)
        tokenizer, progress = training.get_tokenizer(), Progress(options.steps, done=run["step"])
        for step in range(run["step"] + 1, options.steps + 1):
            # Which rows come is decided by the step's number alone, so it is the same again.
            rows = [pairs[(step * BATCH_SIZE + place) % len(pairs)] for place in range(BATCH_SIZE)]
            passed = training.forward_backward(make_batch(tokenizer, rows), "cross_entropy")
            training.optim_step(AdamParams(learning_rate=options.learning_rate)).result()
            run["losses"].append(passed.result().metrics["loss:sum"])
            progress.tell(step, loss=run["losses"][-1])
            if step % options.save_every == 0 or step == options.steps:
                run["state"] = training.save_state(f"step-{step}").result().path
                run["step"] = step
                write_whole(options.run_file, run)
            print(step, flush=True)
    return 0


def begin(
    service: tinkex.ServiceClient, base_model: str, run_file: Path
) -> tuple[tinkex.TrainingClient, dict[str, Any]]:
    """Weights, optimizer and the losses so far; or a new adapter."""
    if not run_file.exists():
        new = service.create_lora_training_client(base_model, rank=8, seed=0)
        return new, {"step": 0, "losses": [], "state": None}
    run = json.loads(run_file.read_text())
    return service.create_training_client_from_state_with_optimizer(run["state"]), run


def write_whole(file: Path, run: dict[str, Any]) -> None:
    """A file that is either the old one or the new one, whenever this process dies."""
    draft = file.with_suffix(".new")
    draft.write_text(json.dumps(run))
    draft.replace(file)


if __name__ == "__main__":
    start(main)
