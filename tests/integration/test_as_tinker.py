"""tinkex in the place of `tinker`: what scripts import, run and look up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, importlib.metadata
import tinker
import tinker.types as types
from tinker import types as same_types
from tinker.types.tensor_data import TensorData
from tinker.types import model_input
from tinker.lib.public_interfaces import APIFuture
from tinker.lib.public_interfaces.rest_client import RestClient
from tinker.lib.internal_client_holder import InternalClientHolderThreadSingleton
from tinker._exceptions import NotFoundError
import tinkex

assert __name__ == "__main__" and types is same_types
assert tinker.ServiceClient is tinkex.ServiceClient and RestClient is tinkex.RestClient
assert TensorData is tinkex.TensorData is types.TensorData is tinker.types.tensor_data.TensorData
assert model_input.ModelInput is tinkex.ModelInput and APIFuture is tinkex.APIFuture
assert NotFoundError is tinker.NotFoundError is tinkex.NotFoundError
assert importlib.metadata.version("tinker") == tinker.__version__ == "0.36.0"
assert importlib.metadata.version("msgspec")
namespace = {}
exec("from tinker import *", namespace)
assert namespace["Datum"] is tinkex.Datum
for missing in ("tinker.no_such", "tinker.types.no_such", "tinker.lib.no_such.deep"):
    try:
        __import__(missing)
    except ModuleNotFoundError as error:
        assert "tinker." in str(error), error
    else:
        raise AssertionError(missing)
tinkex.install_as_tinker()
assert InternalClientHolderThreadSingleton().get_loop() is not None
print(sys.argv[1:], "torch" in sys.modules)
"""


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def test_a_script_runs_with_tinkex(folder: Path) -> None:
    done = run("-m", "tinkex.as_tinker", "script.py", "--flag", "x", cwd=folder)
    assert (done.stdout, done.stderr) == ("['--flag', 'x'] False\n", "")


def test_a_module_runs_with_tinkex(folder: Path) -> None:
    done = run("-m", "tinkex.as_tinker", "-m", "script", "x", cwd=folder)
    assert (done.stdout, done.stderr) == ("['x'] False\n", "")


@pytest.mark.parametrize("arguments", [(), ("-m",), ("--help",), ("missing.py",)])
def test_a_wrong_call_gets_the_usage(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = run("-m", "tinkex.as_tinker", *arguments, cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith("usage: python -m tinkex.as_tinker")
    assert "missing.py" not in arguments or "script not found: 'missing.py'" in done.stderr


def test_it_refuses_to_replace_a_package_that_is_imported(tmp_path: Path) -> None:
    (tmp_path / "tinker.py").write_text("")
    code = "import tinker, tinkex; tinkex.install_as_tinker()"
    done = run("-c", code, cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == (
        "ImportError: the official package `tinker` is already imported; "
        "call install_as_tinker() first"
    )


def test_the_paths_cost_nothing_before_they_are_used(tmp_path: Path) -> None:
    code = (
        "import sys, tinkex; print([name for name in sys.modules if name.startswith('tinkex.')]);"
        "import tinkex.lib.public_interfaces, tinkex.types.tensor_data;"
        "print({'tinkex.client.service', 'numpy', 'msgspec'} & set(sys.modules))"
    )
    assert run("-c", code, cwd=tmp_path).stdout == "[]\nset()\n"


def test_a_path_that_does_not_exist_is_a_plain_import_error() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"tinkex\.types\.no_such"):
        __import__("tinkex.types.no_such")
    with pytest.raises(ImportError, match="cannot import name 'Nonsense'"):
        exec("from tinkex.types.tensor_data import Nonsense")
