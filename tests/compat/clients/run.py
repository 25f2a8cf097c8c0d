"""Run the scenarios of one client in its environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.compat.clients.registry import Place
from tests.compat.results import Outcome
from tests.compat.sdks import run_scenarios


def run_client(
    client: str,
    python: Path,
    place: Place,
    names: Sequence[str] = (),
    report: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """All scenarios of a client, or those of these names."""
    module = ("-m", "tests.compat.clients", client)
    return run_scenarios(python, asdict(place), names, report, module=module)
