"""`tinkex version`: print version, commit and library versions."""

from __future__ import annotations

import re
from pathlib import Path

import click

from tinkex.cli.context import Context, pass_context
from tinkex.cli.options import Command
from tinkex.cli.output import PropertiesOutput, show
from tinkex.settings import find_dist_info, package_version

_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
#: Extras for the development of tinkex itself.
_DEVELOPER_EXTRAS = re.compile(r"""extra == ["'](?:dev|docs)["']""")
_SHORT_COMMIT_CHARS = 12


@click.command(cls=Command)
@click.option("--deps", is_flag=True, help="Also list the required libraries.")
@pass_context
def version(context: Context, deps: bool) -> None:
    """Print the version of tinkex."""
    commit = find_commit(Path(__file__).resolve().parents[2]) or installed_commit()
    libraries = dependencies() if deps else []
    if context.is_json:
        rows = [{"name": name, "version": number} for name, number in libraries]
        data = {"version": package_version(), "commit": commit}
        show(context, PropertiesOutput({**data, "deps": rows} if deps else data))
        return
    click.echo(
        f"tinkex {package_version()}" + (f" ({commit[:_SHORT_COMMIT_CHARS]})" if commit else "")
    )
    for name, number in libraries:
        click.echo(f"{name} - {number or 'not installed'}")


def find_commit(package: Path) -> str | None:
    """Return the commit of the git work tree whose src/ contains the package.

    Reads git's files directly: git may not be installed, and starting it is slow.
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
        commit = (
            _resolve_ref(head.removeprefix("ref: "), common) if head.startswith("ref: ") else head
        )
    except (OSError, UnicodeDecodeError):
        return None
    return commit if commit and _COMMIT.fullmatch(commit) else None


def _resolve_ref(ref: str, git: Path) -> str | None:
    """Return the commit of a ref, loose or packed."""
    if (git / ref).is_file():
        return (git / ref).read_text().strip()
    packed = git / "packed-refs"
    lines = packed.read_text().splitlines() if packed.is_file() else []
    return next((line.partition(" ")[0] for line in lines if line.endswith(f" {ref}")), None)


def installed_commit() -> str | None:
    """Return the commit recorded by the installer, if it installed from a repository."""
    import json

    records = find_dist_info()
    try:
        record = json.loads((records / "direct_url.json").read_text()) if records else {}
    except (OSError, ValueError):
        return None
    commit = record.get("vcs_info", {}).get("commit_id")
    return commit if isinstance(commit, str) else None


def dependencies() -> list[tuple[str, str | None]]:
    """Return the required libraries and the installed optional ones, with versions."""
    from importlib.metadata import PackageNotFoundError, requires
    from importlib.metadata import version as version_of

    versions: dict[str, str | None] = {}
    for line in requires("tinkex") or ():
        name = _REQUIREMENT.match(line)
        if name is None or name[0] == "tinkex" or _DEVELOPER_EXTRAS.search(line):
            continue
        try:
            versions[name[0]] = version_of(name[0])
        except PackageNotFoundError:
            if "extra ==" not in line:
                versions[name[0]] = None
    return sorted(versions.items())
