"""`config`, `doctor` and `model list` against a server."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli.conftest import RunCli, SeededServer
from tests.integration.conftest import BASE_MODEL, KEY, Serve
from tests.support.model_folder_files import write_folder
from tinkex.cli.commands.doctor import checks, runner
from tinkex.cli.context import Context
from tinkex.models import TINY
from tinkex.testing import Fault


def settings(tinkex: RunCli, *words: str) -> dict[str, tuple[Any, str]]:
    found = tinkex("config", "show", "--json", *words).json["settings"]
    return {row["name"]: (row["value"], row["source"]) for row in found}


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    file = tmp_path / ".tinkex" / "config.toml"
    file.parent.mkdir()
    file.write_text(
        'default_profile = "a"\n'
        "[profiles.a]\n"
        'base_url = "https://a.example"\n'
        'api_key = "tml-0123456789abcdef"\n'
        "timeout_seconds = 7\n"
        "[profiles.b]\n"
        'project_id = "p"\n'
    )
    return file


# --- config -------------------------------------------------------------------------------------


@pytest.fixture
def seeded(shared_seeded: SeededServer) -> SeededServer:
    """Nothing here changes the server."""
    return shared_seeded


def test_default_settings(tinkex: RunCli, tmp_path: Path) -> None:
    found = settings(tinkex)
    home = tmp_path / ".tinkex"
    assert found["base_url"] == ("started when it is needed", f"the local server of {home}")
    assert found["api_key"] == (None, "default")
    assert found["connect_timeout_seconds"] == (5.0, "default")
    assert found["home"] == (str(home), "default")
    assert not home.exists()
    assert "not set" in tinkex("config", "show").out


def test_settings_of_a_profile(tinkex: RunCli, profiles: Path) -> None:
    found = settings(tinkex)
    assert found["base_url"] == ("https://a.example", "profile 'a'")
    assert found["api_key"] == ("tml-...cdef", f"profile 'a' in {profiles}")
    assert found["timeout_seconds"] == (7, "profile 'a'")
    assert found["profile"] == ("a", f"default_profile in {profiles}")
    assert settings(tinkex, "--profile", "b")["project_id"] == ("p", "profile 'b'")
    shown = tinkex("config", "show").out
    assert "0123456789" not in shown
    assert f"Profiles in {profiles}: a, b\n" in shown


def test_options_and_variables_override_profile(
    tinkex: RunCli, profiles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", "https://v.example")
    monkeypatch.setenv("TINKER_TAGS", "x,y")
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", "echo tml-secret-of-a-command")
    found = settings(tinkex)
    assert found["base_url"] == ("https://v.example", "TINKER_BASE_URL")
    assert found["tags"] == (["x", "y"], "TINKER_TAGS")
    assert found["credential_command"] == ("***", "TINKER_CREDENTIAL_CMD")
    assert found["api_key"] == ("printed by a command", "TINKER_CREDENTIAL_CMD")
    # --profile precedes a variable, and an option precedes both.
    assert settings(tinkex, "--profile", "a")["base_url"] == ("https://a.example", "profile 'a'")
    found = settings(tinkex, "--base-url", "https://f.example", "--timeout", "3s")
    assert found["base_url"] == ("https://f.example", "--base-url")
    assert found["timeout_seconds"] == (3.0, "--timeout")


def test_config_path_prints_the_file(tinkex: RunCli, tmp_path: Path) -> None:
    path = tmp_path / ".tinkex" / "config.toml"
    assert tinkex("config", "path").out == f"{path}\n"
    found = tinkex("config", "path", "--json").json
    assert (found["path"], found["exists"]) == (str(path), False)


def test_invalid_profiles_file_is_an_error(tinkex: RunCli, profiles: Path) -> None:
    profiles.write_text("[profiles.a]\ncolour = 'red'\n")
    failed = tinkex("config", "show", "--json")
    assert "known: base_url, api_key" in failed.failure["message"]


# --- doctor -------------------------------------------------------------------------------------


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use only checks that start no process."""
    heavy = {"torch", "kernels"}
    light_checks = tuple(check for check in checks.CHECKS if check.name not in heavy)
    monkeypatch.setattr(checks, "CHECKS", light_checks)


