"""Run the compatibility matrix and write docs/compatibility.md.

python -m tests.compat [--versions "0.12.0 0.36.0"] [--only sdks|cookbook] [--resume]
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.compat.cookbook.page import cookbook_section
from tests.compat.cookbook.recipes import RECIPES
from tests.compat.cookbook.runner import Cookbook
from tests.compat.cookbook.workspace import prepare
from tests.compat.environments import ROOT, CannotInstall, python_of
from tests.compat.page import by_name, page, with_section
from tests.compat.results import ABSENT, DEFECT, FAIL, Outcome, keep, kept
from tests.compat.sdks import run_scenarios
from tests.compat.servers import Servers, serving
from tests.compat.versions import COOKBOOK, COOKBOOK_SDK, OWN, SDKS, defect_of

PAGE = ROOT / "docs" / "compatibility.md"
COLUMNS = (*SDKS, OWN)
#: The cookbook with the official SDK, and with tinkex in its place.
COOKBOOK_COLUMNS = {f"cookbook-{COOKBOOK}": False, f"cookbook-{COOKBOOK}-{OWN}": True}
COOKBOOK_REQUIREMENTS = (f"tinker=={COOKBOOK_SDK}", f"tinker-cookbook[math-rl]=={COOKBOOK}")
#: How Python runs a module with tinkex in the place of the official SDK.
IN_PLACE = ("-m", "tinkex.as_tinker")


def main() -> int:
    """Run what was asked for; the status is 1 if any cell failed."""
    # A run that is terminated stops its servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = parsed()
    versions = options.versions.split() or [*COLUMNS]
    unknown = [each for each in versions if each not in COLUMNS]
    if unknown:
        print(f"unknown versions {unknown}; the matrix has {', '.join(COLUMNS)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="tinkex-compat-") as home, serving(Path(home)) as both:
        outcomes = run_all(options, versions, both, Path(home))
    failed = [each for each in outcomes if each.status == FAIL]
    print(f"{len(outcomes)} cells, {len(failed)} failed")
    write_page()
    return 1 if failed else 0


def parsed() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.compat", description=__doc__)
    parser.add_argument("--versions", default="", help="Only these versions of the SDK.")
    parser.add_argument("--scenarios", default="", help="Only these scenarios or recipes.")
    parser.add_argument("--only", default="", choices=["", "sdks", "cookbook"])
    parser.add_argument("--resume", action="store_true", help="Skip columns that have results.")
    return parser.parse_args()


def run_all(
    options: argparse.Namespace, versions: list[str], servers: Servers, home: Path
) -> list[Outcome]:
    """The columns that were asked for, one after the other."""
    found: list[Outcome] = []
    names = options.scenarios.split()
    for version in versions if options.only != "cookbook" else ():
        if options.resume and kept(version):
            print(f"tinker {version}: kept from the last run")
        else:
            found += run_version(version, servers, names)
    # A part of the versions is a part of the SDKs: the cookbook runs with one of them.
    wants_cookbook = options.only == "cookbook" or not (options.only or options.versions)
    for column, is_own in COOKBOOK_COLUMNS.items() if wants_cookbook else ():
        if options.resume and kept(column):
            print(f"{column}: kept from the last run")
        else:
            found += run_cookbook(column, servers, home / column, names, is_own=is_own)
    return found


def show(column: str, outcome: Outcome) -> None:
    """Print one cell."""
    if outcome.status != ABSENT:
        told = f" ({' '.join(outcome.detail.split())})" if outcome.detail else ""
        print(f"{column}: {outcome.name} {outcome.status}{told}", flush=True)


def run_version(version: str, servers: Servers, names: list[str]) -> list[Outcome]:
    """All scenarios with one version, printed as they end."""
    told = servers.place(f"sdk-{version}")

    def report(outcome: Outcome) -> None:
        show(version, judged(version, outcome))

    try:
        if version == OWN:
            own = {"path": [ROOT / "src"], "front": IN_PLACE}
            found = run_scenarios(Path(sys.executable), told, names, report, **own)
        else:
            python = python_of(f"tinker-{version}", [f"tinker=={version}"])
            found = run_scenarios(python, told, names, report)
    except CannotInstall as error:
        found = [Outcome("install", FAIL, str(error), title="installation")]
    found = [judged(version, each) for each in found]
    keep(version, found, is_part=bool(names))
    return found


def judged(version: str, outcome: Outcome) -> Outcome:
    """The outcome, with a failure whose cause is the SDK marked as such."""
    reason = defect_of(version, outcome.name)
    if outcome.status == FAIL and reason:
        return replace(outcome, status=DEFECT, detail=reason)
    return outcome


def run_cookbook(
    column: str, servers: Servers, folder: Path, names: list[str], *, is_own: bool
) -> list[Outcome]:
    """The recipes of the cookbook; those that start from others' weights need the first one."""
    try:
        python = python_of(f"cookbook-{COOKBOOK}", COOKBOOK_REQUIREMENTS)
    except CannotInstall as error:
        found = [Outcome("install", FAIL, str(error), title="installation")]
        show(column, found[0])
        return found
    folder.mkdir()
    prepare(folder, servers.models)
    key = servers.plain.new_key(column)
    lessons = {start.recipe for each in RECIPES for start in each.starts.values()}
    chosen = [each for each in RECIPES if not names or each.name in {*lessons, *names}]
    front, path = (IN_PLACE, str(ROOT / "src")) if is_own else ((), "")
    cookbook = Cookbook(python, folder, servers.plain, key, front, path)
    found = cookbook.run(chosen, lambda each: show(column, each))
    keep(column, found, is_part=bool(names))
    return found


def write_page() -> None:
    """Write the page from the results of this run and of those before it.

    Without results of all SDKs, only the part about the cookbook is new.
    """
    missing = [column for column in (*COLUMNS, *COOKBOOK_COLUMNS) if not kept(column)]
    if any(column in COOKBOOK_COLUMNS for column in missing):
        print(f"{PAGE.name} is not written: no results yet for {', '.join(missing)}")
        return
    columns = {version: by_name(kept(version)) for version in COLUMNS}
    titles = (f"tinker {COOKBOOK_SDK}", OWN)
    recipes = {
        title: by_name(kept(column)) for title, column in zip(titles, COOKBOOK_COLUMNS, strict=True)
    }
    section = cookbook_section(recipes)
    PAGE.write_text(with_section(PAGE.read_text(), section) if missing else page(columns, section))
    print(f"wrote docs/{PAGE.name}" + (": the part about the cookbook" if missing else ""))


if __name__ == "__main__":
    sys.exit(main())
