"""Run the scenarios with one version of the SDK, each in its own environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.compat.environments import ROOT
from tests.compat.results import FAIL, PASS, Outcome
from tests.support.real_server import clean_environment

#: A process that ends later than this after its last scenario has hung.
EXIT_SECONDS = 30
#: How Python runs the scenarios.
MODULE = ("-m", "tests.compat.scenarios")
#: The line after the last outcome.
END = "end of scenarios"
EXIT: dict[str, str] = {
    "name": "exit",
    "group": "Service and sessions",
    "title": "the process ends by itself",
}


def run_scenarios(
    python: Path,
    place: Mapping[str, str],
    names: Sequence[str] = (),
    report: Callable[[Outcome], None] = lambda outcome: None,
    *,
    path: Sequence[Path] = (),
    front: Sequence[str] = (),
    module: Sequence[str] = MODULE,
) -> list[Outcome]:
    """Run scenarios; the last outcome says whether the process ended by itself.

    `path` precedes the environment's own packages; `front` stands before the module to run, which
    `module` names with its first arguments.
    """
    command = [str(python), *front, *module, json.dumps(dict(place)), *names]
    variables = clean_environment(
        PYTHONPATH=os.pathsep.join(map(str, (*path, ROOT))), PYTHONWARNINGS="ignore"
    )
    found: list[Outcome] = []
    with subprocess.Popen(
        command, env=variables, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=sys.stderr
    ) as process:
        assert process.stdout is not None
        # The end of the list, not of the file: a process that hangs at its exit keeps that open.
        for line in iter(process.stdout.readline, ""):
            if line.strip() == END:
                break
            if line.startswith("{"):
                found.append(Outcome(**json.loads(line)))
                report(found[-1])
        found.append(ending(process))
        report(found[-1])
    return found


def ending(process: subprocess.Popen[str]) -> Outcome:
    """Whether the process of the SDK ended by itself, with status 0."""
    try:
        status = process.wait(EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        told = f"still running {EXIT_SECONDS} s after the last scenario"
        return Outcome(**EXIT, status=FAIL, detail=told)
    if status:
        return Outcome(**EXIT, status=FAIL, detail=f"exit status {status}")
    return Outcome(**EXIT, status=PASS)
