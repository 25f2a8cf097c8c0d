"""`tinkex checkpoint export`: a folder that PEFT loads, or a whole model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.completing import CHECKPOINT
from tinkex.cli.context import Context, pass_context
from tinkex.cli.errors import CliError, missing_extra_error
from tinkex.cli.options import Command
from tinkex.cli.output import show
from tinkex.cli.short_ids import expand_path
from tinkex.errors import ConfigError
from tinkex.ids import SCHEME, parse_tinker_path

if TYPE_CHECKING:
    from tinkex.engine.checkpoints.merging import MergeProgress

DTYPES = ("float32", "bfloat16", "float16")


@click.command(cls=Command)
@click.argument("path", type=CHECKPOINT)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    metavar="DIR",
    help="The folder to write.",
)
@click.option("--merge", is_flag=True, help="Write a full model: the base with the adapter in it.")
@click.option(
    "--base-model-path",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="The base model's folder, for --merge; looked for on this machine if not given.",
)
@click.option("--dtype", type=click.Choice(DTYPES), help="What to save a merged model as.")
@click.option("--force", is_flag=True, help="Replace the folder if it is there.")
@pass_context
def export(context: Context, path: str, output: Path, force: bool, **merge_options: Any) -> None:
    """Export a checkpoint for PEFT or transformers.

    PATH is its address, such as tinker://RUN_ID/weights/0001, or the folder of one that was
    downloaded. Without --merge, DIR is an adapter that PEFT loads; with it, a model that
    transformers loads alone. --merge needs the extra tinkex[torch].
    """
    from tinkex.cli.commands.checkpoint import adapters, fetching
    from tinkex.cli.output.transfers import CheckpointExport, FileTotals
    from tinkex.client.archive import publish_directory
    from tinkex.client.download import check_destination

    is_merged, dtype = merge_options["merge"], merge_options["dtype"]
    _check_usage(is_merged, merge_options)
    fetching.check_not_exists(output, force=force)
    output = check_destination(output, force=force)
    path = expand_path(context, path)
    _check_disjoint(path, output)
    merge = _import_merge() if is_merged else None
    with fetching.scratch_directory(output) as scratch:
        adapter = _get_adapter(context, path, scratch)
        adapters.check_adapter(adapter, path)
        base_model = adapters.read_base_model(adapter)
        made = scratch / "export"
        if merge is None:
            _copy_adapter(
                adapter, made, adapters.SERVER_FILE_NAMES, is_ours=adapter.parent == scratch
            )
        else:
            base = merge_options["base_model_path"] or _find_base_model(base_model, path)
            _run_merge(context, merge, (base, adapter, made), dtype)
        publish_directory(made, output, replace=force)
    data = {"checkpoint_path": path, "format": "merged" if is_merged else "peft", "dtype": dtype}
    show(context, CheckpointExport(data, output, FileTotals.measure(output), base_model))


def _check_usage(is_merged: bool, merge_options: dict[str, Any]) -> None:
    for name in ("base_model_path", "dtype"):
        if merge_options[name] is not None and not is_merged:
            flag = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{flag} is for --merge.")


def _check_disjoint(path: str, output: Path) -> None:
    """Refuse to write a folder into itself, or in place of itself."""
    if path.startswith(SCHEME):
        return
    source, target = Path(path).resolve(), output.resolve()
    if source == target or source in target.parents or target in source.parents:
        raise CliError(f"{output} and {path} lie within each other", "Name another --output.")


def _get_adapter(context: Context, path: str, scratch: Path) -> Path:
    """The adapter's folder: the one that was named, or one that is downloaded now."""
    from tinkex.checkpoint.manifest import MANIFEST_NAME, check_manifest
    from tinkex.cli.commands.checkpoint.fetching import fetch_checkpoint

    if not path.startswith(SCHEME) and Path(path).is_dir():
        if (Path(path) / MANIFEST_NAME).is_file():
            check_manifest(Path(path))
        return Path(path)
    parse_tinker_path(path)
    fetch_checkpoint(context, path, scratch / "adapter", keeps_partial=False)
    return scratch / "adapter"


def _copy_adapter(adapter: Path, made: Path, private: Sequence[str], *, is_ours: bool) -> None:
    """Make a folder of what others need: moved if it was downloaded for this, else copied."""
    if is_ours:
        adapter.rename(made)
        for name in private:
            (made / name).unlink(missing_ok=True)
        return
    try:
        shutil.copytree(adapter, made, ignore=shutil.ignore_patterns(*private))
    except shutil.Error as error:
        # It goes on to the end and lists all failures; the first is enough.
        source, _, reason = error.args[0][0]
        raise CliError(f"{source} cannot be copied: {reason}") from error


def _import_merge() -> Callable[..., None]:
    """What merges; asked for before anything is downloaded, for it may not be installed."""
    try:
        from tinkex.engine.checkpoints.merging import merge_adapter
    except ModuleNotFoundError as error:
        raise missing_extra_error(error, "torch") from error
    return merge_adapter


def _run_merge(
    context: Context,
    merge: Callable[..., None],
    folders: tuple[Path, Path, Path],
    dtype: str | None,
) -> None:
    from tinkex.cli.progress import progress_bar

    with progress_bar(context, "Merging", unit="bytes") as shown:

        def tell(progress: MergeProgress) -> None:
            shown.update(progress.done_bytes, progress.total_bytes)

        merge(*folders, dtype=dtype, progress=tell)


def _find_base_model(base_model: str | None, path: str) -> Path:
    """The base model's folder: of the home's list, else of the hub's cache on this machine."""
    from tinkex.engine.models import sources
    from tinkex.engine.models.folders import read_model_folder
    from tinkex.engine.models.hub import Hub
    from tinkex.home import Home
    from tinkex.settings import expand_path, read_environment

    hint = "--base-model-path names the folder that has it; `tinkex model add` fetches one."
    if base_model is None:
        raise CliError(f"{path} does not say which base model it is for", hint)
    listed = sources.read_model_list(Home(read_environment().home).models_file)
    place = sources.add_built_in_models(listed).get(base_model, base_model)
    try:
        if sources.is_folder_location(place):
            return read_model_folder(expand_path(place)).path
        return Hub().find_cached(place).path
    except ConfigError as error:
        text = f"The base model {base_model!r} cannot be used: {error.message}"
        raise CliError(text, hint) from error
