"""All checks, in the order in which they are told."""

from __future__ import annotations

from tinkex.cli.commands.doctor import machine, remote
from tinkex.cli.commands.doctor.findings import CHECK_SECONDS, Check, CheckResult

_TIMEOUT_MESSAGE = f"took longer than {CHECK_SECONDS:g} seconds"
_SLOW_MACHINE = CheckResult("warn", _TIMEOUT_MESSAGE, "Run it again when the machine is less busy.")
_STUCK_DISK = CheckResult(
    "fail", _TIMEOUT_MESSAGE, "Is the disk of the home, or a network drive, stuck?"
)
_SILENT_SERVER = CheckResult(
    "fail",
    f"no answer within {CHECK_SECONDS:g} seconds",
    "Is the server running? `tinkex serve` starts one on this machine; --base-url names another.",
)
CHECKS = (
    Check("version", machine.check_python, _SLOW_MACHINE),
    Check("home", machine.check_home, _STUCK_DISK),
    Check("key", remote.check_key, _STUCK_DISK),
    Check("server", remote.check_server, _SILENT_SERVER),
    Check(
        "clock", remote.check_clock, CheckResult("warn", "not compared: no answer from the server")
    ),
    Check("local server", machine.check_server_libraries, _SLOW_MACHINE),
    Check("torch", machine.check_torch, _SLOW_MACHINE),
    Check("kernels", machine.check_kernels, _SLOW_MACHINE),
    Check("transformers", machine.check_transformers, _SLOW_MACHINE),
)
