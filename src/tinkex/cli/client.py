"""Create the API clients that commands use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from tinkex.cli.context import Context

if TYPE_CHECKING:
    from tinkex.client.admin import AdminClient
    from tinkex.client.config import Config
    from tinkex.client.rest import RestClient
    from tinkex.client.service import ServiceClient

#: Interactive use: an unreachable or silent server must be reported within five seconds.
INTERACTIVE_TIMEOUTS = {
    "connect_timeout_seconds": 3.0,
    "first_contact_seconds": 2.0,
    "first_answer_seconds": 4.5,
}
#: The user can repeat a single request by hand.
_FEW_RETRIES = {"max_retries": 3, "outage_seconds": 4.0}


def build_config(context: Context, **settings: Any) -> Config:
    """Build the client config from `settings`, the global options and Config's own sources."""
    with _explain_import_error():
        from tinkex.client.config import Config

    options: dict[str, Any] = {
        "api_key": context.api_key,
        "key_source": "--api-key" if context.api_key else None,
        "base_url": context.base_url,
        "profile": context.profile,
        "timeout_seconds": context.timeout_seconds,
    }
    if context.timeout_seconds is not None:
        options["first_answer_seconds"] = context.timeout_seconds
    return Config.new(**INTERACTIVE_TIMEOUTS | options | settings)


@contextlib.contextmanager
def service_client(
    context: Context, *, needs_worker: bool = True, **settings: Any
) -> Iterator[ServiceClient]:
    """Open a service client; on exit, close it and report to the server how the session ended.

    With `needs_worker=False`, a local server started for this client starts its worker on demand.
    """
    config = build_config(context, **settings)
    make = context.make_service or partial(_create_service, needs_worker=needs_worker)
    with make(config) as client:
        yield client


@contextlib.contextmanager
def rest_client(
    context: Context, *, needs_worker: bool = False, **settings: Any
) -> Iterator[RestClient]:
    """Open a client that lists and manages server resources without opening a session."""
    with service_client(context, needs_worker=needs_worker, **_FEW_RETRIES | settings) as client:
        yield client.rest_client()


@contextlib.contextmanager
def admin_client(context: Context, **settings: Any) -> Iterator[AdminClient]:
    """Open a client for usage, storage and the audit log."""
    with rest_client(context, **settings) as client:
        from tinkex.client.admin import AdminClient

        yield AdminClient(client.holder)


def _create_service(config: Config, *, needs_worker: bool) -> ServiceClient:
    with _explain_import_error():
        from tinkex.client.local_server import with_local_server
        from tinkex.client.service import ServiceClient

    return ServiceClient(config=with_local_server(config, needs_worker=needs_worker))


@contextlib.contextmanager
def _explain_import_error() -> Iterator[None]:
    """Turn a failed import of the client into a CliError with an install command."""
    try:
        yield
    except ImportError as error:
        from tinkex.cli.errors import CliError
        from tinkex.installation import install_command

        raise CliError(
            f"the client cannot be loaded: {error}", f"Run: {install_command()}"
        ) from error
