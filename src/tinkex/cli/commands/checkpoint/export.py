"""A downloaded adapter: whether it is one, what it is for, and which of its files others need."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.context import Context, pass_context
from tinkex.cli.errors import CliError, missing_extra_error
from tinkex.cli.id_completion import CHECKPOINT
from tinkex.cli.options import Command
from tinkex.cli.output import show
from tinkex.cli.short_ids import expand_path
from tinkex.errors import ConfigError
from tinkex.ids import SCHEME, parse_tinker_path

if TYPE_CHECKING:
    from tinkex.engine.checkpoints.merge import MergeProgress

ADAPTER_CONFIG_NAME = "adapter_config.json"
ADAPTER_WEIGHTS_NAMES = ("adapter_model.safetensors", "adapter_model.bin")
#: What a server keeps beside an adapter for itself.
SERVER_FILE_NAMES = (
    "manifest.json",
    "tinkex.json",
    "trainer_state.json",
    "optimizer.safetensors",
    "checkpoint_complete",
)
MODEL_CARD_NAME = "README.md"


def check_adapter(folder: Path, path: str) -> None:
    """Refuse what PEFT could not load."""
    if any(folder.glob("*.age")):
        raise CliError(
            f"{path} is encrypted",
            "Run `tinkex checkpoint download --identity FILE` with it, and export that folder.",
        )
    has_weights = any((folder / name).is_file() for name in ADAPTER_WEIGHTS_NAMES)
    if not has_weights or not (folder / ADAPTER_CONFIG_NAME).is_file():
        raise CliError(
            f"{path} holds no PEFT adapter",
            f"Expected {ADAPTER_CONFIG_NAME} and {ADAPTER_WEIGHTS_NAMES[0]} in it.",
        )


def read_base_model(folder: Path) -> str | None:
    """The model an adapter was trained on, as its own settings name it."""
    try:
        found = json.loads((folder / ADAPTER_CONFIG_NAME).read_bytes())["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) and found else None


def write_model_card(folder: Path, path: str, repo_id: str) -> None:
    """Write the page that the hub shows, unless the checkpoint brought one."""
    place = folder / MODEL_CARD_NAME
    if not place.exists():
        place.write_text(format_model_card(folder, path, repo_id), encoding="utf-8")


def format_model_card(folder: Path, path: str, repo_id: str) -> str:
    """The hub's page of an adapter: what it is, where it is from, how it is used."""
    base = read_base_model(folder) or "unknown"
    rank = _read_rank(folder)
    # Quoted as JSON, which YAML reads too: a name may hold anything.
    lines = [
        "---",
        *([f"base_model: {json.dumps(base)}"] if base != "unknown" else []),
        "library_name: peft",
        "tags:",
        "- lora",
        "- peft",
        "- tinker",
        f"tinker_path: {json.dumps(path)}",
        "---",
        "",
        f"# LoRA adapter for {base}",
        "",
        f"Trained through the Tinker API. Source: `{path}`",
        "",
        f"- Base model: {base}",
        *([f"- LoRA rank: {rank}"] if rank else []),
        "",
        "## Use",
        "",
        "```python",
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(base)})",
        f"base = AutoModelForCausalLM.from_pretrained({json.dumps(base)})",
        f"model = PeftModel.from_pretrained(base, {json.dumps(repo_id)})",
        "```",
        "",
    ]
    return "\n".join(lines)


def _read_rank(folder: Path) -> int | None:
    try:
        rank = json.loads((folder / ADAPTER_CONFIG_NAME).read_bytes())["r"]
    except (ValueError, KeyError, TypeError):
        return None
    return rank if isinstance(rank, int) else None


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
    from tinkex.cli.commands.checkpoint import download
    from tinkex.cli.output.checkpoints import CheckpointExport, FileTotals
    from tinkex.client.download.directory import check_destination
    from tinkex.system.atomic import publish_directory

    is_merged, dtype = merge_options["merge"], merge_options["dtype"]
    _check_usage(is_merged, merge_options)
    download.check_not_exists(output, force=force)
    output = check_destination(output, force=force)
    path = expand_path(context, path)
    _check_disjoint(path, output)
    merge = _import_merge() if is_merged else None
    with download.scratch_directory(output) as scratch:
        adapter = _get_adapter(context, path, scratch)
        check_adapter(adapter, path)
        base_model = read_base_model(adapter)
        made = scratch / "export"
        if merge is None:
            _copy_adapter(adapter, made, SERVER_FILE_NAMES, is_ours=adapter.parent == scratch)
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
    from tinkex.cli.commands.checkpoint.download import fetch_checkpoint

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
        from tinkex.engine.checkpoints.merge import merge_adapter
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
    from tinkex.engine.models.hub_download import Hub
    from tinkex.engine.models.model_folder import read_model_folder
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
