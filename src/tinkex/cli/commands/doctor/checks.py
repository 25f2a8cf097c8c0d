"""Checks of this machine (Python, disk, libraries, kernels), the key and the server."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex import clock
from tinkex.cli.client import call_endpoint, find_access, rest_client
from tinkex.cli.commands.doctor.runner import CHECK_SECONDS, Check, CheckResult
from tinkex.cli.context import Context
from tinkex.cli.errors import describe_error
from tinkex.cli.format import format_count, format_size
from tinkex.errors import TinkexError
from tinkex.installation import install_command, missing_libraries
from tinkex.settings import HOSTED_BASE_URL, package_version, read_environment

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient

#: Oldest supported Python version.
MIN_PYTHON = (3, 11)
#: Free space below which the disk check warns, and below which it fails.
LOW_DISK_BYTES, FULL_DISK_BYTES = 5 * 1024**3, 100 * 1024**2
_TORCH_PROBE = "import torch; print(torch.__version__)"
_KERNELS_PROBE = (
    "from tinkex.nn.ops.library import load_kernels; "
    "print('yes' if load_kernels() is not None else 'no')"
)


def check_python(context: Context) -> CheckResult:
    """Check the Python version."""
    message = f"tinkex {package_version()}, Python {platform.python_version()}, {platform.system()}"
    if sys.version_info < MIN_PYTHON:
        required = ".".join(map(str, MIN_PYTHON))
        return CheckResult("fail", message, f"Install Python {required} or newer, then tinkex.")
    return CheckResult("ok", message)


def check_home(context: Context) -> CheckResult:
    """Check that the home is writable and has free space."""
    home = read_environment().home
    directory = next(path for path in (home, *home.parents) if path.exists())
    if not _is_writable(directory):
        advice = "Make it writable for this user, or set TINKEX_HOME to another directory."
        return CheckResult("fail", f"{directory} cannot be written", advice)
    free = shutil.disk_usage(directory).free
    message = f"{home} can be written, {format_size(free)} free"
    if free < FULL_DISK_BYTES:
        return CheckResult("fail", message, "Free some space: the disk is full.")
    if free < LOW_DISK_BYTES:
        return CheckResult("warn", message, "Free some space: models and checkpoints may not fit.")
    return CheckResult("ok", message)


def _is_writable(directory: Path) -> bool:
    if not directory.is_dir():
        return False
    try:
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def check_torch(context: Context) -> CheckResult:
    """Check that torch can be imported."""
    if importlib.util.find_spec("torch") is None:
        return CheckResult("warn", "not installed; only a server on this machine needs it")
    code, output = run_python(_TORCH_PROBE)
    if code != 0:
        advice = f"Reinstall torch: {install_command('torch')}"
        return CheckResult("fail", f"cannot be loaded: {output}", advice)
    return CheckResult("ok", f"torch {output}")


def check_kernels(context: Context) -> CheckResult:
    """Check that the custom C kernels can be compiled."""
    if importlib.util.find_spec("torch") is None:
        return CheckResult("ok", "not needed without torch")
    code, output = run_python(_KERNELS_PROBE)
    if code == 0 and output == "yes":
        return CheckResult("ok", "compiled for this processor")
    advice = "Install a C compiler (gcc or clang) to sample and train faster on the CPU."
    return CheckResult("warn", "cannot be compiled; torch's kernels are used", advice)


def check_transformers(context: Context) -> CheckResult:
    """Check that transformers, needed for tokenizers, is installed."""
    if importlib.util.find_spec("transformers") is None:
        return CheckResult(
            "warn",
            "not installed; text prompts need it",
            f"Run: {install_command('text')}",
        )
    return CheckResult("ok", f"transformers {_library_version('transformers')}")


def check_server_libraries(context: Context) -> CheckResult:
    """Check that the libraries for a local server are installed."""
    if missing := missing_libraries("server", "torch"):
        advice = f"To serve models on this machine, run: {install_command('server', 'torch')}"
        return CheckResult("warn", f"{', '.join(missing)} not installed", advice)
    return CheckResult("ok", "libraries for a local server are installed")


def _library_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "of unknown version"


def run_python(code: str, seconds: float = CHECK_SECONDS) -> tuple[int, str]:
    """Run code in a Python subprocess with a timeout; return exit code and last output line."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        # Also kill a compiler that it started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return -1, f"took longer than {seconds:g} seconds"
    return process.returncode, "".join(output.strip().splitlines()[-1:])


_LOGIN_HINT = "Run `tinkex auth login`, or set TINKER_API_KEY."
#: With a larger difference, tokens may appear expired.
MAX_SKEW_SECONDS = 60.0
#: An earlier date means that the clock was never set.
_MIN_CLOCK = datetime(2025, 1, 1, tzinfo=UTC)


