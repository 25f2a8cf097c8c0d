"""`checkpoint create` against a server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.cli.conftest import RunCli, SeededServer
from tests.integration.conftest import BASE_MODEL, KEY, TIMEOUT_SECONDS
from tinkex.testing import Fault


def test_default_command_saves_listed_weights(
    seeded: SeededServer, tinkex: RunCli, tmp_path: Path
) -> None:
    """The session is finished with success."""
    output = tmp_path / "out" / "made.json"
    words = ("--base-model", BASE_MODEL, "--output", str(output), "--rank", "3", "--seed", "5")
    made = tinkex("checkpoint", *words, "--no-train-unembed", "--json").json
    written = json.loads(output.read_text())
    assert made == {**written, "output": str(output)}
    asked = seeded.server.calls("create_model")[-1].message
    assert asked["base_model"] == BASE_MODEL
    assert asked["lora_config"] == {
        "rank": 3,
        "seed": 5,
        "train_mlp": True,
        "train_attn": True,
        "train_unembed": False,
    }
    assert seeded.server.finish_reasons[written["session_id"]] == "success"
    found = tinkex("checkpoint", "info", written["weights_path"], "--json").json
    assert found["checkpoint_type"] == "sampler"
    assert (found["training_run_id"], found["lora_rank"]) == (written["model_id"], 3)


def test_table_output(seeded: SeededServer, tinkex: RunCli, tmp_path: Path) -> None:
    result = tinkex("checkpoint", "create", "--base-model", BASE_MODEL, "-o", str(tmp_path / "m"))
    assert result.exit_code == 0
    written = json.loads((tmp_path / "m").read_text())
    for text in (written["weights_path"], BASE_MODEL, written["model_id"], "Rank 32"):
        assert text in result.out
    assert "Starting a session" in result.err


def test_adapter_is_restored_from_checkpoint(
    seeded: SeededServer, tinkex: RunCli, tmp_path: Path
) -> None:
    words = ("--model-path", seeded.training, "--output", str(tmp_path / "m.json"))
    made = tinkex("checkpoint", *words, "--json").json
    assert (made["base_model"], made["lora"]["rank"]) == (BASE_MODEL, 8)
    assert made["model_id"] not in seeded.run_ids
    assert seeded.server.calls("load_weights")[-1].message["path"] == seeded.training


def test_unknown_model_is_a_user_error(
    seeded: SeededServer, tinkex: RunCli, tmp_path: Path
) -> None:
    """No file is written, and the session is finished as failed."""
    result = tinkex("checkpoint", "--base-model", "no/such", "--output", str(tmp_path / "m.json"))
    assert (result.exit_code, result.out) == (1, "")
    assert "no/such" in result.err
    assert "Correct the input" in result.err
    assert not (tmp_path / "m.json").exists()
    assert list(seeded.server.finish_reasons.values()) == ["errored"]


def test_rejected_key_error_names_the_option(
    seeded: SeededServer, tinkex: RunCli, tmp_path: Path
) -> None:
    words = ("--base-model", BASE_MODEL, "--output", str(tmp_path / "m.json"))
    result = tinkex("checkpoint", *words, "--api-key", "tml-wrong")
    assert result.exit_code == 1
    assert "Authentication failed" in result.err
    assert "--api-key" in result.err


def test_timeout_option_limits_slow_server(
    seeded: SeededServer, tinkex: RunCli, tmp_path: Path
) -> None:
    """The timeout, in milliseconds, applies to one operation."""
    seeded.server.inject("retrieve_future", Fault(delay_seconds=60.0), times=None)
    words = ("--base-model", BASE_MODEL, "--output", str(tmp_path / "m.json"))
    result = tinkex("checkpoint", *words, "--timeout", "300")
    assert result.exit_code == 1
    assert "Request timeout" in result.err
    assert "--timeout" in result.err


def test_ctrl_c_leaves_no_session_and_no_file(seeded: SeededServer, tmp_path: Path) -> None:
    seeded.server.inject("save_weights_for_sampler", Fault(delay_seconds=60.0), times=None)
    before = len(seeded.server.calls("save_weights_for_sampler"))
    output = tmp_path / "m.json"
    words = ["checkpoint", "--base-model", BASE_MODEL, "--output", str(output)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tinkex", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ.copy(),
    )
    seeded.server.wait_for("save_weights_for_sampler", before + 1, TIMEOUT_SECONDS)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert list(seeded.server.finish_reasons.values()) == ["interrupted"]
    assert not output.exists()


@pytest.mark.parametrize("place", ["before", "behind"])
def test_api_key_option_at_any_position(
    place: str,
    seeded: SeededServer,
    tinkex: RunCli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TINKER_API_KEY")
    monkeypatch.delenv("TINKER_BASE_URL")
    where = ("--api-key", KEY, "--base-url", seeded.server.url)
    words = ("checkpoint", "--base-model", BASE_MODEL, "--output", str(tmp_path / "m.json"))
    result = tinkex(*where, *words) if place == "before" else tinkex(*words, *where)
    assert result.exit_code == 0, result.err
