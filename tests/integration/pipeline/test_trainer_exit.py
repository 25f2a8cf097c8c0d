"""Exit codes of a real trainer: signals, unusual data, concurrent trainers."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.pipeline.stage_inputs import (
    SIZE_WORDS,
    make_tokenizer,
    write_rows,
    write_samples,
)
from tinkex.pipeline.checkpoints.model_digest import digest_weights
from tinkex.pipeline.checkpoints.step_directory import latest_step
from tinkex.pipeline.entry import main
from tinkex.pipeline.output_locks import lock_directory
from tinkex.pipeline.stage_interface import TrainResult
from tinkex.pipeline.train_stage import write_result
from tinkex.system.atomic import SCRATCH_PREFIX

ROOT = Path(__file__).parents[3]
SHORT = ("--max_steps", "2", "--batch_size", "2", "--eval_samples", "2")
TIMEOUT_SECONDS = 120.0


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scene")
    files = write_samples(folder)
    make_tokenizer(folder / "tokenizer", list(files.values()))
    return folder


def words_of(project: Path, out: Path, *more: str) -> list[str]:
    return [
        *("--out_dir", str(out), "--data_path", str(project / "pretrain.jsonl")),
        *("--tokenizer_dir", str(project / "tokenizer"), *SIZE_WORDS, *SHORT, *more),
    ]


def start(words: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "trainer" / "train_pretrain.py"), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def wait_for(process: subprocess.Popen[str], path: Path) -> None:
    """Wait until a trainer has created a file."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.01)


def ended(process: subprocess.Popen[str], number: int) -> tuple[int, str]:
    process.send_signal(number)
    stderr = process.communicate(timeout=TIMEOUT_SECONDS)[1]
    return process.returncode, stderr


# --- signals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_before_training_sets_the_exit_code(
    project: Path, tmp_path: Path, number: int, code: int
) -> None:
    # The pipe stays empty, so the trainer waits for its first row.
    data = tmp_path / "data.jsonl"
    os.mkfifo(data)
    process = start(words_of(project, tmp_path / "out", "--data_path", str(data)))
    wait_for(process, tmp_path / "out" / "trainer.lock")
    found, stderr = ended(process, number)
    assert found == code, stderr
    assert "Traceback" not in stderr
    assert not list(tmp_path.rglob(f"{SCRATCH_PREFIX}*"))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 143)]
)
def test_signal_in_training_saves_and_resumes_identically(
    project: Path, tmp_path: Path, number: int, code: int
) -> None:
    # Only the reference run completes.
    num_steps = 30 if number == signal.SIGTERM else 100_000
    long = ("--max_steps", str(num_steps), "--epochs", "100000", "--save_interval", "0")
    process = start(words_of(project, tmp_path / "cut", *long, "--save_interval", "2"))
    wait_for(process, tmp_path / "cut" / "checkpoints" / "step_00000002")
    found, stderr = ended(process, number)
    assert found == code, stderr
    assert "saving, then stopping" in stderr
    newest = latest_step(tmp_path / "cut" / "checkpoints")
    assert newest is not None
    assert not (tmp_path / "cut" / "result.json").exists()
    if number != signal.SIGTERM:
        return
    assert main("pretrain", words_of(project, tmp_path / "cut", *long, "--resume", "auto")) == 0
    assert main("pretrain", words_of(project, tmp_path / "whole", *long)) == 0
    assert digest_weights(tmp_path / "cut" / "hf") == digest_weights(tmp_path / "whole" / "hf")


# --- two of them --------------------------------------------------------------------------------


def test_two_trainers_cannot_share_a_directory(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokens").mkdir()
    begun = tmp_path / "tokens" / f"{SCRATCH_PREFIX}by-another"
    begun.mkdir()
    with lock_directory(tmp_path):
        assert main("pretrain", words_of(project, tmp_path)) == 1
        assert f"{tmp_path} is in use by another trainer" in capsys.readouterr().err
        assert begun.is_dir()
    # The process has exited.
    assert main("pretrain", words_of(project, tmp_path)) == 0
    assert not begun.exists()


# --- data ---------------------------------------------------------------------------------------


def test_byte_order_mark_and_crlf_change_nothing(project: Path, tmp_path: Path) -> None:
    odd = tmp_path / "pretrain.jsonl"
    plain = (project / "pretrain.jsonl").read_bytes()
    odd.write_bytes(b"\xef\xbb\xbf" + plain.replace(b"\n", b"\r\n") + b"\r\n  \r\n")
    assert main("pretrain", words_of(project, tmp_path / "a")) == 0
    assert main("pretrain", words_of(project, tmp_path / "b", "--data_path", str(odd))) == 0
    assert digest_weights(tmp_path / "a" / "hf") == digest_weights(tmp_path / "b" / "hf")


def talk(question: str, answer: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"conversations": messages}


def test_too_long_rows_are_reported(
    project: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [talk(f"{n} + 1?", f"{n + 1}") for n in range(20)]
    rows += [talk("Count.", " ".join(map(str, range(500)))), talk("1 " * 500, "one")]
    data = write_rows(tmp_path / "sft.jsonl", rows)
    held_out = write_rows(tmp_path / "held_out.jsonl", rows[:2])
    words = words_of(project, tmp_path / "out", "--data_path", str(data))
    words += ["--eval_data_path", str(held_out), "--init_from", str(tmp_path / "parent" / "hf")]
    assert main("pretrain", words_of(project, tmp_path / "parent")) == 0
    assert main("sft", words) == 0
    assert "2 conversations" in caplog.text
    assert "are truncated" in caplog.text
    assert "1 rows" in caplog.text
    assert "are skipped" in caplog.text


def test_very_long_line_is_accepted(project: Path, tmp_path: Path) -> None:
    rows = [{"text": f"{n} is a number."} for n in range(20)]
    data = write_rows(tmp_path / "pretrain.jsonl", [*rows, {"text": "1 2 3 4 5 " * 100_000}])
    words = words_of(project, tmp_path / "out", "--data_path", str(data))
    assert main("pretrain", words) == 0


# --- result.json --------------------------------------------------------------------------------


def test_non_finite_metric_is_null_in_the_result(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"w")
    (tmp_path / "hf" / "config.json").write_text("{}")
    result = TrainResult(
        stage="r1",
        steps=1,
        tokens=1,
        samples=1,
        seconds=0.5,
        before={"exact_match": math.nan},
        after={"exact_match": math.inf, "loss": 1.5},
    )
    write_result(result, tmp_path)

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is not JSON")

    result = json.loads((tmp_path / "result.json").read_text(), parse_constant=refuse)
    assert result["metrics"]["exact_match"] == {"before": None, "after": None}
    assert result["metrics"]["loss"] == {"before": None, "after": 1.5}


def test_missing_settings_file_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    command = ["-X", "importtime", "-m", "tinkex.pipeline.run.trainer", "sft", "--settings"]
    found = subprocess.run(
        [sys.executable, *command, str(path)], capture_output=True, text=True, check=False
    )
    lines = [line for line in found.stderr.splitlines() if not line.startswith("import time:")]
    assert found.returncode == 2
    assert lines == [
        f"trainer.py: error: --settings {path} cannot be read: No such file or directory"
    ]
    assert "tinkex.pipeline.settings_sources" in found.stderr
    assert " torch" not in found.stderr
