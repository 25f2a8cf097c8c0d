"""The suggested install command fits the installation."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest

from tinkex import installation
from tinkex.installation import EXTRA_PACKAGES, install_command, missing_libraries

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "tinkex"


class Copy:
    """A simulated installation of tinkex in its own directory."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self._monkeypatch = root, monkeypatch
        self.records = root / "tinkex-0.1.0.dist-info"
        self.records.mkdir(parents=True)
        (root / "bin").mkdir()
        monkeypatch.setattr(sys, "prefix", str(root))
        monkeypatch.setattr(sys, "executable", str(root / "bin" / "python"))
        monkeypatch.setattr(installation, "find_dist_info", lambda: self.records)
        monkeypatch.setattr(installation.shutil, "which", lambda name: f"/usr/bin/{name}")

    def come_from(self, url: str, *, editable: bool = False) -> None:
        """Write the source of the installation, like an installer."""
        kind = {"dir_info": {"editable": True}} if editable else {"archive_info": {}}
        (self.records / "direct_url.json").write_text(json.dumps({"url": url, **kind}))

    def activate(self) -> None:
        """Put its programs first in the search path."""
        which = lambda name: str(self.root / "bin" / name)  # noqa: E731
        self._monkeypatch.setattr(installation.shutil, "which", which)


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Copy:
    return Copy(tmp_path / "venv", monkeypatch)


def test_active_environment_uses_its_pip(copy: Copy) -> None:
    copy.activate()
    assert install_command("server", "torch") == "pip install 'tinkex[server,torch]'"
    assert install_command() == "pip install 'tinkex'"


def test_other_environment_uses_the_full_path(copy: Copy) -> None:
    python = copy.root / "bin" / "python"
    assert install_command("text") == f"{python} -m pip install 'tinkex[text]'"


def test_wheel_source_is_not_repeated(copy: Copy) -> None:
    copy.come_from("file:///tmp/gone.whl")
    copy.activate()
    assert install_command("text") == "pip install 'tinkex[text]'"


def test_checkout_stays_editable(copy: Copy) -> None:
    copy.come_from("file:///home/ada/my%20work/tinkex", editable=True)
    copy.activate()
    assert install_command("plot") == "pip install -e '/home/ada/my work/tinkex[plot]'"


def test_environment_without_pip_uses_uv(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    python = copy.root / "bin" / "python"
    assert install_command("text") == f"uv pip install --python {python} 'tinkex[text]'"


def test_pipx_installation_uses_runpip(copy: Copy) -> None:
    (copy.root / "pipx_metadata.json").touch()
    assert install_command("server", "torch") == "pipx runpip venv install 'tinkex[server,torch]'"


def test_uv_tool_is_reinstalled_from_its_source(copy: Copy) -> None:
    (copy.root / "uv-receipt.toml").touch()
    assert install_command("text") == "uv tool install --force 'tinkex[text]'"
    copy.come_from("file:///tmp/tinkex.whl")
    command = install_command("text")
    assert command == "uv tool install --force 'tinkex[text] @ file:///tmp/tinkex.whl'"


@pytest.mark.parametrize("content", ["", "[]", "{", '{"url": 1, "dir_info": {"editable": true}}'])
def test_damaged_records_mean_the_package_index(copy: Copy, content: str) -> None:
    (copy.records / "direct_url.json").write_text(content)
    copy.activate()
    assert install_command("text") == "pip install 'tinkex[text]'"


def test_missing_modules_are_named_as_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_libraries("server", "torch") == []
    for module in ("prometheus_client", "torch"):
        monkeypatch.setitem(sys.modules, module, None)
    assert missing_libraries("server") == ["prometheus-client"]
    assert missing_libraries("server", "torch") == ["prometheus-client", "torch"]


@pytest.mark.parametrize("extra", EXTRA_PACKAGES)
def test_packages_match_the_extras(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {line.partition(">")[0] for line in project["optional-dependencies"][extra]}
    assert set(EXTRA_PACKAGES[extra].values()) <= named


def test_only_installation_builds_install_commands() -> None:
    writers = [
        path.relative_to(SOURCES).as_posix()
        for path in SOURCES.rglob("*.py")
        if "pip install" in path.read_text("utf-8")
    ]
    assert writers == ["installation.py"]


def test_the_package_installs_the_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["scripts"]["tinkex"] == "tinkex.cli.main:main"
