"""A project with data and fake trainers, and runs of the pipeline in it."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tinkex.pipeline.checkpoints.model_digest import digest_weights
from tinkex.pipeline.config import read_config
from tinkex.pipeline.run.plan import parse_flags
from tinkex.pipeline.run.report import (
    RunOutput,
    RunStopped,
    StageOutcome,
    summary_line,
    table_rows,
    write_table,
)
from tinkex.pipeline.run.runner import run_pipeline
from tinkex.pipeline.run.stage_records import StageRecord, read_record

FAKE = Path(__file__).with_name("fake_trainer.py")
TRAINERS = ("train_pretrain", "train_full_sft", "train_dpo", "train_distill_reason")
TIMEOUT_SECONDS = 180.0

CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
WRONG = [CHAT[0], {"role": "assistant", "content": "5"}]
ROWS = {
    "PRETRAIN_JSON": [{"text": f"the sum of {n} and {n} is {n + n}"} for n in range(9)],
    "SFT_JSON": [{"conversations": CHAT}],
    "DPO_JSON": [{"chosen": CHAT, "rejected": WRONG}],
    "R1_JSON": [{"conversations": CHAT}],
}


class PipelineResult(NamedTuple):
    """How a run ended."""

    text: str
    outcomes: list[StageOutcome]
    error: RunStopped | None = None

    @property
    def actions(self) -> dict[str, str]:
        return {outcome.stage: outcome.action.value for outcome in self.outcomes}


class PipelineProject:
    """A directory in which pipelines run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.out = root / "out"
        trainers = root / "trainers"
        trainers.mkdir()
        for name in TRAINERS:
            shutil.copy(FAKE, trainers / f"{name}.py")
        self.environ = {
            "OUT_DIR": str(self.out),
            "TRAINER_DIR": str(trainers),
            "TF_DIR": "",
            "TB_AUTO": "0",
            "VOCAB_SIZE": "400",
            "SAVE_INTERVAL": "2",
            "KEEP_LAST": "2",
            "R1_DEMO": "0",
        }
        for variable, rows in ROWS.items():
            path = root / f"{variable.lower()}l"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            self.environ[variable] = str(path)

    def run(self, *flags: str, **environ: str) -> PipelineResult:
        """Run in this process; raises whatever is no end that a stage came to."""
        told = parse_flags(flags)
        stream = io.StringIO()
        config = read_config(is_smoke=told.smoke_test, environ=self.environ | environ)
        try:
            outcomes = run_pipeline(config, told, RunOutput(stream))
            write_table(table_rows(outcomes), stream)
            return PipelineResult(f"{stream.getvalue()}{summary_line(outcomes, 0.1)}\n", outcomes)
        except RunStopped as error:
            return PipelineResult(stream.getvalue(), [], error)

    def start(
        self, *flags: str, command: Sequence[str] = ("tinkex.pipeline.run",), **environ: str
    ) -> subprocess.Popen[str]:
        """Run in a process of its own; a command is a module and its arguments."""
        return subprocess.Popen(
            [sys.executable, "-m", *command, *flags],
            cwd=self.root,
            env=os.environ | self.environ | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_for(self, path: Path, process: subprocess.Popen[str]) -> None:
        """Wait until a file appears that a process is going to make."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not path.exists():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, f"{path} did not appear"
            time.sleep(0.01)

    def wait_for_line(self, path: Path, text: str, process: subprocess.Popen[str]) -> None:
        """Wait until a file that a process writes has a text in it."""
        self.wait_for(path, process)
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while text not in path.read_text():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, f"{path} has no {text!r}"
            time.sleep(0.01)

    def change_result(self, stage: str, *, is_recorded: bool) -> None:
        """Put other weights in place of a stage's, with or without its trainer knowing."""
        folder = self.out / stage / "hf"
        (folder / "model.safetensors").write_text("other weights")
        path = self.out / stage / "result.json"
        if is_recorded:
            told = json.loads(path.read_text())
            path.write_text(json.dumps({**told, "digest": digest_weights(folder)}))

    def record(self, stage: str) -> StageRecord:
        found = read_record(self.out / stage)
        assert found is not None
        return found

    def steps(self, stage: str) -> list[str]:
        return sorted(path.name for path in (self.out / stage / "checkpoints").glob("step_*"))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PipelineProject:
    """A project in which nothing was run yet."""
    for name in ("FAKE", "SALT"):
        monkeypatch.delenv(name, raising=False)
    # A shell that starts tests in the background has its children ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return PipelineProject(tmp_path)
