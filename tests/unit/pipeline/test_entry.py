from __future__ import annotations

import ast
import sys
import threading
from pathlib import Path

import pytest

from tinkex.errors import ConfigError
from tinkex.pipeline.entry import run_program

ROOT = Path(__file__).parents[3]
TRAINERS = ("train_pretrain", "train_full_sft", "train_dpo", "train_distill_reason")


class ClosedStream:
    """A closed terminal."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    def flush(self) -> None:
        raise BrokenPipeError(32, "Broken pipe")


def interrupted() -> int:
    raise KeyboardInterrupt


def refused() -> int:
    raise ConfigError("there is no data", hint="Name a file.")


def test_error_is_printed_with_its_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(refused) == 1
    assert capsys.readouterr().err == "Error: there is no data\nName a file.\n"


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 1 vs 0"),
        Exception("I/O error: No space left on device (os error 28)"),
    ],
)
def test_full_disk_is_reported_the_same_way_for_every_library(
    capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fill() -> int:
        raise error

    assert run_program(fill) == 1
    assert capsys.readouterr().err == "Error: the disk: No space left on device\n"


@pytest.mark.parametrize(("code", "is_silent"), [(28, True), (13, False)])
def test_full_disk_in_a_thread_prints_no_traceback(
    monkeypatch: pytest.MonkeyPatch, code: int, is_silent: bool
) -> None:
    reported: list[object] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)

    def write() -> None:
        raise OSError(code, "an error")

    def work() -> int:
        writer = threading.Thread(target=write)
        writer.start()
        writer.join()
        return 0

    assert run_program(work) == 0
    assert (not reported) == is_silent
    assert threading.excepthook == reported.append


def test_unexpected_errors_propagate() -> None:
    def fail() -> int:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        run_program(fail)


@pytest.mark.parametrize(("work", "code"), [(interrupted, 130), (refused, 1), (lambda: 7, 7)])
def test_closed_stderr_does_not_change_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, work: object, code: int
) -> None:
    monkeypatch.setattr(sys, "stderr", ClosedStream())
    assert callable(work)
    assert run_program(work) == code


def modules_in(path: Path) -> set[str]:
    """The modules a file imports from."""
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    return {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


def test_all_trainers_use_one_entry_point_and_one_checkpoint_writer() -> None:
    for name in TRAINERS:
        path = ROOT / "trainer" / f"{name}.py"
        assert modules_in(path) == {"__future__", "tinkex.pipeline.entry"}
    writers = ("trainer/checkpoint_manager.py", "src/tinkex/pipeline/checkpoints/saver.py")
    for writer in writers:
        assert "tinkex.pipeline.checkpoints.step_files" in modules_in(ROOT / writer)
    step_files = ROOT / "src/tinkex/pipeline/checkpoints/step_files.py"
    assert "tinkex.system.atomic" in modules_in(step_files)
