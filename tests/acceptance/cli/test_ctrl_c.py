"""Ctrl-C exits with 130 and leaves no partial results, locally or on the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

import tinkex
from tests.acceptance.cli.conftest import TINKEX, User
from tests.acceptance.cli.stalling_proxy import stuck
from tests.acceptance.server.scenario_context import BASE_MODEL, TIMEOUT_SECONDS
from tests.support.real_server import eventually
from tinkex.cli.commands.checkpoint.download import INTERRUPTED_MESSAGE, RESUME_HINT

ROOT = Path(__file__).parents[3]
#: The `tinkex` command with a toy tokenizer.
TALKING = """
from tests.support.byte_tokenizer_cli import make_service
from tinkex.cli.context import Context
from tinkex.cli.main import main

main(obj=Context.detect()._replace(make_service=make_service))
"""


@contextmanager
def started(command: Sequence[str], user: User, **more: str) -> Iterator[subprocess.Popen[str]]:
    """Start a command in its own process group, like a shell."""
    process = subprocess.Popen(
        command,
        env={**user.environment, **more},
        cwd=user.directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def interrupt(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Send Ctrl-C to the process group and return the output after it.

    A signal that meets Python between two of its own lines may be lost; a person presses again.
    """
    os.killpg(process.pid, signal.SIGINT)
    try:
        out, err = process.communicate(timeout=TIMEOUT_SECONDS / 3)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    return out, err


def session_states(user: User) -> list[str]:
    listed = user.ours.json("session", "list")["sessions"]
    return [each["status"]["type"] for each in listed]


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_interrupted_training_is_saved_and_session_finished(
    flags: tuple[str, ...], user: User
) -> None:
    data = user.directory / "rows.jsonl"
    data.write_text(json.dumps({"prompt": "two and two are ", "completion": "four"}))
    words = ["train", "sft", str(data), "--base-model", BASE_MODEL, "--steps", "100000"]
    words += ["--run-dir", str(user.directory / "run"), *flags]
    command = [sys.executable, "-c", TALKING, *words]
    with started(command, user, PYTHONPATH=str(ROOT)) as process:
        eventually(lambda: has_steps(user))
        out, err = interrupt(process)
    assert user.active_sessions() == []
    assert session_states(user) == ["client_finished"]
    saved = user.ours.json("checkpoint", "list")["checkpoints"]
    assert [each["checkpoint_type"] for each in saved] == ["training"]
    if flags:
        assert json.loads(out)["state_path"] == saved[0]["tinker_path"]
    else:
        assert "the same command resumes it" in err


def has_steps(user: User) -> bool:
    """Whether a run of this user has completed a step."""
    with tinkex.ServiceClient(base_url=user.url, api_key=user.key) as service:
        client = service.rest_client()
        runs = client.list_training_runs().result(TIMEOUT_SECONDS).training_runs
        ids = [run.training_run_id for run in runs]
        return any(client.get_run_metrics(each).result(TIMEOUT_SECONDS).steps for each in ids)


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_interrupted_sample_leaves_no_session(flags: tuple[str, ...], user: User) -> None:
    words = ["sample", "--prompt-tokens", "104,101", "--max-tokens", "4", "-o", "answer.txt"]
    with stuck(user.url, "/retrieve_future") as proxy:
        command = [*TINKEX, *words, "--base-url", proxy.url, *flags]
        with started(command, user) as process:
            assert proxy.is_stuck.wait(TIMEOUT_SECONDS)
            out, err = interrupt(process)
    assert out == ""
    assert (
        '"type": "Interrupted"' if flags else "\nInterrupted before the samples were complete.\n"
    ) in f"\n{err}"
    assert "Error" not in err
    assert user.active_sessions() == []
    assert session_states(user) == ["client_finished"]
    assert not (user.directory / "answer.txt").exists()


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_interrupted_download_is_resumed(flags: tuple[str, ...], user: User) -> None:
    with tinkex.ServiceClient(base_url=user.url, api_key=user.key) as service:
        client = service.create_lora_training_client(BASE_MODEL, rank=8)
        path = client.save_state("whole").result(TIMEOUT_SECONDS).path
    place = user.directory / "here"
    words = ["checkpoint", "download", path, "-o", str(place), *flags]
    with (
        stuck(user.url, "adapter_model.safetensors", passed_bytes=5000) as proxy,
        started([*TINKEX, *words, "--base-url", proxy.url], user) as process,
    ):
        assert proxy.is_stuck.wait(TIMEOUT_SECONDS)
        out, err = interrupt(process)
    assert out == ""
    said = INTERRUPTED_MESSAGE if flags else f"\n{INTERRUPTED_MESSAGE}\n{RESUME_HINT}\n"
    assert said in f"\n{err}"
    assert [each.name for each in place.iterdir() if not each.name.startswith(".")] == []
    assert user.active_sessions() == []
    done = user.ours.json("checkpoint", "download", path, "-o", str(place))
    assert [each.name for each in place.iterdir()] == [Path(done["destination"]).name]
    left = user.ours.json("checkpoint", "list")["checkpoints"]
    assert [each["tinker_path"] for each in left] == [path]


def test_interrupted_checkpoint_create_leaves_no_file_and_no_session(user: User) -> None:
    words = ["checkpoint", "--base-model", BASE_MODEL, "--output", "made.json"]
    with (
        stuck(user.url, "/retrieve_future") as proxy,
        started([*TINKEX, *words, "--base-url", proxy.url], user) as process,
    ):
        assert proxy.is_stuck.wait(TIMEOUT_SECONDS)
        out, _ = interrupt(process)
    assert out == ""
    assert not (user.directory / "made.json").exists()
    assert user.active_sessions() == []
