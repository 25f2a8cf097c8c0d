"""Imports and commands stay light: which modules they may load, checked in new processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tests.support.model_folder_files import write_folder
from tinkex import types
from tinkex.cli.main import main
from tinkex.testing import SCRIPTED, StubServer, say, scripted_model

HEAVY = {
    "aiohttp",
    "httpx",
    "litestar",
    "numpy",
    "obstore",
    "pydantic",
    "ray",
    "rich",
    "sqlalchemy",
    "torch",
    "transformers",
    "uvicorn",
}
#: Not even these for the bare package.
MIDDLING = {"asyncio", "click", "msgspec", "pyqwest"}
MODULES = (
    "tinkex",
    "tinkex.types",
    "tinkex.wire.endpoints",
    "tinkex.client.service",
    "tinkex.client.custom_loss",
    "tinkex.regularizers",
    "tinkex.cli.main",
    "tinkex.pipeline.settings_sources",
)
#: What more an import must not load, and what it may load although it is heavy.
TYPE_MODULES = ", ".join(
    f"tinkex.types.{path.stem}"
    for path in sorted(Path(types.__file__).parent.glob("*.py"))
    if path.stem not in {"__init__", "arrays"}
)
FORBIDDEN = {
    TYPE_MODULES: {"numpy", "torch", "pydantic", "tinkex.types.arrays"},
    "tinkex.wire.codec, tinkex.wire.proto": {
        *("numpy", "torch", "google.protobuf", "zstandard", "pydantic", "rich"),
    },
    "tinkex.engine.models.gguf.convert, tinkex.engine.models.pip_models": {
        *("torch", "transformers", "tokenizers", "huggingface_hub"),
    },
    "tinkex.engine.models.hub_download, tinkex.engine.models.model_folder": {
        *("torch", "transformers", "numpy"),
    },
}
#: What neither help nor completion may load.
HEAVY_FOR_HELP = {*HEAVY, *MIDDLING} - {"click"}


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """Return the modules that each import loads, in parallel processes."""
    probe = "import sys, json, {0}; print(json.dumps(sorted(sys.modules)))"
    started = {
        name: subprocess.Popen(
            [sys.executable, "-c", probe.format(name)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for name in (*MODULES, *FORBIDDEN)
    }
    modules = {}
    for name, process in started.items():
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors.decode()
        modules[name] = set(json.loads(output))
    return modules


def run_python(probe: str, **variables: str) -> str:
    """Run a program in a new process; whatever it writes to stderr is a failure."""
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, env=os.environ | variables
    )
    assert (done.returncode, done.stderr.strip()) == (0, "")
    return done.stdout


def test_chats_are_rendered_without_torch() -> None:
    probe = (
        "import sys; from tinkex.models import TINY_FOLDER; from tinkex.text import load_tokenizer;"
        "from tinkex.server.inference.chat_format import ChatFormat;"
        "from tinkex.server.inference.chat_request import ChatRequest;"
        "chat = ChatFormat('tiny', load_tokenizer(str(TINY_FOLDER)));"
        "chat.render(ChatRequest(model='tiny', messages=[{'role': 'user', 'content': 'a'}]));"
        "print('torch' in sys.modules)"
    )
    assert run_python(probe) == "False\n"


@pytest.mark.parametrize("module", MODULES)
def test_import_is_light(module: str, loaded: dict[str, set[str]]) -> None:
    assert module in loaded[module]
    assert loaded[module] & HEAVY == set()


def test_bare_package_import_is_minimal(loaded: dict[str, set[str]]) -> None:
    assert loaded["tinkex"] & MIDDLING == set()
    own_modules = {name for name in loaded["tinkex"] if name.startswith("tinkex.")}
    assert own_modules == set()


def test_types_and_endpoints_need_no_http_library(loaded: dict[str, set[str]]) -> None:
    for module in ("tinkex.types", "tinkex.wire.endpoints"):
        assert loaded[module] & {"pyqwest", "click", "asyncio"} == set()


def test_cli_start_up_does_not_import_the_client(
    loaded: dict[str, set[str]],
) -> None:
    assert loaded["tinkex.cli.main"] & {"pyqwest", "tinkex.client.service"} == set()


def test_client_is_imported_on_access(loaded: dict[str, set[str]]) -> None:
    assert {"pyqwest", "msgspec", "tinkex.client.http"} <= loaded["tinkex.client.service"]


@pytest.mark.parametrize("modules", FORBIDDEN)
def test_import_avoids_modules(modules: str, loaded: dict[str, set[str]]) -> None:
    assert loaded[modules] & FORBIDDEN[modules] == set()


def test_numpy_is_imported_with_the_first_tensor() -> None:
    probe = (
        "import sys; from tinkex.types import Datum, ModelInput; "
        "Datum(ModelInput.from_ints([1])); print('numpy' in sys.modules); "
        "Datum(ModelInput.from_ints([1]), {'weights': [1.0]}); print('numpy' in sys.modules)"
    )
    assert run_python(probe).split() == ["False", "True"]


def command_paths() -> Iterator[list[str]]:
    """Yield the path of every command."""
    waiting: list[tuple[list[str], click.Command]] = [([], main)]
    while waiting:
        words, command = waiting.pop()
        yield words
        if isinstance(command, click.Group):
            ctx = click.Context(command)
            for name in command.list_commands(ctx):
                child = command.get_command(ctx, name)
                assert child is not None
                waiting.append(([*words, name], child))


def test_help_avoids_heavy_imports() -> None:
    run_python(
        "import sys\n"
        "from tinkex.cli.main import run\n"
        f"for words in {list(command_paths())!r}:\n"
        "    assert run([*words, '--help']).exit_code == 0, words\n"
        f"    loaded = {HEAVY_FOR_HELP!r} & set(sys.modules)\n"
        "    assert not loaded, (words, loaded)\n"
    )


def complete(words: str, place: int) -> list[str]:
    """Return bash completions from a process that must not import heavy modules."""
    probe = (
        "import sys\n"
        "from tinkex.cli.main import main\n"
        "try:\n"
        "    main([])\n"
        "finally:\n"
        f"    loaded = {HEAVY_FOR_HELP!r} & set(sys.modules)\n"
        "    assert not loaded, loaded\n"
    )
    asked = {"_TINKEX_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(place)}
    return [line.partition(",")[2] for line in run_python(probe, **asked).splitlines()]


def test_completion_avoids_heavy_imports() -> None:
    assert {"session", "serve"} <= set(complete("tinkex se", 1))
    assert complete("tinkex session ", 2) == ["export-trace", "finish", "info", "list"]
    assert complete("tinkex --json session list --st", 4) == ["--status"]
    assert complete("tinkex session list --status act", 4) == ["active"]
    assert complete("tinkex completion z", 2) == ["zsh"]
    assert "--base-url" in complete("tinkex auth login --", 3)


def test_completing_a_command_does_not_import_siblings() -> None:
    run_python(
        "import sys, click\n"
        "from tinkex.cli.main import main\n"
        "found = main.shell_complete(click.Context(main), '')\n"
        "assert {'session', 'doctor'} <= {item.value for item in found}\n"
        "assert all(item.help for item in found)\n"
        "loaded = [name for name in sys.modules if name.startswith('tinkex.cli.commands.')]\n"
        "assert not loaded, loaded\n"
    )


def test_adding_a_model_folder_avoids_heavy_imports(tmp_path: Path) -> None:
    write_folder(tmp_path / "small")
    run_python(
        "import io, sys\n"
        "sys.stderr = io.StringIO()  # it names what it added\n"
        "from tinkex.cli.main import main\n"
        f"main(['model', 'add', {str(tmp_path / 'small')!r}], standalone_mode=False)\n"
        "main(['model', 'list', '--json'], standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'numpy', 'huggingface_hub', 'sqlalchemy', 'rich'}\n"
        "sys.exit(len(heavy & set(sys.modules)))\n",
        TINKEX_HOME=str(tmp_path / "home"),
        HF_HOME=str(tmp_path / "hub"),
    )


@pytest.mark.parametrize(
    "command", [["sample", "--prompt", say("yes")], ["sample", "--chat", "--prompt", "a"], ["chat"]]
)
def test_sampling_commands_need_neither_transformers_nor_torch(
    command: list[str], tmp_path: Path
) -> None:
    model = [SCRIPTED] if command[0] == "chat" else ["--base-model", SCRIPTED]
    with StubServer(models=[scripted_model()]) as server:
        run_python(
            "import io, sys\n"
            "stderr, sys.stderr, sys.stdin = sys.stderr, io.StringIO(), io.StringIO('hello\\n')\n"
            "from tinkex.cli.main import main\n"
            f"main({[*command, *model, '--max-tokens', '3']!r}, standalone_mode=False)\n"
            "sys.stderr = stderr\n"
            "heavy = {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)\n"
            "assert not heavy, heavy\n",
            TINKEX_HOME=str(tmp_path / "home"),
            TINKER_BASE_URL=server.url,
            TINKER_API_KEY="tml-light",
        )
