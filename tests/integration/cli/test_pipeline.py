"""`tinkex pipeline`, as tables and as JSON."""

from __future__ import annotations

import io
import json
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.integration.cli.conftest import RunCli
from tests.support.pipeline_project import TIMEOUT_SECONDS, PipelineProject
from tinkex.cli.context import Context, Screen
from tinkex.models import TINY_FOLDER


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PipelineProject:
    """A pipeline project with its environment variables set."""
    project = PipelineProject(tmp_path)
    for name, value in project.environ.items():
        monkeypatch.setenv(name, value)
    return project


def test_a_run_shows_its_results(made: PipelineProject, tinkex: RunCli) -> None:
    result = tinkex("pipeline", "run")
    assert result.exit_code == 0, result.err
    assert "Results on held-out data" in result.out
    assert "eval_loss" in result.out
    assert "[pretrain] $ " in result.err
    assert "[pretrain] $ " not in result.out
    again = tinkex("pipeline", "run", "--json")
    assert [stage["action"] for stage in again.json["stages"]] == ["skipped"] * 4
    assert again.json["stages"][1]["metrics"]["eval_loss"] == {"before": 9.0, "after": 2.25}


def test_the_commands_that_a_run_suggests_work(
    made: PipelineProject, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    curves = made.root / "curves of mine"
    curves.mkdir()
    monkeypatch.setenv("TF_DIR", str(curves))
    result = tinkex("pipeline", "run")
    lines = result.err.partition("\nNext:\n")[2].splitlines()
    commands = [shlex.split(line)[1:] for line in lines]
    assert [words[:2] for words in commands] == [
        ["pipeline", "status"],
        ["pipeline", "plot"],
        ["pipeline", "tensorboard"],
        ["model", "add"],
        ["chat", "my-model"],
    ]
    # The suggested commands must work in a shell without the variables.
    for name in made.environ:
        monkeypatch.delenv(name)
    # The fake trainers write no usable model, so replace it with a real one.
    folder = made.out / "dpo" / "hf"
    shutil.rmtree(folder)
    shutil.copytree(TINY_FOLDER, folder)
    served: list[Path] = []
    monkeypatch.setattr(
        "tinkex.cli.commands.pipeline.serve_tensorboard",
        lambda context, logdir, host, port: served.append(logdir),
    )
    for words in commands[:-1]:
        shown = tinkex(*words)
        assert shown.exit_code == 0, shown.err
    assert served == [curves]
    assert "my-model" in tinkex("model", "list").out
    # No server is running: the last command starts one with the added model.
    monkeypatch.setenv("TINKEX_ENGINE", "local")
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 3 plus 4?\n"))
    try:
        answered = tinkex(*commands[-1])
    finally:
        assert tinkex("serve", "stop").exit_code == 0
    assert answered.exit_code == 0, answered.err
    assert answered.out.strip()
    assert "Next:" not in tinkex("pipeline", "run", "--json", "--out-dir", str(made.out)).err


def test_the_plot_of_a_stage_names_its_steps(made: PipelineProject, tinkex: RunCli) -> None:
    made.run()
    assert " in 4 steps" in tinkex("pipeline", "plot", "sft").out
    rows = [{"step": step, "loss": 9.0 - step / 100} for step in (100, 200, 300)]
    path = made.out / "sft" / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert ", steps 100 to 300" in tinkex("pipeline", "plot", "sft").out


@pytest.mark.parametrize("value", ["", "{dir}/nothing"])
def test_tensorboard_without_curves_is_an_error(
    value: str, made: PipelineProject, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_DIR", value.format(dir=made.root))
    result = tinkex("pipeline", "tensorboard", "--json")
    assert result.exit_code == 1
    assert result.failure["message"].startswith("No curves to show: ")


def test_missing_tensorboard_error_has_install_command(
    made: PipelineProject, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    result = tinkex("pipeline", "tensorboard", str(made.root))
    assert result.exit_code == 1
    assert result.err.startswith("Error: TensorBoard is not installed\nRun: ")
    assert "[pipeline]" in result.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_tensorboard_is_served_until_a_signal(number: int, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tinkex[pipeline] has it")
    words = ["pipeline", "tensorboard", str(tmp_path), "--port", "0", "--json"]
    with subprocess.Popen(
        [sys.executable, "-m", "tinkex", *words], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        text = ""
        while not text.endswith("}\n"):
            line = process.stdout.readline()
            assert line, "it ended before it was ready"
            text += line
        found = json.loads(text)
        assert found["directory"] == str(tmp_path)
        with urllib.request.urlopen(f"{found['url']}data/environment", timeout=30) as reply:
            assert json.load(reply)["data_location"] == str(tmp_path)
        process.send_signal(number)
        assert process.wait(60) == 0
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(found["url"], timeout=5)


def test_rejected_run_error(made: PipelineProject, tinkex: RunCli) -> None:
    tinkex("pipeline", "run")
    result = tinkex("pipeline", "run", "--smoke-test", "--json")
    assert result.exit_code == 1
    assert "max_steps: (not given) -> " in result.failure["message"]
    assert "--restart-from pretrain" in result.failure["hint"]
    assert tinkex("pipeline", "run", "--skip-pretrain", "--force-pretrain").exit_code == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_run_reports_how_to_resume(
    number: signal.Signals, code: int, made: PipelineProject
) -> None:
    process = made.start(command=("tinkex", "pipeline", "run"), FAKE="wait sft 3")
    made.wait_for(made.out / "sft" / "waiting", process)
    process.send_signal(number)
    text = process.communicate(timeout=TIMEOUT_SECONDS)[0]
    assert process.returncode == code, text
    assert text.splitlines()[-2:] == [
        "sft was interrupted; saved at step 3",
        "Run the same command again to resume.",
    ]
    assert "Error" not in text
    assert "Traceback" not in text


def test_status_lists_every_stage(made: PipelineProject, tinkex: RunCli) -> None:
    empty = tinkex("pipeline", "status")
    assert (empty.exit_code, empty.out) == (0, "")
    assert "No stage has started" in empty.err
    assert tinkex("pipeline", "status", "--json").json == {"out_dir": str(made.out), "stages": []}
    made.run()
    found = tinkex("pipeline", "status", "--json").json["stages"]
    assert [(row["stage"], row["status"]) for row in found] == [
        (name, "complete") for name in ("tokenizer", "pretrain", "sft", "dpo")
    ]
    assert found[1]["step"] == 4
    shown = tinkex("pipeline", "status", "--out-dir", str(made.out))
    assert "complete" in shown.out
    assert "eval_loss 9" in shown.out


@pytest.mark.parametrize("width", [40, 80])
def test_status_fits_a_screen(made: PipelineProject, tinkex: RunCli, width: int) -> None:
    made.run()
    shown = tinkex("pipeline", "status", context=Context(stdout=Screen(width=width)))
    body = [line for line in shown.out.splitlines() if not line.startswith("Pipeline in")]
    assert all(len(line) <= width for line in body if str(made.out) not in line)
    assert "pretrain" in shown.out


def test_clean_asks_first(
    made: PipelineProject, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.run()
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert tinkex("pipeline", "clean").exit_code == 1
    assert (made.out / "dpo").is_dir()
    result = tinkex("pipeline", "clean", "--from", "sft", "--yes", "--json")
    assert result.json == {"removed": ["sft", "dpo"]}
    assert (made.out / "pretrain").is_dir()
    assert not (made.out / "full_sft_512.pth").is_symlink()
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert tinkex("pipeline", "clean").exit_code == 0
    assert not (made.out / "pretrain").exists()
    assert tinkex("pipeline", "clean", "--yes", "--json").json == {"removed": []}


def test_plot_to_terminal_or_file(made: PipelineProject, tinkex: RunCli, tmp_path: Path) -> None:
    made.run()
    drawn = tinkex("pipeline", "plot", "sft")
    assert drawn.out.startswith("loss of sft: 9.0000 to 2.2500 in 4 steps")
    points = tinkex("pipeline", "plot", "sft", "--json").json["points"]
    assert points[-1] == {"step": 4, "value": 2.25}
    for kind in ("csv", "svg"):
        assert tinkex("pipeline", "plot", "sft", "-o", str(tmp_path / f"c.{kind}")).exit_code == 0
    assert (tmp_path / "c.csv").read_text().splitlines()[:2] == ["step,loss", "1,9.0"]
    assert (tmp_path / "c.svg").read_text().startswith("<svg")


def test_plot_of_unknown_metric_lists_available_ones(
    made: PipelineProject, tinkex: RunCli, tmp_path: Path
) -> None:
    made.run()
    unknown = tinkex("pipeline", "plot", "sft", "--metric", "lss")
    assert "Available: loss." in unknown.err
    assert tinkex("pipeline", "plot", "r1").exit_code == 1
    assert tinkex("pipeline", "plot", "rl").exit_code == 2
    assert tinkex("pipeline", "plot", "sft", "-o", str(tmp_path / "c.gif")).exit_code == 2
