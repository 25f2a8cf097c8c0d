"""`checkpoint create` with stub clients: requests, output file and failures."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.cli.context import Context, Screen
from tinkex.cli.main import CliResult, run
from tinkex.client.config import Config
from tinkex.errors import InternalServerError, RequestErrorCategory, RequestFailedError, TinkexError
from tinkex.settings import package_version
from tinkex.system import atomic
from tinkex.types import SaveWeightsForSamplerResponse, WeightsInfoResponse

WEIGHTS = "tinker://run-1/sampler_weights/checkpoint"
STATE = "tinker://run-0/weights/0001"


class Ready:
    """A completed future that records whether it was awaited."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self.is_awaited = False

    def result(self, timeout: float | None = None) -> Any:
        self.is_awaited = True
        if isinstance(self._value, BaseException):
            raise self._value
        return self._value


class StubService:
    """Stub of the service, REST and training clients."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.asked: list[tuple[Any, ...]] = []
        self.ended_with: list[object] = []
        self.model_id: str | None = "run-1"
        self.create_error: BaseException | None = None
        self.saved = Ready(SaveWeightsForSamplerResponse(path=WEIGHTS))
        self.holder = SimpleNamespace(known_session_id="session-1")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.ended_with.append(kind)

    def rest_client(self) -> Self:
        return self

    def get_weights_info_by_tinker_path(self, path: str) -> Ready:
        self.asked.append(("info", path))
        return Ready(
            WeightsInfoResponse(
                base_model="m/restored", is_lora=True, lora_rank=4, train_mlp=True, train_attn=False
            )
        )

    def create_lora_training_client(self, base_model: str, **lora: Any) -> Ready:
        self.asked.append(("create", base_model, lora))
        if self.create_error is not None:
            raise self.create_error
        return Ready(self)

    def create_training_client_from_state(self, path: str, base_model: str | None) -> Ready:
        self.asked.append(("restore", path, base_model))
        return Ready(self)

    def save_weights_for_sampler(self, name: str) -> Ready:
        self.asked.append(("save", name))
        return self.saved


class CommandRunner:
    """Runs `checkpoint` with a stub service and reads its output file."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.service = StubService(Config())

    def _make(self, config: Config) -> Any:
        self.service.config = config
        return self.service

    def run(self, *words: str, **facts: Any) -> CliResult:
        context = Context(make_service=self._make, stdout=Screen(width=200), **facts)
        return run(["checkpoint", *words, "--output", str(self.output)], context)

    @property
    def written(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.output.read_text())
        return found


@pytest.fixture
def runner(tmp_path: Path) -> CommandRunner:
    return CommandRunner(tmp_path / "made.json")


