"""Which versions the matrix has, and why these."""

from __future__ import annotations

#: Versions of the official SDK: about every third release that changed what goes over the wire.
SDKS = (
    "0.3.0",
    "0.6.3",
    "0.8.1",
    "0.12.0",
    "0.16.1",
    "0.18.2",
    "0.22.7",
    "0.25.0",
    "0.28.1",
    "0.30.4",
    "0.33.1",
    "0.36.0",
)
#: tinkex itself, imported under the name of the official package.
OWN = "tinkex"
COOKBOOK = "0.5.8"
#: The SDK that the cookbook runs with.
COOKBOOK_SDK = "0.36.0"

#: Scenario: versions whose own code fails in it, and why.
DEFECTS = {
    "exit": (
        ("0.3.0",),
        "once a client with a wrong key was created, the process does not end by itself",
    ),
    "cli_delete": (
        ("0.16.1", "0.18.2"),
        "the command calls `list(...)`, which in its module is the command `checkpoint list`",
    ),
}


def defect_of(version: str, scenario: str) -> str:
    """Why the SDK itself fails in a scenario; empty if it does not."""
    versions, reason = DEFECTS.get(scenario, ((), ""))
    return reason if version in versions else ""
