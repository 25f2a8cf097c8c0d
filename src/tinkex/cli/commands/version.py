"""`tinkex version`: which version, of which commit, with which libraries."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from tinkex.cli.context import Context, pass_context
from tinkex.cli.options import Command
from tinkex.cli.output import PropertiesOutput, show
from tinkex.settings import find_dist_info, package_version

_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
#: Extras that only those need who work on tinkex itself.
_DEVELOPER_EXTRAS = re.compile(r"""extra == ["'](?:dev|docs)["']""")
_SHORT_COMMIT_CHARS = 12


@click.command(cls=Command)
@click.option("--deps", is_flag=True, help="Also list the libraries it needs.")
@pass_context
def version(context: Context, deps: bool) -> None:
    """Print the version of tinkex."""
    commit = find_commit(Path(__file__).resolve().parents[2]) or installed_commit()
    found: dict[str, Any] = {"version": package_version(), "commit": commit}
    if deps:
        found["deps"] = [{"name": name, "version": number} for name, number in dependencies()]
    if context.is_json:
        show(context, PropertiesOutput(found))
        return
    click.echo(
        f"tinkex {found['version']}" + (f" ({commit[:_SHORT_COMMIT_CHARS]})" if commit else "")
    )
    for row in found.get("deps", ()):
        click.echo(f"{row['name']} - {row['version'] or 'not installed'}")


def find_commit(package: Path) -> str | None:
    """The commit of the work tree whose src/ holds the package; whose the shell is in is no matter.

    Git's own files are read: the program may be absent, and it would take longer than all the rest.
    """
    git = package.parents[1] / ".git"
    if package.parent.name != "src" or not git.exists():
        return None
    try:
        if git.is_file():
            git = (git.parent / git.read_text().partition("gitdir:")[2].strip()).resolve()
        shared = git / "commondir"
        common = (git / shared.read_text().strip()).resolve() if shared.exists() else git
        head = (git / "HEAD").read_text().strip()
        found = (
            _resolve_ref(head.removeprefix("ref: "), common) if head.startswith("ref: ") else head
        )
    except (OSError, UnicodeDecodeError):
        return None
    return found if found and _COMMIT.fullmatch(found) else None


def _resolve_ref(ref: str, git: Path) -> str | None:
    """What a branch points to, whether git has packed it or not."""
    if (git / ref).is_file():
        return (git / ref).read_text().strip()
    packed = git / "packed-refs"
    lines = packed.read_text().splitlines() if packed.is_file() else []
    return next((line.partition(" ")[0] for line in lines if line.endswith(f" {ref}")), None)


def installed_commit() -> str | None:
    """The commit that the installer wrote down, if it installed from a repository."""
    import json

    records = find_dist_info()
    try:
        said = json.loads((records / "direct_url.json").read_text()) if records else {}
    except (OSError, ValueError):
        return None
    commit = said.get("vcs_info", {}).get("commit_id")
    return commit if isinstance(commit, str) else None


def dependencies() -> list[tuple[str, str | None]]:
    """The libraries that are needed, and those of extras that are there, with their versions."""
    from importlib.metadata import PackageNotFoundError, requires
    from importlib.metadata import version as version_of

    found: dict[str, str | None] = {}
    for line in requires("tinkex") or ():
        name = _REQUIREMENT.match(line)
        if name is None or name[0] == "tinkex" or _DEVELOPER_EXTRAS.search(line):
            continue
        try:
            found[name[0]] = version_of(name[0])
        except PackageNotFoundError:
            if "extra ==" not in line:
                found[name[0]] = None
    return sorted(found.items())