# --- what is done -----------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), ("create",)], ids=["bare", "named"])
def test_adapter_is_created_saved_and_recorded(
    words: tuple[str, ...], runner: CommandRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.run(*words, "--base-model", "m/base", "--rank", "8").exit_code == 0
    lora = {
        "rank": 8,
        "seed": None,
        "train_mlp": True,
        "train_attn": True,
        "train_unembed": True,
    }
    assert runner.service.asked == [("create", "m/base", lora), ("save", "checkpoint")]
    assert runner.service.saved.is_awaited
    assert runner.service.ended_with == [None]
    assert runner.written["weights_path"] == WEIGHTS
    assert WEIGHTS in capsys.readouterr().out


def test_metadata_fields(runner: CommandRunner) -> None:
    """All documented fields; the time is in UTC with seconds."""
    assert runner.run("--base-model", "m/base", "--seed", "7", "--no-train-mlp").exit_code == 0
    written = runner.written
    saved_at = datetime.fromisoformat(written.pop("saved_at"))
    assert (saved_at.utcoffset(), saved_at.microsecond) == (timedelta(0), 0)
    assert abs(datetime.now(UTC) - saved_at) < timedelta(hours=1)
    assert written == {
        "base_model": "m/base",
        "model_path": None,
        "model_id": "run-1",
        "weights_path": WEIGHTS,
        "lora": {
            "rank": 32,
            "seed": 7,
            "train_mlp": False,
            "train_attn": True,
            "train_unembed": True,
        },
        "session_id": "session-1",
        "cli_version": package_version(),
        "response": {"path": WEIGHTS, "type": None},
    }


@pytest.mark.parametrize("model_id", [None, ""])
def test_unknown_model_id_is_null(model_id: str | None, runner: CommandRunner) -> None:
    runner.service.model_id = model_id
    assert runner.run("--base-model", "m/base").exit_code == 0
    assert runner.written["model_id"] is None


def test_options_are_passed_to_config(runner: CommandRunner) -> None:
    """A bare timeout is in milliseconds."""
    words = ("--api-key", "tml-x", "--base-url", "http://h:1", "--timeout", "1500")
    assert runner.run("--base-model", "m", *words).exit_code == 0
    config = runner.service.config
    assert (config.api_key, config.base_url) == ("tml-x", "http://h:1")
    assert (config.timeout_seconds, config.poll_timeout_seconds) == (1.5, 1.5)


@pytest.mark.parametrize("part", ["mlp", "attn", "unembed"])
def test_each_layer_type_can_be_disabled(part: str, runner: CommandRunner) -> None:
    assert runner.run("--base-model", "m", f"--no-train-{part}").exit_code == 0
    assert runner.service.asked[0][2][f"train_{part}"] is False
    assert runner.run("--base-model", "m", f"--no-train-{part}", f"--train-{part}").exit_code == 0
    assert runner.service.asked[2][2][f"train_{part}"] is True


def test_model_path_may_be_a_checkpoint(runner: CommandRunner) -> None:
    """The LoRA settings come from the checkpoint."""
    assert runner.run("--model-path", STATE).exit_code == 0
    assert runner.service.asked == [
        ("info", STATE),
        ("restore", STATE, None),
        ("save", "checkpoint"),
    ]
    written = runner.written
    assert (written["base_model"], written["model_path"]) == ("m/restored", STATE)
    assert (written["lora"]["rank"], written["lora"]["train_attn"]) == (4, False)
    assert runner.run("--model-path", STATE, "--base-model", "m/mine").exit_code == 0
    assert runner.service.asked[4] == ("restore", STATE, "m/mine")
    assert runner.written["base_model"] == "m/mine"


def test_model_path_may_be_a_model_name(
    runner: CommandRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.run("--model-path", "m/other").exit_code == 0
    assert (runner.service.asked[0][1], runner.written["base_model"]) == ("m/other", "m/other")
    capsys.readouterr()
    assert runner.run("--model-path", "m/other", "--base-model", "m/base").exit_code == 0
    assert runner.service.asked[2][1] == "m/base"
    assert "using --base-model" in capsys.readouterr().err


# --- what is said -----------------------------------------------------------------------------


STEPS = ("Starting a session", "Creating the training client", "Saving weights")


def test_progress_goes_to_stderr_in_order(
    runner: CommandRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three steps are reported; stdout has only the result."""
    assert runner.run("--base-model", "m").exit_code == 0
    told = capsys.readouterr()
    places = [told.err.index(step) for step in STEPS]
    assert places == sorted(places)
    assert not any(step in told.out for step in STEPS)


def test_json_output_has_no_progress(
    runner: CommandRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    """With JSON output, stderr has only errors."""
    assert runner.run("--base-model", "m", "-f", "json").exit_code == 0
    assert capsys.readouterr().err == ""


def test_json_result_is_metadata_and_output_path(
    runner: CommandRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.run("--base-model", "m", "--json").exit_code == 0
    assert json.loads(capsys.readouterr().out) == {**runner.written, "output": str(runner.output)}


def test_help_prints_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """The group's help shows commands and the default form, the command's help every flag."""
    assert run(["checkpoint", "--help"]).exit_code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Usage: tinkex checkpoint")
    assert "tinkex checkpoint --base-model NAME --output" in shown
    assert run(["checkpoint", "create", "--help"]).exit_code == 0
    shown = capsys.readouterr().out
    flags = ["base-model", "model-path", "output", "rank", "seed"]
    flags += ["api-key", "base-url", "timeout"]
    flags += [f"{no}train-{part}" for part in ("mlp", "attn", "unembed") for no in ("", "no-")]
    assert all(f"--{flag}" in shown for flag in flags)


# --- how it fails -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Give --base-model or --model-path."),
        (("--base-model", ""), "Give --base-model or --model-path."),
        (
            ("--base-model", "m", "--no-train-mlp", "--no-train-attn", "--no-train-unembed"),
            "Nothing to train",
        ),
        (("--base-model", "m", "--rank", "0"), "--rank"),
        (("--base-model", "m", "--rank", "x"), "--rank"),
        (("--base-model", "m", "--seed", "1.5"), "--seed"),
        (("--model-path", STATE, "--rank", "8"), "--rank: only for a new adapter"),
        (("--model-path", STATE, "--no-train-mlp"), "--train-mlp: only for a new adapter"),
        (("--base-model", "m", "--timeout", "soon"), "--timeout"),
        (("--base-model", "m", "extra"), "extra"),
    ],
)
def test_invalid_options_are_usage_errors(
    words: tuple[str, ...], said: str, runner: CommandRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.run(*words).exit_code == 2
    told = capsys.readouterr()
    assert (told.out, runner.service.asked) == ("", [])
    assert said in told.err
    assert not runner.output.exists()


def test_output_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", "--base-model", "m"], Context()).exit_code == 2
    assert "--output" in capsys.readouterr().err


def test_invalid_checkpoint_path_is_rejected(runner: CommandRunner) -> None:
    assert runner.run("--model-path", "tinker://run-0/weights").exit_code == 1
    assert runner.service.asked == []


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (RequestFailedError("no such model", category=RequestErrorCategory.User), "Correct"),
        (RequestFailedError("out of memory", category=RequestErrorCategory.Server), "again"),
        (InternalServerError("it broke"), "again"),
    ],
)
def test_error_category_is_user_or_server(
    error: TinkexError, hint: str, runner: CommandRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    """The session is also closed."""
    runner.service.create_error = error
    outcome = runner.run("--base-model", "m")
    assert (outcome.exit_code, outcome.error) == (1, error)
    told = capsys.readouterr()
    assert told.out == ""
    assert error.message.split(": ")[-1] in told.err
    assert hint in told.err.splitlines()[-1]
    assert runner.service.ended_with == [type(error)]
    assert not runner.output.exists()


@pytest.mark.parametrize("error", [InternalServerError("it broke"), KeyboardInterrupt()])
def test_failed_save_writes_no_file_and_closes_session(
    error: BaseException, runner: CommandRunner
) -> None:
    runner.service.saved = Ready(error)
    code = 130 if isinstance(error, KeyboardInterrupt) else 1
    assert runner.run("--base-model", "m").exit_code == code
    assert runner.service.ended_with == [type(error)]
    assert not runner.output.exists()


# --- the file ---------------------------------------------------------------------------------


def test_output_directories_are_created_and_file_replaced(tmp_path: Path) -> None:
    runner = CommandRunner(tmp_path / "a" / "b" / "made.json")
    assert runner.run("--base-model", "m/1").exit_code == 0
    assert runner.run("--base-model", "m/2").exit_code == 0
    assert runner.written["base_model"] == "m/2"
    assert list(runner.output.parent.iterdir()) == [runner.output]


def test_output_symlink_is_preserved(tmp_path: Path) -> None:
    runner = CommandRunner(tmp_path / "link.json")
    runner.output.symlink_to(tmp_path / "real.json")
    assert runner.run("--base-model", "m").exit_code == 0
    assert runner.output.is_symlink()
    assert runner.written["weights_path"] == WEIGHTS


def test_unwritable_output_is_rejected_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    for output in (tmp_path / "file" / "made.json", Path(os.devnull)):
        runner = CommandRunner(output)
        assert runner.run("--base-model", "m").exit_code == 1
        assert runner.service.asked == []
        assert str(output) in capsys.readouterr().err
    assert CommandRunner(tmp_path).run("--base-model", "m").exit_code == 2


def test_full_disk_keeps_old_file_and_reports_weights(
    runner: CommandRunner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is written atomically."""

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    runner.output.write_text("old")
    monkeypatch.setattr(atomic.os, "fsync", fail)
    assert runner.run("--base-model", "m").exit_code == 1
    told = capsys.readouterr()
    assert "No space left on device" in told.err
    assert WEIGHTS in told.err
    assert runner.output.read_text() == "old"
    assert list(runner.output.parent.iterdir()) == [runner.output]


@given(text=st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1))
def test_any_model_name_round_trips(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    runner = CommandRunner(tmp_path_factory.mktemp("any") / "made.json")
    assert runner.run(f"--base-model={text}").exit_code == 0
    assert runner.written["base_model"] == text
