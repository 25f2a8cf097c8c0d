"""All checks, in the order in which they are told."""

from __future__ import annotations

from tinkex.cli.commands.doctor import machine, remote
from tinkex.cli.commands.doctor.findings import CHECK_SECONDS, Check, Finding

_LATE = f"took longer than {CHECK_SECONDS:g} seconds"
_SLOW = Finding("warn", _LATE, "Run it again when the machine is less busy.")
_STUCK = Finding("fail", _LATE, "Is the disk of the home, or a network drive, stuck?")
_SILENT = Finding(
    "fail",
    f"no answer within {CHECK_SECONDS:g} seconds",
    "Is the server running? `tinkex serve` starts one on this machine; --base-url names another.",
)
CHECKS = (
    Check("version", machine.check_python, _SLOW),
    Check("home", machine.check_home, _STUCK),
    Check("key", remote.check_key, _STUCK),
    Check("server", remote.check_server, _SILENT),
    Check("clock", remote.check_clock, Finding("warn", "not compared: no answer from the server")),
    Check("local server", machine.check_server_libraries, _SLOW),
    Check("torch", machine.check_torch, _SLOW),
    Check("kernels", machine.check_kernels, _SLOW),
    Check("transformers", machine.check_transformers, _SLOW),
)