def diagnosis(out: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(out)["checks"]}


@pytest.mark.usefixtures("light")
def test_doctor_on_healthy_machine(seeded: SeededServer, tinkex: RunCli) -> None:
    result = tinkex("doctor", "--json")
    assert result.exit_code == 0
    found = diagnosis(result.out)
    assert all(row["status"] == "ok" for row in found.values()), found
    assert "has 1 model" in found["server"]["message"]
    assert "from TINKER_API_KEY" in found["key"]["message"]
    assert KEY not in result.out


@pytest.mark.usefixtures("light")
def test_doctor_with_rejected_key_and_unreachable_server(
    seeded: SeededServer, tinkex: RunCli
) -> None:
    result = tinkex("doctor", "--json", "--api-key", "tml-no")
    server = diagnosis(result.out)["server"]
    assert (result.exit_code, server["status"]) == (1, "fail")
    assert "Authentication failed" in server["message"]
    assert "tinkex auth login" in server["advice"]
    result = tinkex("doctor", "--base-url", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "fail  server" in result.out
    assert "-> Is the server running? `tinkex serve` starts one" in result.out


@pytest.mark.usefixtures("light")
def test_doctor_with_silent_server(
    seeded: SeededServer, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeded.server.inject("client_config", Fault(delay_seconds=2.0), times=None)
    monkeypatch.setattr(runner, "CHECK_SECONDS", 0.3)
    found = diagnosis(tinkex("doctor", "--json").out)
    assert "no response within" in found["server"]["message"]


@pytest.mark.usefixtures("light")
def test_doctor_without_configuration(tinkex: RunCli, tmp_path: Path) -> None:
    result = tinkex("doctor", "--json")
    found = diagnosis(result.out)
    assert (result.exit_code, found["server"]["status"]) == (0, "warn")
    assert "tinkex serve" in found["server"]["advice"]
    assert not (tmp_path / ".tinkex").exists()


@pytest.mark.usefixtures("light")
def test_doctor_for_hosted_service_without_key(tinkex: RunCli) -> None:
    words = ("--base-url", "https://tinker.thinkingmachines.dev/services/tinker-prod")
    found = diagnosis(tinkex("doctor", "--json", *words).out)
    assert (found["key"]["status"], found["server"]["status"]) == ("fail", "warn")


def test_doctor_compares_server_clock(
    seeded: SeededServer, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "not compared" in checks.check_clock(Context()).message
    late = datetime.now(UTC) - timedelta(hours=1)
    monkeypatch.setattr(checks, "_fetch_server_time", lambda context: late)
    assert checks.check_clock(Context()).status == "warn"


# --- models -------------------------------------------------------------------------------------


def test_models_of_a_server(serve: Serve, tinkex: RunCli) -> None:
    server = serve(api_keys={KEY}, models=(BASE_MODEL, "Qwen/Qwen3-8B"))
    where = ("--base-url", server.url, "--api-key", KEY)
    found = tinkex("model", "list", *where, "--json").json
    assert [row["model_name"] for row in found["models"]] == [BASE_MODEL, "Qwen/Qwen3-8B"]
    shown = tinkex("model", "list", "qwen3", *where).out
    assert shown.startswith("1 model\n")
    assert "32,768" in shown
    missing = tinkex("model", "list", "nosuch", *where, "--json")
    assert missing.exit_code == 1
    assert missing.failure["message"] == f"no model on {server.url} has 'nosuch' in its name"


def test_models_of_given_home(seeded: SeededServer, tinkex: RunCli, tmp_path: Path) -> None:
    home = ("--home", str(tmp_path / "home"))
    folder = write_folder(tmp_path / "small")
    assert tinkex("model", "add", "mine", str(folder), *home).exit_code == 0
    assert [row["name"] for row in tinkex("model", "list", *home, "--json").json] == ["mine", TINY]
    assert [row["name"] for row in tinkex("model", "list", "MI", *home, "--json").json] == ["mine"]
    missing = tinkex("model", "list", "zzz", *home)
    assert "has 'zzz' in its name; available: mine" in missing.err
    assert tinkex("model", "list", "--json").json["models"][0]["model_name"] == BASE_MODEL
