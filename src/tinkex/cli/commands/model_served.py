"""The models that a server offers: for `tinkex model list`, and after `add` and `remove`."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from tinkex.cli.access import find_config_credential
from tinkex.cli.client import build_config, service_client
from tinkex.cli.context import Context
from tinkex.cli.errors import CliError
from tinkex.cli.output import show
from tinkex.cli.output.models import ModelList
from tinkex.cli.progress import print_status
from tinkex.errors import TinkexError
from tinkex.home import Home
from tinkex.units import format_count

if TYPE_CHECKING:
    from tinkex.client.service import ServiceClient

#: How long `add` and `remove` wait for a running server, which looks between two batches.
SERVER_WAIT_SECONDS = 10.0
_POLL_SECONDS = 0.2


def has_configured_server(context: Context) -> bool:
    """Whether an option, a variable, a profile or a stored key names a server."""
    config = build_config(context)
    return config.local_home is None or find_config_credential(config) is not None


def print_served_models(context: Context, substring: str | None) -> None:
    """Print the models of the server whose name has this in it, whatever the case."""
    with service_client(context) as client:
        offered = client.get_server_capabilities().supported_models
        url = client.config.base_url
    wanted = (substring or "").lower()
    models = [model for model in offered if wanted in (model.model_name or "").lower()]
    if substring and not models:
        raise CliError(
            f"no model of {url} has {substring!r} in its name",
            f"`tinkex model list` shows {format_count(len(offered), 'model')}.",
        )
    show(context, ModelList(models, len(offered)))


def wait_for_server(context: Context, home: Home, name: str, *, is_added: bool) -> None:
    """Wait until the server of a home has noticed a change of its models, and say so."""
    from tinkex.presence import find_lock_holder, find_server

    if find_lock_holder(home) is None:
        return
    state, key = find_server(home), _read_local_key(home)
    if state is not None and key is not None:
        asking = context._replace(profile=None, base_url=state.url, api_key=key)
        if _has_server_updated(asking, name, is_added=is_added):
            verb = "serves it now" if is_added else "offers it no more"
            print_status(f"The server at {state.url} {verb}.")
            return
    change = "serves it" if is_added else "stops offering it"
    print_status(f"A server runs in {home.root}; it {change} when its work in progress is done.")


def _read_local_key(home: Home) -> str | None:
    try:
        return home.key_file.read_text("ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _has_server_updated(asking: Context, name: str, *, is_added: bool) -> bool:
    # A server that cannot be asked reads the list all the same.
    with contextlib.suppress(TinkexError), service_client(asking) as client:
        ends_at = time.monotonic() + SERVER_WAIT_SECONDS
        while _has_model(client, name) is not is_added:
            if time.monotonic() > ends_at:
                return False
            time.sleep(_POLL_SECONDS)
        return True
    return False


def _has_model(client: ServiceClient, name: str) -> bool:
    offered = client.get_server_capabilities().supported_models
    return any(model.model_name == name for model in offered)
