"""`tinkex serve`: startup, files in the home, and rejected settings."""

from __future__ import annotations

import json
import shutil
import signal
import socket
from pathlib import Path

import pytest

import tinkex
from tests.acceptance.processes.conftest import Serve
from tests.support.serve_process import TIMEOUT_SECONDS, answers, eventually, run_tinkex
from tinkex.server_discovery import read_state

MODEL = "tinkex/bigram"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_serve_prints_one_line_and_stops_on_signal(
    serve: Serve, home: Path, number: signal.Signals
) -> None:
    serve_process = serve(home, "--engine", "fake")
    url = serve_process.ready()
    assert url.startswith("http://127.0.0.1:")
    with tinkex.ServiceClient(base_url=url, api_key=serve_process.key) as service:
        models = service.get_server_capabilities().supported_models
        assert [model.model_name for model in models] == [MODEL]
    serve_process.send(number)
    assert serve_process.ended() == 0
    assert not answers(url)
    assert read_state(serve_process.home) is None
    assert "Traceback" not in serve_process.log_text


def test_ready_message_in_json(serve: Serve, home: Path) -> None:
    serve_process = serve(home, "--engine", "fake", "--json")
    eventually(lambda: serve_process.output.read_text().endswith("}\n"))
    status = json.loads(serve_process.output.read_text())
    assert (status["status"], status["pid"]) == ("running", serve_process.pid)
    assert answers(status["url"])
    serve_process.send(signal.SIGTERM)
    assert serve_process.process.wait(TIMEOUT_SECONDS) == 0
    assert json.loads(serve_process.output.read_text()) == status, "nothing else is printed"


def test_files_in_home_of_running_server(serve: Serve, home: Path) -> None:
    serve_process = serve(home)
    url = serve_process.ready()
    state = json.loads(serve_process.home.state_file.read_text())
    assert (state["pid"], state["url"]) == (serve_process.pid, url)
    assert state["version"] == tinkex.__version__
    assert state["started_at"] > 1e9
    assert home.stat().st_mode & 0o777 == 0o700
    for file in (
        serve_process.home.key_file,
        serve_process.home.store_file,
        serve_process.home.state_file,
    ):
        assert file.stat().st_mode & 0o777 == 0o600, file
    assert serve_process.key.startswith("tml-")
    assert serve_process.key not in serve_process.log_text


def test_home_keeps_key_and_port_and_replaces_revoked_key(serve: Serve, home: Path) -> None:
    first = serve(home)
    url, key = first.ready(), first.key
    first.end()
    second = serve(home)
    # Port 0 prefers the previous port, where a client may still retry.
    assert (second.ready(), second.key) == (url, key)
    second.end()
    assert run_tinkex("key", "revoke", "1", "--home", str(home)).returncode == 0
    third = serve(home)
    third.ready()
    assert third.key != key


def test_second_server_in_same_home_is_rejected(serve: Serve, home: Path) -> None:
    serve_process = serve(home)
    url = serve_process.ready()
    refused = run_tinkex("serve", "--home", str(home), "--port", "0")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert (
        f"a server with pid {serve_process.pid} is already running in {home} at {url}"
        in refused.stderr
    )
    assert "Traceback" not in refused.stderr
    # The first server is unaffected.
    assert answers(url)
    assert read_state(serve_process.home) is not None


def test_server_stops_when_home_is_removed(serve: Serve, home: Path) -> None:
    first = serve(home)
    first.ready()
    # The server may create a file while the others are being removed.
    eventually(lambda: shutil.rmtree(home, ignore_errors=True) or not home.exists())
    second = serve(home)
    url = second.ready()
    assert first.process.wait(TIMEOUT_SECONDS) == 1
    assert f"the files of the home {home} were removed while its server" in first.log_text
    assert "Traceback" not in first.log_text
    state = read_state(second.home)
    assert state is not None
    assert (state.pid, state.url) == (second.pid, url)


def test_port_in_use_error(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = run_tinkex("serve", "--home", str(home), "--port", str(port))
    assert refused.returncode == 1
    assert f"port {port} of 127.0.0.1 is in use" in refused.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_public_host_requires_key(home: Path, host: str) -> None:
    refused = run_tinkex("serve", "--home", str(home), "--host", host, "--port", "0")
    assert refused.returncode == 1
    assert "the server has no API key" in refused.stderr
    assert "`tinkex key create`" in refused.stderr
    assert "--api-key" in refused.stderr
    # If the failed start created a key, a second attempt would succeed.
    again = run_tinkex("serve", "--home", str(home), "--host", host, "--port", "0")
    assert again.returncode == 1


def test_public_host_with_key(serve: Serve, home: Path) -> None:
    environment = {"TINKEX_SERVER_API_KEY": "tml-from-the-environment"}
    serve_process = serve(home, "--host", "0.0.0.0", env=environment)
    url = serve_process.ready()
    assert url.startswith("http://127.0.0.1:")
    with tinkex.ServiceClient(
        base_url=url, api_key=environment["TINKEX_SERVER_API_KEY"]
    ) as service:
        assert service.get_server_capabilities().supported_models
    assert environment["TINKEX_SERVER_API_KEY"] not in serve_process.log_text


def test_settings_from_home_file(serve: Serve, home: Path) -> None:
    home.mkdir()
    (home / "server.toml").write_text("models = ['our/model']\n")
    serve_process = serve(home)
    with tinkex.ServiceClient(base_url=serve_process.ready(), api_key=serve_process.key) as service:
        models = service.get_server_capabilities().supported_models
    assert [model.model_name for model in models] == ["our/model"]


def test_several_api_processes_share_port(serve: Serve, home: Path) -> None:
    serve_process = serve(home, "--api-processes", "2")
    url = serve_process.ready()
    assert len(set(serve_process.pids("API"))) == 2
    with tinkex.ServiceClient(base_url=url, api_key=serve_process.key) as service:
        client = service.create_lora_training_client(MODEL, rank=4)
        path = client.save_state("one").result().path
    assert path.endswith("/weights/one")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--engine", "magic"], "engine is 'magic'; expected one of local, fake"),
        (["--host", "nowhere.invalid"], "host 'nowhere.invalid' is not an address"),
        (["--store", "mysql://x/y"], "begins with sqlite:/// or postgresql://"),
        (["--api-key", "secret"], "api_key must begin with 'tml-'"),
        (["--config", "/absent.toml"], "/absent.toml cannot be read: No such file"),
        (["--log-level", "loud"], "log_level is 'loud'"),
    ],
)
def test_invalid_settings_exit_with_code_1(home: Path, words: list[str], sentence: str) -> None:
    refused = run_tinkex("serve", "--home", str(home), "--port", "0", *words)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert sentence in refused.stderr
    assert "Traceback" not in refused.stderr


def test_home_that_is_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = run_tinkex("serve", "--home", str(tmp_path / "file"), "--port", "0")
    assert refused.returncode == 1
    assert "cannot create the home" in refused.stderr
