"""Run scenarios with the SDK of this environment; prints a line of JSON per scenario.

python -m tests.compat.scenarios '{"url": ..., "key": ...}' [NAME ...]
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from typing import Any

from tests.compat.scenarios import command, errors, rest, sampling, training
from tests.compat.scenarios.context import SCENARIOS, Absent, Scenario, ScenarioContext

#: No scenario takes this long; one that does has hung.
TIMEOUT_SECONDS = 30
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
        found = outcome(each, ctx) if hangs < MAX_HANGS else skipped(each)
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


def outcome(scenario: Scenario, ctx: ScenarioContext) -> dict[str, Any]:
    """Run one scenario; any error is part of the result."""
    began = time.monotonic()
    status, detail = "pass", ""
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(TIMEOUT_SECONDS)
    try:
        scenario.run(ctx)
    except Absent as absent:
        status, detail = "absent", str(absent)
    except Exception as error:  # noqa: BLE001 - whatever went wrong is the result
        status, detail = "fail", f"{type(error).__name__}: {error}"[:1000]
    finally:
        signal.alarm(0)
    seconds = round(time.monotonic() - began, 2)
    return {"name": scenario.name, "status": status, "detail": detail, "seconds": seconds}


def give_up(number: int, frame: Any) -> None:
    """Turn a hang into a failure."""
    raise TimeoutError(f"no answer within {TIMEOUT_SECONDS} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
