"""`tinkex version`: version, commit and libraries."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version as version_of
from pathlib import Path

import pytest

from tinkex.cli.commands.version import dependencies, find_commit, installed_commit
from tinkex.cli.main import run
from tinkex.settings import find_dist_info, package_version

COMMIT = "6d235bdc4163beea0030a28e886f68d78ec86497"


def run_version(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(list(words)).exit_code == 0
    return capsys.readouterr().out


def test_the_version_is_that_of_the_installed_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert package_version() == version_of("tinkex")
    records = find_dist_info()
    assert records is not None
    assert records.is_dir()
    found = json.loads(run_version(capsys, "version", "--json"))
    assert found["version"] == version_of("tinkex")
    text = f"tinkex {found['version']}"
    commit = f" ({found['commit'][:12]})" if found["commit"] else ""
    assert run_version(capsys, "version") == f"{text}{commit}\n"


@pytest.mark.parametrize("flags", [[], ["--json"], ["-f", "json"], ["--deps"]])
def test_version_flag_equals_command(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_version(capsys, "--version", *flags) == run_version(capsys, "version", *flags)
    assert run_version(capsys, *flags[:0], "--version") == run_version(capsys, "version")


def test_deps_are_listed_only_with_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert "deps" not in json.loads(run_version(capsys, "version", "--json"))
    deps = json.loads(run_version(capsys, "version", "--json", "--deps"))["deps"]
    assert {"name": "click", "version": version_of("click")} in deps
    assert "ruff" not in {row["name"] for row in deps}
    lines = run_version(capsys, "version", "--deps").splitlines()[1:]
    assert lines == [f"{name} - {number}" for name, number in dependencies()]


# --- commits ----------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package in src/ of a git work tree."""
    folder = tmp_path / "src" / "tinkex"
    folder.mkdir(parents=True)
    return folder


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_commit_of_loose_packed_and_detached_head(package: Path, tmp_path: Path) -> None:
    git = tmp_path / ".git"
    assert find_commit(package) is None
    write(git / "HEAD", "ref: refs/heads/main\n")
    assert find_commit(package) is None
    write(git / "packed-refs", f"# packed\n{COMMIT} refs/heads/main\n")
    assert find_commit(package) == COMMIT
    write(git / "refs/heads/main", COMMIT[::-1] + "\n")
    assert find_commit(package) == COMMIT[::-1]
    write(git / "HEAD", COMMIT)
    assert find_commit(package) == COMMIT


def test_commit_of_linked_worktree(package: Path, tmp_path: Path) -> None:
    own = tmp_path / "elsewhere" / ".git" / "worktrees" / "two"
    write(tmp_path / ".git", f"gitdir: {own}\n")
    write(own / "HEAD", "ref: refs/heads/two\n")
    write(own / "commondir", "../..\n")
    write(tmp_path / "elsewhere/.git/refs/heads/two", COMMIT)
    assert find_commit(package) == COMMIT


def test_invalid_head_has_no_commit(package: Path, tmp_path: Path) -> None:
    write(tmp_path / ".git" / "HEAD", "not a commit")
    assert find_commit(package) is None


def test_installed_package_ignores_surrounding_repository(tmp_path: Path) -> None:
    package = tmp_path / "venv" / "site-packages" / "tinkex"
    package.mkdir(parents=True)
    write(tmp_path / ".git" / "HEAD", COMMIT)
    write(tmp_path / "venv" / ".git" / "HEAD", COMMIT)
    assert find_commit(package) is None


def test_current_directory_repository_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = run_version(capsys, "version")
    write(tmp_path / ".git" / "HEAD", COMMIT[::-1])
    monkeypatch.chdir(tmp_path)
    assert run_version(capsys, "version") == before


def test_commit_from_installer_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = tmp_path / "tinkex-9.dist-info"
    write(records / "direct_url.json", json.dumps({"vcs_info": {"commit_id": COMMIT}}))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert installed_commit() == COMMIT
    for text in ("{}", "garbage"):
        write(records / "direct_url.json", text)
        assert installed_commit() is None
