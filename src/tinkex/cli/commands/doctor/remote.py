"""Checks of the server that commands would speak to: key, answer, clock."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from tinkex import clock
from tinkex.cli.access import find_access
from tinkex.cli.ask import call_endpoint
from tinkex.cli.client import rest_client
from tinkex.cli.commands.doctor.findings import CheckResult
from tinkex.cli.context import Context
from tinkex.cli.errors import describe_error
from tinkex.cli.format import format_count
from tinkex.errors import TinkexError
from tinkex.settings import HOSTED_BASE_URL

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient

_LOGIN_HINT = "Run `tinkex auth login`, or set TINKER_API_KEY."
#: A clock that is further off makes tokens look expired.
MAX_SKEW_SECONDS = 60.0
#: No clock that was ever set is older than this.
_MIN_CLOCK = datetime(2025, 1, 1, tzinfo=UTC)


def check_key(context: Context) -> CheckResult:
    """Whether there is a key, and where it comes from."""
    access = find_access(context)
    if access.source is not None:
        shown = access.masked_key or "printed by a command"
        return CheckResult("ok", f"{shown}, from {access.source}")
    if access.home is not None:
        return CheckResult("ok", "not needed: the local server makes its own")
    if access.base_url == HOSTED_BASE_URL:
        return CheckResult("fail", f"none, and {access.base_url} needs one", _LOGIN_HINT)
    return CheckResult("warn", f"none; {access.base_url} may need one", _LOGIN_HINT)


def check_server(context: Context) -> CheckResult:
    """Whether the server answers, how fast, and what it offers."""
    access = find_access(context)
    if access.base_url is None:
        text = f"none runs in {access.home}; the next command that needs one starts it"
        return CheckResult("warn", text, "Run `tinkex serve` to start it now, or pass --base-url.")
    if access.base_url == HOSTED_BASE_URL and not access.has_credential:
        return CheckResult("warn", f"{access.base_url} was not asked: there is no key", _LOGIN_HINT)
    try:
        with rest_client(context) as client:
            return _measure_server(client, access.base_url)
    except TinkexError as error:
        failure = describe_error(error)
        return CheckResult("fail", failure.message, failure.hint)


def _measure_server(client: RestClient, url: str) -> CheckResult:
    from tinkex.wire.endpoints import CAPABILITIES, HEALTH

    # The first question also opens the connection and reads the flags.
    models = call_endpoint(client, CAPABILITIES).supported_models
    began = time.perf_counter()
    call_endpoint(client, HEALTH)
    milliseconds = 1000 * (time.perf_counter() - began)
    offer = format_count(len(models), "model")
    text = f"{url} answers in {milliseconds:.0f} ms and offers {offer}"
    if not models:
        hint = "`tinkex model add smollm2-135m` adds a model to a server of yours."
        return CheckResult("warn", text, hint)
    return CheckResult("ok", text)


def check_clock(context: Context) -> CheckResult:
    """Whether the clock is right, compared with the server's if that tells the time."""
    now = datetime.fromtimestamp(clock.wall_now(), UTC)
    if now < _MIN_CLOCK:
        return CheckResult("fail", f"it says {now:%Y-%m-%d}", "Set the clock of this machine.")
    try:
        theirs = _fetch_server_time(context)
    except TinkexError:
        # Another check says what is wrong with the server.
        theirs = None
    if theirs is None:
        return CheckResult("ok", f"{now:%Y-%m-%d %H:%M} UTC, not compared with a server")
    return check_clock_skew(clock.wall_now() - theirs.timestamp())


def check_clock_skew(skew_seconds: float) -> CheckResult:
    """What a difference to the server's clock means."""
    if abs(skew_seconds) <= MAX_SKEW_SECONDS:
        return CheckResult("ok", "agrees with the server's")
    side = "ahead of" if skew_seconds > 0 else "behind"
    return CheckResult(
        "warn",
        f"{abs(skew_seconds):.0f} seconds {side} the server's",
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
