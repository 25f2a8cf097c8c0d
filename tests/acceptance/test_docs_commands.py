"""What the pages about the server tell people to type is typed here, against real processes.

A page becomes one bash script, in a home of its own. Above each block the page says, invisibly,
what to do with it: `run` it, or `serve` it in the background until it says that it is ready.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.postgres import PostgresServer, find_programs
from tinkex.home import Home
from tinkex.models import TINY_FOLDER
from tinkex.server_discovery import find_lock_holder

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "server").glob("*.md"))
BLOCK = re.compile(r"<!-- (run|serve) -->\n\n```(sh|python)\n(.*?)```", re.DOTALL)
READY = "tinkex server ready at http://127.0.0.1:8000"
TIMEOUT_SECONDS = 240.0
#: Nothing here may find a server or a key of whoever runs the tests.
CLEAN = {name: text for name, text in os.environ.items() if not name.startswith(("TINKE", "PG"))}
#: A process substitution, because its first line can be waited for.
SERVE = """
exec {{ready}}< <({command} 2>> "$HOME/log")
read -r line <&$ready || {{ cat "$HOME/log" >&2; exit 1; }}
test "$line" = "{line}"
"""


def as_command(code: str) -> str:
    """Python as a command of bash."""
    return f"python - <<'END_OF_PYTHON'\n{code}END_OF_PYTHON\n"


def script_of(page: Path) -> str:
    """The page's blocks in order; empty if it has none."""
    parts = []
    for mark, language, code in BLOCK.findall(page.read_text(encoding="utf-8")):
        if mark == "serve":
            parts.append(SERVE.format(command=code.strip(), line=READY))
        elif language == "python":
            parts.append(as_command(code))
        else:
            parts.append(code)
    return "\n".join(parts)


SCRIPTS = {page.stem: script for page in PAGES if (script := script_of(page))}


@pytest.fixture
def run_page(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Runs a script in an empty home; no server is left when the test is over."""

    def run(script: str, **environment: str) -> None:
        port = free_port()
        moved = script.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", moved],
            cwd=tmp_path,
            env=CLEAN
            | {"HOME": str(tmp_path), "TINKEX_PORT": str(port), "OMP_NUM_THREADS": "1"}
            | {"TINKEX_ENGINE": "fake"}
            | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
            | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        log = tmp_path / "log"
        said = log.read_text() if log.exists() else ""
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\nlog:\n{said}"
        assert "Traceback" not in done.stderr + said

    yield run
    for lock in tmp_path.rglob("server.lock"):
        if find_lock_holder(Home(lock.parent)) is not None:
            command = [sys.executable, "-m", "tinkex", "serve", "stop", "--home", str(lock.parent)]
            subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_SECONDS)


TRAIN = """
import tinkex

with tinkex.ServiceClient() as service:
    training = service.create_lora_training_client("tinkex/bigram", rank=8)
    training.optim_step(tinkex.AdamParams(learning_rate=0.1)).result()
    training.save_state("kept").result()
"""
CHECK = """
import tinkex

with tinkex.ServiceClient() as service:
    [kept] = service.rest_client().list_user_checkpoints().result().checkpoints
    loaded = service.create_training_client_from_state_with_optimizer(kept.tinker_path)
    step = loaded.optim_step(tinkex.AdamParams(learning_rate=0.1)).result()
    assert step.metrics["step"] == 2.0, step
"""
LOG_IN = """
export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=$(cat ~/.tinkex/key)
"""


def test_the_pages_have_commands() -> None:
    assert SCRIPTS.keys() >= {"any-client", "http-api", "keys", "models", "operations", "running"}
    assert READY in (ROOT / "docs" / "server" / "running.md").read_text()
    assert READY in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", sorted(SCRIPTS.keys() - {"any-client", "models", "operations"}))
def test_the_commands_of_a_page_work(page: str, run_page: Callable[..., None]) -> None:
    run_page(SCRIPTS[page])


def test_the_commands_of_the_page_on_clients_work(run_page: Callable[..., None]) -> None:
    # Blocks of clients with environments of their own run in tests/acceptance/clients.
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("## Use your model from any client\n")[2].partition("\n## ")[0]
    commands = section.partition("```text\n")[2].partition("```")[0].replace("\n$ ", "\n")
    assert commands.startswith("$ export ") and "tinker://RUN/sampler_weights/NAME" in commands
    typed = commands.removeprefix("$ ").replace("tinker://RUN/sampler_weights/NAME", "tinkex/tiny")
    run_page(f"{SCRIPTS['any-client']}\n{typed}", TINKEX_MODELS=f"tinkex/tiny={TINY_FOLDER}")


def test_the_commands_of_the_models_page_work(run_page: Callable[..., None]) -> None:
    run_page(SCRIPTS["models"], TINKEX_ENGINE="local", HF_HUB_OFFLINE="1")


def test_the_commands_of_the_operations_page_work(
    postgres: PostgresServer, run_page: Callable[..., None]
) -> None:
    address = postgres.create_database().removeprefix("postgresql://tinkex@").partition("/")[0]
    host, _, port = address.partition(":")
    run_page(
        SCRIPTS["operations"].replace("127.0.0.1:5432", address),
        PGHOST=host,
        PGPORT=port,
        PGUSER="tinkex",
        PATH=f"{Path(sys.executable).parent}:{find_programs()}:{os.environ['PATH']}",
    )


def test_weights_come_back_from_the_backup_of_a_running_server(
    run_page: Callable[..., None],
) -> None:
    page = (ROOT / "docs" / "server" / "operations.md").read_text(encoding="utf-8")
    blocks = [code for _, _, code in BLOCK.findall(page)]
    [back_up] = [code for code in blocks if "sqlite3.connect" in code]
    [restore] = [code for code in blocks if "~/restored\n" in code and code.startswith("cp ")]
    [serve] = [code for code in blocks if code == "tinkex serve --home ~/restored\n"]
    first, second = (
        SERVE.format(command=command, line=READY) for command in ("tinkex serve", serve.strip())
    )
    stop = "tinkex serve stop\n"
    run_page(
        first + LOG_IN + as_command(TRAIN) + back_up + stop + restore + second + as_command(CHECK)
    )
