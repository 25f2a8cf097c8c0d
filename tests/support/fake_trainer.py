"""A trainer that trains nothing: the same options, files, signals and exit codes in no time.

What is called `train_sft.py` and so on in a test is a copy of this file. `FAKE` in the environment
says what befalls it: fail, wait, or nothing.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from tinkex.pipeline.checkpoints.model_digest import digest_weights

LEGACY = {"pretrain": "pretrain", "sft": "full_sft", "dpo": "rlhf", "r1": "reason"}


def options() -> dict[str, str]:
    words = sys.argv[1:]
    found = {}
    while words:
        name = words.pop(0).removeprefix("--")
        found[name] = words.pop(0) if words and not words[0].startswith("--") else ""
    return found


def save(root: Path, step: int, keep: int) -> None:
    directory = root / f"step_{step:08d}"
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in (("model.pth", "m"), ("optimizer.pt", "o"), ("state.json", "{}")):
        (directory / name).write_text(content)
    for old in sorted(root.iterdir())[:-keep]:
        for file in old.iterdir():
            file.unlink()
        old.rmdir()


def main() -> int:
    told = options()
    out = Path(told["out_dir"])
    name = out.name
    root = Path(told.get("ckpt_dir") or out / "checkpoints")
    keep = int(told["keep_last_checkpoints"])
    step = int(Path(told["resume"]).name.removeprefix("step_")) if "resume" in told else 0
    sys.stderr.write(f"{name} begins after step {step}\n")

    def stop(number: int, frame: FrameType | None) -> None:
        save(root, step, keep)
        sys.exit(128 + number)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    last = int(told.get("max_steps") or 4)
    with (out / "metrics.jsonl").open("a") as metrics:
        while step < last:
            step += 1
            metrics.write(json.dumps({"step": step, "loss": 9.0 / step, "eval_loss": None}) + "\n")
            if step % int(told["save_interval"]) == 0 or step == last:
                save(root, step, keep)
            fault = os.environ.get("FAKE", "")
            if fault == f"fail {name} {step}":
                sys.stderr.write("Error: the data is bad\n")
                return 1
            if fault == f"wait {name} {step}":
                metrics.flush()
                (out / "waiting").touch()
                wait_for_signal()
    finish(out, name, told, step)
    return 0


def wait_for_signal() -> None:
    # Not `signal.pause`: it does not return for a signal that came right before it.
    while True:
        time.sleep(0.05)


def finish(out: Path, name: str, told: dict[str, str], step: int) -> None:
    (out / "hf").mkdir(exist_ok=True)
    (out / "hf" / "config.json").write_text("{}")
    (out / f"{LEGACY[name]}_512.pth").write_text(name)
    parent = Path(told["init_from"]).parent / "result.json" if "init_from" in told else None
    before = parent.read_text() if parent is not None and parent.is_file() else ""
    made_of = [told["seed"], Path(told["data_path"]).read_text(), before, os.environ.get("SALT")]
    (out / "hf" / "model.safetensors").write_text(json.dumps(made_of))
    result = {
        "stage": name,
        "steps": step,
        "tokens": step * 100,
        "seconds": 1.5,
        "metrics": {"eval_loss": {"before": 9.0, "after": 9.0 / step}},
        "digest": digest_weights(out / "hf"),
    }
    (out / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    sys.exit(main())
