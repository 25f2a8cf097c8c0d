"""Every writer of large files on a disk that is full after 0, 4, 8, ... KiB; run as a program.

Prints a JSON table: writer -> how often it wrote everything, and how often the disk was full.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import logging as transformers_log

from tests.support.adapters import make_layout, make_model, make_spec, make_state, sites_of
from tests.support.gguf_files import write_gguf
from tests.support.small_disk import leave_free
from tinkex.checkpoint.manifest import check_manifest, write_manifest
from tinkex.checkpoint.retention import StepRetention
from tinkex.engine.checkpoints import merge as merge_module
from tinkex.engine.checkpoints.adapter_files import write_checkpoint, write_snapshot
from tinkex.engine.fake import storage as fake_files
from tinkex.engine.fake.bigram import Bigram, BigramTrainer
from tinkex.engine.models.gguf import convert as convert_module
from tinkex.engine.models.model_folder import read_model_folder
from tinkex.errors import TinkexError
from tinkex.pipeline.checkpoints import step_files
from tinkex.pipeline.checkpoints.export import write_legacy
from tinkex.pipeline.checkpoints.saver import StepWriter
from tinkex.pipeline.checkpoints.step_directory import is_valid_step
from tinkex.pipeline.checkpoints.step_files import StepContent, write_step
from tinkex.system.atomic import new_directory

#: How much more is free in each attempt, where it is not a page.
STEP_BYTES = {"converted model": 512 * 1024}
#: Of a disk of 8 MiB.
MAX_BYTES = 7 << 20
FULL = "No space left on device"
WEIGHTS = {"small": torch.zeros(300), "large": torch.zeros(8000)}
CONTENT = StepContent(
    weights=WEIGHTS,
    optimizer={"optimizer": {"moments": [torch.zeros(100) for _ in range(20)]}, "scaler": {}},
    state={"epoch": 0, "step_in_epoch": 0, "global_step": 1},
)

Write = Callable[[Path], None]


def write_step_into(target: Path) -> None:
    path = write_step(target, 1, CONTENT)
    assert is_valid_step(path)


def write_beside_step(target: Path) -> None:
    """A stage of another author saves its weights to a path, where torch opens the file itself."""

    def save(weights: Mapping[str, Tensor]) -> None:
        torch.save(dict(weights), target / "weights.pth")

    writer = StepWriter(target, StepRetention())
    try:
        writer.save(1, CONTENT, write_extra=save)
    finally:
        writer.close()
    torch.load(target / "weights.pth", weights_only=True)


def write_weights_file(target: Path) -> None:
    write_legacy(WEIGHTS, target / "weights.pth")
    torch.load(target / "weights.pth", weights_only=True)


def engine_writers(source: Path) -> dict[str, Write]:
    spec, model = make_spec(4), make_model("qwen3")
    layout = make_layout(sites_of(model), spec)
    state = make_state(layout, with_gradient=True)
    model.save_pretrained(source / "base")
    (source / "adapter").mkdir()
    write_checkpoint(source / "adapter", spec, layout, state, with_optimizer=False)
    trainer = BigramTrainer(Bigram.base("fake/model", 32))
    gguf = write_gguf(source / "model.gguf")

    def checked(write: Write) -> Write:
        def run(target: Path) -> None:
            with new_directory(target / "made") as scratch:
                write(scratch)
                write_manifest(scratch)
            check_manifest(target / "made")

        return run

    def convert(target: Path) -> None:
        convert_module.convert_gguf(gguf, target / "made")

    def merge(target: Path) -> None:
        merge_module.merge_adapter(source / "base", source / "adapter", target / "made")
        read_model_folder(target / "made")

    def export(target: Path) -> None:
        with new_directory(target / "made") as scratch:
            model.save_pretrained(scratch)
        read_model_folder(target / "made")

    return {
        "checkpoint": checked(
            lambda scratch: write_checkpoint(scratch, spec, layout, state, with_optimizer=True)
        ),
        "snapshot": checked(lambda scratch: write_snapshot(scratch, spec, layout, state)),
        "fake checkpoint": checked(
            lambda scratch: fake_files.write_checkpoint(scratch, spec, trainer, with_optimizer=True)
        ),
        "merged model": merge,
        "exported model": export,
        "converted model": convert,
    }


def attempt(write: Write, target: Path) -> str:
    """What came of a write: `done`, or `full` if it said so and left nothing half-written."""
    try:
        write(target)
    except (TinkexError, OSError) as error:
        assert FULL in str(error), repr(error)
        left = [path.name for path in target.rglob("*") if path.is_file()]
        assert not [name for name in left if name.startswith(".partial-")], left
        assert not (target / "made").exists()
        steps = list(target.glob("step_*"))
        assert all(is_valid_step(path) for path in steps), steps
        return "full"
    return "done"


def main() -> None:
    disk = Path(sys.argv[1])
    transformers_log.disable_progress_bar()
    # Both refuse early when space is short; here the disk fills up after that look.
    step_files._MARGIN_BYTES = -(1 << 30)
    convert_module._SPARE_BYTES = -(1 << 30)
    table: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as source:
        writers: dict[str, Write] = {
            "step": write_step_into,
            "file beside a step": write_beside_step,
            "weights file": write_weights_file,
            **engine_writers(Path(source)),
        }
        for name, write in writers.items():
            counts, room, done_in_a_row = {"done": 0, "full": 0}, 0, 0
            step_bytes = STEP_BYTES.get(name, 4096)
            while done_in_a_row < 2 and room < MAX_BYTES:
                target = disk / "target"
                shutil.rmtree(target, ignore_errors=True)
                target.mkdir()
                leave_free(disk, room)
                outcome = attempt(write, target)
                counts[outcome] += 1
                done_in_a_row = done_in_a_row + 1 if outcome == "done" else 0
                room += step_bytes
            table[name] = counts
    sys.stdout.write(json.dumps(table))


if __name__ == "__main__":
    main()
