"""`tinkex train` on the command line."""

from __future__ import annotations

import io
import json
import re
import shlex
import signal
import threading
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest

from tests.integration.conftest import BASE_MODEL, KEY
from tests.integration.recipes.conftest import KINDS, write_data
from tinkex import ServiceClient
from tinkex.cli.commands.train import recipes
from tinkex.cli.context import Context, Screen
from tinkex.cli.main import CliResult, run
from tinkex.recipes.plan import DpoPlan, RlPlan, SftPlan
from tinkex.testing import StubServer, ToyTokenizer

PLANS = {"sft": SftPlan, "dpo": DpoPlan, "rl": RlPlan}
NOT_IN_PLANS = {"run_dir", "restart", "accept_changes"}


class Trainer:
    """Runs the command in one directory."""

    def __init__(self, server: StubServer, directory: Path) -> None:
        self.server, self.directory = server, directory
        self.screen = Screen()

    def train(self, kind: str, *words: str) -> CliResult:
        data = write_data(self.directory, kind)
        reward = ["--reward", f"{self.directory}/judge.py:reward"] if kind == "rl" else []
        small = ["--group-size", "8", "--answer-tokens", "4"] if kind == "rl" else []
        common = ["--base-model", BASE_MODEL, "--batch-size", "3", "--epochs", "2"]
        common += ["--learning-rate", "0.1", "--run-dir", str(self.directory / "run")]
        context = Context(
            base_url=self.server.url, api_key=KEY, stderr=self.screen, make_service=connect
        )
        return run(["train", kind, str(data), *common, *reward, *small, *words], context)


def connect(config: Any) -> ServiceClient:
    return ServiceClient(config=config.evolve(tokenizer_loader=lambda name: ToyTokenizer()))


@pytest.fixture
def trainer(server: StubServer, tmp_path: Path) -> Trainer:
    return Trainer(server, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_train_command_trains_a_model(
    kind: str, trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trainer.train(kind).exit_code == 0
    shown = capsys.readouterr()
    assert "4 of 4" in shown.out
    assert f"/sampler_weights/{kind}-{kind}-final" in shown.out
    assert "Answer" in shown.out
    assert f"Training {BASE_MODEL} on 6 rows: 4 steps" in shown.err
    assert "step 4/4  loss" in shown.err


@pytest.mark.parametrize("kind", KINDS)
def test_json_output_is_complete(
    kind: str, trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trainer.train(kind, "--json").exit_code == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert result["is_complete"]
    assert result["sampler_path"].startswith("tinker://")
    assert len(result["samples"]) == 1
    assert shown.err == ""


def test_terminal_shows_a_progress_bar_with_the_loss(
    trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.screen = Screen(is_terminal=True, width=100)
    assert trainer.train("sft").exit_code == 0
    shown = capsys.readouterr()
    assert "4/4" in shown.err
    assert "tokens/s" in shown.err
    assert "\x1b" not in shown.out


def test_narrow_terminal_does_not_truncate_numbers(
    trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.screen = Screen(is_terminal=True, width=40)
    assert trainer.train("sft").exit_code == 0
    shown = capsys.readouterr().err
    assert re.search(r"4/4 +loss \d\.\d+  [\d,]+ tokens/s", shown)
    bars = [line for line in re.split(r"[\r\n]", shown) if "tokens/s" in line]
    assert bars
    assert not [line for line in bars if "\u2026" in line]


def test_same_command_again_shows_the_result(
    trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.train("sft")
    first = capsys.readouterr().out
    trainer.train("sft")
    again = capsys.readouterr()
    assert again.out == first
    assert "complete" in again.err
    assert len(trainer.server.calls("optim_step")) == 4


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_interrupted_run_is_saved_and_resumes(
    trainer: Trainer, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        trainer.server.wait_for("optim_step", 2)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    outcome = trainer.train("sft", "--epochs", "200", *words)
    thread.join()
    shown = capsys.readouterr()
    assert outcome.exit_code == 130
    assert list(trainer.server.finish_reasons.values()) == ["interrupted"]
    if words:
        result = json.loads(shown.out)
        assert not result["is_complete"]
        assert (result["total"], result["state_path"][:9]) == (400, "tinker://")
        return
    assert "the same command resumes it" in shown.err
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert (
        trainer.train("sft", "--epochs", "200", "--accept-changes", "--steps", "1").exit_code == 0
    )
    assert "Resuming after step" in capsys.readouterr().err


def test_invalid_line_is_reported_in_one_message(
    trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trainer.directory / "broken.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": 1}\n')
    context = Context(base_url=trainer.server.url, api_key=KEY)
    assert run(["train", "sft", str(path), "--base-model", "m"], context).exit_code == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "broken.jsonl, line 2: prompt is 1; expected text" in shown.err
    assert "Traceback" not in shown.err


def test_default_base_model_of_the_server(
    trainer: Trainer, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(write_data(trainer.directory, "sft"))
    words = ["train", "sft", data, "--steps", "1", "--run-dir", str(trainer.directory / "run")]
    context = Context(base_url=trainer.server.url, api_key=KEY, make_service=connect)
    assert run(words, context).exit_code == 0
    assert f"Training {BASE_MODEL} on" in capsys.readouterr().err


def test_several_models_require_a_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "x.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}')
    with StubServer(models=("a", "b")) as server:
        context = Context(base_url=server.url, api_key=KEY)
        assert run(["train", "sft", str(rows)], context).exit_code == 1
    assert "No model was given; the server has: a, b" in capsys.readouterr().err


def test_invalid_setting_is_reported_before_connecting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context = Context(base_url="http://127.0.0.1:1", api_key=KEY)
    assert run(["train", "sft", str(tmp_path / "x.jsonl"), "--rank", "0"], context).exit_code == 1
    assert "rank is 0" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_every_plan_setting_is_an_option_with_the_same_default(kind: str) -> None:
    command = getattr(recipes, kind)
    assert isinstance(command, click.Command)
    options = {param.name: param for param in command.params if param.name not in NOT_IN_PLANS}
    names = {field.name for field in fields(PLANS[kind])}
    assert options.keys() == names
    required = {"data": Path("x")} | ({"reward": "x.py:f"} if kind == "rl" else {})
    plan: Any = PLANS[kind](base_model="m", **required)
    words = ["x", "--base-model", "m", *(["--reward", "x.py:f"] if kind == "rl" else [])]
    given = command.make_context(kind, words).params
    assert {name: given[name] for name in names} == {name: getattr(plan, name) for name in names}


def test_printed_commands_work(
    trainer: Trainer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trainer.directory)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert trainer.train("sft").exit_code == 0
    lines = capsys.readouterr().err.partition("Next:\n")[2].splitlines()
    context = Context(api_key=KEY, make_service=connect)

    commands = [shlex.split(line) for line in lines]

    assert [words[1] for words in commands] == ["chat", "sample", "run", "checkpoint"]
    for words in commands:
        assert words[0] == "tinkex"
        assert run(words[1:], context).exit_code == 0, capsys.readouterr().err
    assert list(trainer.directory.glob("*_weights_sft-sft-000004/adapter_model.safetensors"))


def test_json_output_has_no_commands(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    assert trainer.train("sft", "--json").exit_code == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["is_complete"] is True
    assert shown.err == ""
