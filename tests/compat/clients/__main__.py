"""Run the scenarios of one client in its environment; prints a line of JSON per scenario.

python -m tests.compat.clients openai '{"url": ..., "key": ...}' [NAME ...]
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from functools import partial

from tests.compat.clients.registry import SCENARIOS, Place
from tests.compat.scenario_run import outcome

#: Evaluations import large libraries.
TIMEOUT_SECONDS = 120


def main(client: str, place: str, *names: str) -> None:
    """Run the scenarios of these names, or all."""
    logging.disable(logging.CRITICAL)
    importlib.import_module(f"tests.compat.clients.{client.replace('-', '_')}_client")
    server = Place(**json.loads(place))
    for each in [SCENARIOS[name] for name in names] or [*SCENARIOS.values()]:
        found = outcome(each.name, partial(each.run, server), TIMEOUT_SECONDS)
        # A client may have printed a line without its end.
        print("\n" + json.dumps(found | {"group": client, "title": each.title}), flush=True)
    print("end of scenarios", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
