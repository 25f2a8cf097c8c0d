"""Clients of the OpenAI and Anthropic APIs, each in its environment, against tinkex/tiny."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compat.clients.registry import Place
from tests.compat.clients.run import run_client
from tests.compat.clients.serving import serving_tiny
from tests.compat.clients.versions import CLIENTS
from tests.compat.environments import ROOT, CannotInstall, python_of
from tests.compat.results import PASS
from tests.support.real_server import clean_environment

pytestmark = pytest.mark.slow
TIMEOUT_SECONDS = 240
PAGE = ROOT / "docs" / "server" / "any-client.md"
#: Blocks of the page that run in the environment of a client.
BLOCK = re.compile(r"<!-- run with (\S+) -->\n\n```(sh|python)\n(.*?)```", re.DOTALL)
BLOCKS = {client: (language, code) for client, language, code in BLOCK.findall(PAGE.read_text())}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with serving_tiny(tmp_path_factory.mktemp("clients") / "home") as place:
        yield place


def python_with(client: str) -> Path:
    """The interpreter of an environment with this client."""
    try:
        return python_of(f"client-{client}", CLIENTS[client])
    except CannotInstall as error:
        pytest.skip(f"{client} cannot be installed: {error}")


@pytest.mark.parametrize("client", CLIENTS)
def test_client_passes_its_scenarios(client: str, place: Place) -> None:
    outcomes = run_client(client, python_with(client), place)
    assert len(outcomes) > 3
    failed = {each.name: each.detail for each in outcomes if each.status != PASS}
    assert not failed, failed


@pytest.mark.parametrize("client", sorted(CLIENTS.keys() - {"anthropic", "openai"}))
def test_documented_commands_of_client_work(client: str, place: Place, tmp_path: Path) -> None:
    language, code = BLOCKS[client]
    programs = python_with(client).parent
    moved = code.replace("http://127.0.0.1:8000", place.url)
    command = ["bash", "-euo", "pipefail", "-c"] if language == "sh" else ["python", "-c"]
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    server = {"OPENAI_BASE_URL": place.openai_url, "OPENAI_API_KEY": place.key}
    done = subprocess.run(
        [*command, moved],
        cwd=tmp_path,
        env=clean_environment(PATH=path, HOME=str(tmp_path), HF_DATASETS_OFFLINE="1", **server),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
