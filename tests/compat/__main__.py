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

from tests.compat.environments import ROOT, CannotInstall, python_of
from tests.compat.page import by_name, page
from tests.compat.results import ABSENT, DEFECT, FAIL, Outcome, keep, kept
from tests.compat.sdks import run_scenarios
from tests.compat.servers import Servers, serving
from tests.compat.versions import SDKS, defect_of

PAGE = ROOT / "docs" / "compatibility.md"


def main() -> int:
    """Run what was asked for; the status is 1 if any cell failed."""
    # A run that is terminated stops its servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = parsed()
    versions = options.versions.split() or [*SDKS]
    unknown = [each for each in versions if each not in SDKS]
    if unknown:
        print(f"unknown versions {unknown}; the matrix has {', '.join(SDKS)}", file=sys.stderr)
        return 2
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="tinkex-compat-") as home, serving(Path(home)) as all_:
        for version in versions:
            if options.resume and kept(version):
                print(f"tinker {version}: kept from the last run")
            else:
                outcomes += run_version(version, all_, options.scenarios.split())
    failed = [each for each in outcomes if each.status == FAIL]
    print(f"{len(outcomes)} cells, {len(failed)} failed")
    write_page()
    return 1 if failed else 0


def write_page() -> None:
    """Write the page from the results of this run and of those before it."""
    missing = [version for version in SDKS if not kept(version)]
    if missing:
        print(f"{PAGE.name} is not written: no results yet for {', '.join(missing)}")
        return
    columns = {version: by_name(kept(version)) for version in SDKS}
    PAGE.write_text(page(columns, SDKS))
    print(f"wrote docs/{PAGE.name}")


def parsed() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.compat", description=__doc__)
    parser.add_argument("--versions", default="", help="Only these versions of the SDK.")
    parser.add_argument("--scenarios", default="", help="Only these scenarios.")
    parser.add_argument("--resume", action="store_true", help="Skip versions that have results.")
    return parser.parse_args()


def run_version(version: str, servers: Servers, names: list[str]) -> list[Outcome]:
    """All scenarios with one version, printed as they end."""

    def report(outcome: Outcome) -> None:
        if outcome.status != ABSENT:
            told = f" ({outcome.detail})" if outcome.detail else ""
            print(f"tinker {version}: {outcome.name} {outcome.status}{told}", flush=True)

    try:
        python = python_of(f"tinker-{version}", [f"tinker=={version}"])
    except CannotInstall as error:
        found = [Outcome("install", FAIL, str(error))]
        report(found[0])
    else:
        place = servers.place(f"sdk-{version}")
        found = [judged(version, each) for each in run_scenarios(python, place, names, report)]
    keep(version, found, is_part=bool(names))
    return found


def judged(version: str, outcome: Outcome) -> Outcome:
    """The outcome, with a failure whose cause is the SDK marked as such."""
    reason = defect_of(version, outcome.name)
    if outcome.status == FAIL and reason:
        return replace(outcome, status=DEFECT, detail=reason)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
