"""Run scenarios with the SDK of this environment; prints a line of JSON per scenario.

python -m tests.compat.scenarios '{"url": ..., "key": ...}' [NAME ...]
"""

from __future__ import annotations

import json
import logging
import sys
from functools import partial
from typing import Any

from tests.compat.scenario_run import outcome
from tests.compat.scenarios import command, errors, rest, sampling, training
from tests.compat.scenarios.context import SCENARIOS, Scenario, ScenarioContext

#: After so many hung scenarios the rest is not tried.
MAX_HANGS = 3
MODULES = (training, sampling, rest, errors, command)


def main(place: str, *names: str) -> None:
    """Run the scenarios of these names, or all, in the order of the table."""
    logging.disable(logging.CRITICAL)
    ctx = ScenarioContext(**json.loads(place))
    wanted = [SCENARIOS[name] for name in names] or [*SCENARIOS.values()]
    hangs = 0
    for each in sorted(wanted, key=turn):
        found = outcome(each.name, partial(each.run, ctx)) if hangs < MAX_HANGS else skipped(each)
        hangs += found["detail"].startswith("TimeoutError")
        print(json.dumps(found | {"group": each.group, "title": each.title}), flush=True)
    print("end of scenarios", flush=True)


def turn(scenario: Scenario) -> int:
    """Commands are forks: they precede all threads. A wrong key stops the first SDKs for good."""
    if scenario.group == command.COMMAND:
        return 0
    return 2 if scenario.name == errors.wrong_key.__name__ else 1


def skipped(scenario: Scenario) -> dict[str, Any]:
    """The outcome of a scenario that was not tried."""
    return {"name": scenario.name, "status": "fail", "detail": f"not run: {MAX_HANGS} others hung"}


if __name__ == "__main__":
    main(*sys.argv[1:])
