"""docs/compatibility.md, written from the outcomes of the matrix and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from tests.compat.results import ABSENT, DEFECT, FAIL, PASS, Outcome

MARKS = {PASS: "yes", FAIL: "**no**", ABSENT: "", DEFECT: "SDK"}
#: What differs between two runs: ids, ports, folders.
_VOLATILE = (
    (re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"), "ID"),
    (re.compile(r"127\.0\.0\.1:\d+"), "127.0.0.1:PORT"),
    (re.compile(r"/tmp/\S+"), "FOLDER"),
)
#: Characters of an error that the page quotes.
_QUOTE = 300
#: New scenarios that the summary names for each version.
_NEW = 4
Column = Mapping[str, Outcome]


def table(
    rows: Iterable[tuple[str, str]], columns: Mapping[str, Column], first: str = ""
) -> list[str]:
    """A table of outcomes: rows are names with titles, columns are versions."""
    lines = [f"| {first} | {' | '.join(columns)} |", "|---|" + ":-:|" * len(columns)]
    for name, title in rows:
        cells = [mark(column.get(name)) for column in columns.values()]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return [*lines, ""]


def mark(outcome: Outcome | None) -> str:
    """What a cell shows; a question mark if it was never run."""
    return "?" if outcome is None else MARKS[outcome.status]


def reasons(status: str, rows: Mapping[str, str], columns: Mapping[str, Column]) -> list[str]:
    """Every outcome of a status with what went wrong, as a table; equal ones share a row."""
    seen: dict[tuple[str, str], list[str]] = {}
    for version, column in columns.items():
        for outcome in column.values():
            if outcome.status == status:
                key = rows.get(outcome.name, outcome.name), quoted(outcome.detail)
                seen.setdefault(key, []).append(version)
    if not seen:
        return ["None.", ""]
    lines = ["| scenario | with | what happens |", "|---|---|---|"]
    lines += [f"| {key[0]} | {', '.join(found)} | {key[1]} |" for key, found in seen.items()]
    return [*lines, ""]


def quoted(detail: str) -> str:
    """An error as the page shows it: one line, without what differs between two runs."""
    text = " ".join(detail.split())
    for pattern, name in _VOLATILE:
        text = pattern.sub(name, text)
    return text[:_QUOTE].replace("|", "\\|").replace("<", "&lt;")


def summary(columns: Mapping[str, Column]) -> list[str]:
    """One row per version: how much of what it has works, and what the one before does not have."""
    lines = ["| tinker | scenarios that it has | of these pass | new since the version above |"]
    lines.append("|---|---:|---:|---|")
    before: set[str] = set()
    for version, column in columns.items():
        run = [each for each in column.values() if each.status != ABSENT]
        judged = [each for each in run if each.status != DEFECT]
        passed = sum(each.status == PASS for each in judged)
        new = [each.title for each in run if each.name not in before] if before else []
        before = {each.name for each in run}
        lines.append(f"| {version} | {len(judged)} | {passed} | {shortened(new)} |")
    return [*lines, ""]


def shortened(titles: Sequence[str]) -> str:
    """The first titles, and how many more there are."""
    more = f", and {len(titles) - _NEW} more" if len(titles) > _NEW else ""
    return ", ".join(titles[:_NEW]) + more


def by_name(outcomes: Sequence[Outcome]) -> dict[str, Outcome]:
    """Outcomes by the name of their row."""
    return {each.name: each for each in outcomes}


GROUPS = (
    "Service and sessions",
    "Training",
    "Saved states",
    "Sampling",
    "REST client",
    "Usage and audit",
    "Errors",
    "Command line",
)
INTRO = """\
# Compatibility

<!-- Written by `make compat`; do not edit. -->

`make compat` installs every version of the official `tinker` SDK below in an environment of
its own and runs the same scenarios with each, against one real `tinkex serve` on loopback with
the built-in model `tinkex/tiny`. A scenario uses the public API of that version and nothing else.
This page is the result of the last run.

"yes": the scenario passes. "**no**": it fails, and [what happens](#what-fails) is listed below.
The column `tinkex` is tinkex itself, imported under the name `tinker`.

"SDK": the SDK [itself fails](#what-fails-in-the-sdk-itself), whatever the server answers. An empty
cell: this version does not have the feature.
`make compat VERSIONS="0.12.0 0.36.0"` runs a part of it.
"""


def page(columns: Mapping[str, Column], more: Sequence[str] = ()) -> str:
    """The whole page."""
    titles: dict[str, str] = {}
    for column in columns.values():
        titles |= {each.name: each.title or each.name for each in column.values()}
    lines = [INTRO, "## Versions", "", *summary(columns)]
    for group in GROUPS:
        rows = rows_of(group, columns)
        lines += [f"## {group}", "", *table(rows, columns, "scenario")]
    lines += ["## What fails", "", *reasons(FAIL, titles, columns)]
    lines += ["## What fails in the SDK itself", "", *reasons(DEFECT, titles, columns), *more]
    return "\n".join(lines).rstrip() + "\n"


def with_section(text: str, section: Sequence[str]) -> str:
    """The page with its last section replaced by a new one of the same heading."""
    new = "\n".join(section).rstrip() + "\n"
    heading = new.partition("\n")[0]
    before, found, _ = text.partition(f"{heading}\n")
    if not found:
        raise ValueError(f"the page has no section {heading!r}")
    return before + new


def rows_of(group: str, columns: Mapping[str, Column]) -> list[tuple[str, str]]:
    """The scenarios of a group, in the order in which they are defined."""
    found: dict[str, str] = {}
    for column in columns.values():
        found |= {each.name: each.title for each in column.values() if each.group == group}
    return [*found.items()]
