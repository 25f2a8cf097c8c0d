"""Imports stay light: which modules an import may load, checked in a new process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {
    "aiohttp",
    "httpx",
    "litestar",
    "numpy",
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
    "tinkex.cli.main",
)


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
        for name in MODULES
    }
    modules = {}
    for name, process in started.items():
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors.decode()
        modules[name] = set(json.loads(output))
    return modules


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