def check_key(context: Context) -> CheckResult:
    """Check that a key is configured, and report its origin."""
    access = find_access(context)
    if access.source is not None:
        shown = access.masked_key or "printed by a command"
        return CheckResult("ok", f"{shown}, from {access.source}")
    if access.home is not None:
        return CheckResult("ok", "not needed: the local server creates its own")
    if access.base_url == HOSTED_BASE_URL:
        return CheckResult("fail", f"none, and {access.base_url} needs one", _LOGIN_HINT)
    return CheckResult("warn", f"none; {access.base_url} may need one", _LOGIN_HINT)


def check_server(context: Context) -> CheckResult:
    """Check that the server responds; report its latency and number of models."""
    access = find_access(context)
    if access.base_url is None:
        text = f"not running in {access.home}; the next command that needs it starts it"
        return CheckResult("warn", text, "Run `tinkex serve` to start it now, or pass --base-url.")
    if access.base_url == HOSTED_BASE_URL and not access.has_credential:
        return CheckResult(
            "warn", f"{access.base_url} was not contacted: no key is configured", _LOGIN_HINT
        )
    try:
        with rest_client(context) as client:
            return _measure_server(client, access.base_url)
    except TinkexError as error:
        report = describe_error(error)
        return CheckResult("fail", report.message, report.hint)


def _measure_server(client: RestClient, url: str) -> CheckResult:
    from tinkex.wire.endpoints import CAPABILITIES, HEALTH

    # The first request also opens the connection and fetches the feature flags.
    models = call_endpoint(client, CAPABILITIES).supported_models
    start = time.perf_counter()
    call_endpoint(client, HEALTH)
    milliseconds = 1000 * (time.perf_counter() - start)
    count = format_count(len(models), "model")
    text = f"{url} responds in {milliseconds:.0f} ms and has {count}"
    if not models:
        hint = "`tinkex model add smollm2-135m` adds a model to your server."
        return CheckResult("warn", text, hint)
    return CheckResult("ok", text)


def check_clock(context: Context) -> CheckResult:
    """Check the clock against the server's Date header."""
    now = datetime.fromtimestamp(clock.wall_now(), UTC)
    if now < _MIN_CLOCK:
        return CheckResult("fail", f"set to {now:%Y-%m-%d}", "Set the clock of this machine.")
    try:
        server_time = _fetch_server_time(context)
    except TinkexError:
        # check_server() reports the problem.
        server_time = None
    if server_time is None:
        return CheckResult("ok", f"{now:%Y-%m-%d %H:%M} UTC, not compared with a server")
    return check_clock_skew(clock.wall_now() - server_time.timestamp())


def check_clock_skew(skew_seconds: float) -> CheckResult:
    """Rate a difference to the server's clock."""
    if abs(skew_seconds) <= MAX_SKEW_SECONDS:
        return CheckResult("ok", "matches the server's clock")
    side = "ahead of" if skew_seconds > 0 else "behind"
    return CheckResult(
        "warn",
        f"{abs(skew_seconds):.0f} seconds {side} the server's clock",
        "Set the clock of this machine: tokens may look expired.",
    )


def _fetch_server_time(context: Context) -> datetime | None:
    from tinkex.wire.endpoints import HEALTH

    access = find_access(context)
    if access.base_url is None or (
        access.base_url == HOSTED_BASE_URL and not access.has_credential
    ):
        return None
    with rest_client(context) as client:
        transport = client.holder.transport
        url = client.holder.config.base_url + HEALTH.url_path()
        reply = client.holder.start(transport.http.send("GET", url, {}, None, 4.0)).result()
    try:
        return parsedate_to_datetime(reply.headers["date"])
    except (KeyError, ValueError):
        return None


_TIMEOUT_MESSAGE = f"took longer than {CHECK_SECONDS:g} seconds"
_SLOW_MACHINE = CheckResult("warn", _TIMEOUT_MESSAGE, "Run it again when the machine is less busy.")
_STUCK_DISK = CheckResult(
    "fail", _TIMEOUT_MESSAGE, "Check whether the disk of the home or a network drive hangs."
)
_SILENT_SERVER = CheckResult(
    "fail",
    f"no response within {CHECK_SECONDS:g} seconds",
    "Is the server running? `tinkex serve` starts one on this machine; --base-url selects another.",
)
CHECKS = (
    Check("version", check_python, _SLOW_MACHINE),
    Check("home", check_home, _STUCK_DISK),
    Check("key", check_key, _STUCK_DISK),
    Check("server", check_server, _SILENT_SERVER),
    Check("clock", check_clock, CheckResult("warn", "not compared: no response from the server")),
    Check("local server", check_server_libraries, _SLOW_MACHINE),
    Check("torch", check_torch, _SLOW_MACHINE),
    Check("kernels", check_kernels, _SLOW_MACHINE),
    Check("transformers", check_transformers, _SLOW_MACHINE),
)
