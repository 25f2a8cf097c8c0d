"""Resume after a kill: a run continues from its last checkpoint with the same losses.

    python examples/resume.py [--base-model NAME] [--steps 16]

A process trains and saves every few steps. It is killed with kill -9 between two checkpoints and
started again; it ends with the same losses as an uninterrupted process. `tinkex train` does this
automatically.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from connection import (
    Progress,
    at_least_one,
    close,
    connect,
    make_parser,
    moved,
    open_client,
    start,
)
from lessons import make_batch, read_rows

import tinkex
from tinkex import AdamParams

BATCH_SIZE = 2
TOLERANCE = 1e-5


def main() -> int:
    parser = make_parser(__doc__, steps=16, learning_rate=1e-3)
    parser.add_argument(
        "--save-every", type=at_least_one, default=4, help="steps between checkpoints"
    )
    parser.add_argument("--run-file", type=Path, help=argparse.SUPPRESS)
    # The killed process waits here, so that it cannot pass its next checkpoint.
    parser.add_argument("--wait-after", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run_file:
        return train(options)
    if not 2 <= options.save_every <= options.steps // 2:
        parser.error("--save-every must be at least 2, and at most half of --steps")
    with connect(options) as (_, base_model):
        options.base_model = base_model
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder) / "whole.json", Path(folder) / "killed.json"
        watch(options, whole, "not killed")
        watch(options, killed, "killed    ", kill_at=kill_step(options))
        saved_step = read_run(killed)["step"]
        print(
            f"killed after step {kill_step(options)}; the last checkpoint is of step {saved_step}"
        )
        watch(options, killed, "resumed   ")
        losses, run = read_run(whole)["losses"], read_run(killed)
    return compare(options, losses, run)


def kill_step(options: argparse.Namespace) -> int:
    """Return a step in the middle that is not just after a checkpoint."""
    return int(options.steps // 2 // options.save_every * options.save_every + 1)


def compare(options: argparse.Namespace, losses: list[float], run: dict[str, Any]) -> int:
    """Print both runs side by side; exit with an error if they differ."""
    print("step  not killed  killed and resumed")
    for step, pair in enumerate(zip(losses, run["losses"], strict=True), start=1):
        print(f"{step:4}  {pair[0]:10.6f}  {pair[1]:10.6f}")
    drift = max(abs(one - other) for one, other in zip(losses, run["losses"], strict=True))
    moved("loss", run["losses"][0], run["losses"][-1])
    print(f"largest difference from an uninterrupted run: {drift:.6f}")
    if drift > TOLERANCE:
        raise SystemExit(f"Error: the losses differ by more than {TOLERANCE}: this is a bug")
    achieved = f"killed after step {kill_step(options)}, resumed, and all losses are the same"
    close(options, achieved, "checkpoint", "list")
    return 0


def watch(
    options: argparse.Namespace, run_file: Path, label: str, kill_at: int | None = None
) -> None:
    """Train in a child process; kill it when it has reported the given step."""
    words = [*sys.argv[1:], "--base-model", options.base_model, "--run-file", str(run_file)]
    if kill_at is not None:
        words += ["--wait-after", str(kill_at)]
    done = read_run(run_file)["step"]
    # In a separate session: Ctrl-C ends only this process, which then ends the child.
    child = subprocess.Popen(
        [sys.executable, __file__, *words],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with child, Progress(options.steps, label, done) as progress:
        try:
            show(child, progress, kill_at)
        finally:
            child.kill()
    if child.returncode > 0:
        # The child has printed the reason.
        raise SystemExit(child.returncode)
    if child.returncode < 0 and kill_at is None:
        raise SystemExit(f"Error: the run was ended by signal {-child.returncode}")


def show(child: subprocess.Popen[str], progress: Progress, kill_at: int | None) -> None:
    """Report every step until the child ends or must be killed."""
    assert child.stdout is not None
    for line in child.stdout:
        step, loss = line.split()
        progress.report(int(step), loss=float(loss))
        if int(step) == kill_at:
            return
    child.wait()


# --- the child process ---------------------------------------------------------------------------


def train(options: argparse.Namespace) -> int:
    """Start, or resume from the progress file."""
    talks = [row["messages"] for row in read_rows("sft.jsonl")]
    pairs = [(user["content"], assistant["content"]) for user, assistant in talks]
    with open_client(options, options.api_key) as service:
        run = read_run(options.run_file)
        training = open_run(service, options.base_model, run)
        tokenizer = training.get_tokenizer()
        for step in range(run["step"] + 1, options.steps + 1):
            # The rows depend on the step number only, so a resumed run uses the same ones.
            rows = [pairs[(step * BATCH_SIZE + place) % len(pairs)] for place in range(BATCH_SIZE)]
            passed = training.forward_backward(make_batch(tokenizer, rows), "cross_entropy")
            training.optim_step(AdamParams(learning_rate=options.learning_rate)).result()
            run["losses"].append(passed.result().metrics["loss:sum"])
            if step % options.save_every == 0 or step == options.steps:
                run["state"] = training.save_state(f"step-{step}").result().path
                run["step"] = step
                write_whole(options.run_file, run)
            print(step, run["losses"][-1], flush=True)
            if step == options.wait_after:
                signal.pause()
    return 0


def open_run(
    service: tinkex.ServiceClient, base_model: str, run: dict[str, Any]
) -> tinkex.TrainingClient:
    """Create an adapter, or load weights and optimizer of the last checkpoint."""
    if run["state"] is None:
        return service.create_lora_training_client(base_model, rank=8, seed=0).result()
    return service.create_training_client_from_state_with_optimizer(run["state"]).result()


def read_run(file: Path) -> dict[str, Any]:
    """Progress of a run at its last checkpoint."""
    if not file.exists():
        return {"step": 0, "losses": [], "state": None}
    run: dict[str, Any] = json.loads(file.read_text())
    return run


def write_whole(file: Path, run: dict[str, Any]) -> None:
    """Replace the file atomically."""
    draft = file.with_suffix(".new")
    draft.write_text(json.dumps(run))
    draft.replace(file)


if __name__ == "__main__":
    start(main)
