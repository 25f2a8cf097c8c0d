"""`tinkex checkpoint export`: write a PEFT adapter or a merged model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tinkex.cli.context import Context, pass_context
from tinkex.cli.errors import CliError, missing_extra_error
from tinkex.cli.id_arguments import CHECKPOINT, expand_path
from tinkex.cli.options import Command
from tinkex.cli.output import show
from tinkex.errors import ConfigError
from tinkex.ids import SCHEME, parse_tinker_path

if TYPE_CHECKING:
    from tinkex.engine.checkpoints.merge import MergeProgress

ADAPTER_CONFIG_NAME = "adapter_config.json"
ADAPTER_WEIGHTS_NAMES = ("adapter_model.safetensors", "adapter_model.bin")
#: Files of a checkpoint that only the server needs.
SERVER_FILE_NAMES = (
    "manifest.json",
    "tinkex.json",
    "trainer_state.json",
    "optimizer.safetensors",
    "checkpoint_complete",
)
MODEL_CARD_NAME = "README.md"


def check_adapter(folder: Path, path: str) -> None:
    """Raise CliError if a folder is not an adapter that PEFT can load."""
    if any(folder.glob("*.age")):
        raise CliError(
            f"{path} is encrypted",
            "Decrypt it with `tinkex checkpoint download --identity FILE`, then export the folder.",
        )
    has_weights = any((folder / name).is_file() for name in ADAPTER_WEIGHTS_NAMES)
    if not has_weights or not (folder / ADAPTER_CONFIG_NAME).is_file():
        raise CliError(
            f"{path} does not contain a PEFT adapter",
            f"Expected {ADAPTER_CONFIG_NAME} and {ADAPTER_WEIGHTS_NAMES[0]} in it.",
        )


def read_base_model(folder: Path) -> str | None:
    """Return the base model named in an adapter's config; None if missing."""
    try:
        name = json.loads((folder / ADAPTER_CONFIG_NAME).read_bytes())["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) and name else None


def write_model_card(folder: Path, path: str, repo_id: str) -> None:
    """Write a model card unless the checkpoint has one."""
    card = folder / MODEL_CARD_NAME
    if not card.exists():
        card.write_text(format_model_card(folder, path, repo_id), encoding="utf-8")


def format_model_card(folder: Path, path: str, repo_id: str) -> str:
    """Format the model card of an adapter: base model, source and usage."""
    base = read_base_model(folder) or "unknown"
    rank = _read_rank(folder)
    # Quoted as JSON, which is valid YAML: a name may contain any character.
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
    help="Folder to write.",
)
@click.option("--merge", is_flag=True, help="Write a full model with the adapter merged in.")
@click.option(
    "--base-model-path",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="Folder of the base model, for --merge.  [default: searched on this machine]",
)
@click.option("--dtype", type=click.Choice(DTYPES), help="dtype of the merged model.")
@click.option("--force", is_flag=True, help="Replace an existing folder.")
@pass_context
def export(
    context: Context,
    path: str,
    output: Path,
    force: bool,
    merge: bool,
    base_model_path: Path | None,
    dtype: str | None,
) -> None:
    """Export a checkpoint for PEFT or transformers.

    PATH is a checkpoint path such as tinker://RUN_ID/weights/0001, or the folder of a downloaded
    checkpoint. Without --merge, DIR is an adapter for PEFT; with --merge, a full model for
    transformers. --merge needs the extra tinkex[torch].
    """
    from tinkex.cli.commands.checkpoint import download
    from tinkex.cli.output.checkpoints import CheckpointExport, FileTotals
    from tinkex.client.download.directory import check_destination
    from tinkex.system.atomic import publish_directory

    _check_usage(merge, {"--base-model-path": base_model_path, "--dtype": dtype})
    download.check_not_exists(output, force=force)
    output = check_destination(output, force=force)
    path = expand_path(context, path)
    _check_disjoint(path, output)
    merge_adapter = _import_merge() if merge else None
    with download.scratch_directory(output) as scratch:
        adapter = _get_adapter(context, path, scratch)
        check_adapter(adapter, path)
        base_model = read_base_model(adapter)
        exported = scratch / "export"
        if merge_adapter is None:
            _copy_adapter(
                adapter, exported, SERVER_FILE_NAMES, is_scratch=adapter.parent == scratch
            )
        else:
            base = base_model_path or _find_base_model(base_model, path)
            _run_merge(context, merge_adapter, (base, adapter, exported), dtype)
        publish_directory(exported, output, replace=force)
    result = CheckpointExport(
        path,
        "merged" if merge else "peft",
        dtype,
        destination=output,
        contents=FileTotals.measure(output),
        base_model=base_model,
    )
    show(context, result)


def _check_usage(is_merged: bool, merge_options: Mapping[str, object]) -> None:
    for flag, value in merge_options.items():
        if value is not None and not is_merged:
            raise click.UsageError(f"{flag} needs --merge.")


def _check_disjoint(path: str, output: Path) -> None:
    """Raise CliError if source and output folder contain each other."""
    if path.startswith(SCHEME):
        return
    source, target = Path(path).resolve(), output.resolve()
    if source == target or source in target.parents or target in source.parents:
        raise CliError(f"{output} and {path} overlap", "Choose another --output.")


def _get_adapter(context: Context, path: str, scratch: Path) -> Path:
    """Return the adapter's folder: the given one, or one downloaded now."""
    from tinkex.checkpoint.manifest import MANIFEST_NAME, check_manifest
    from tinkex.cli.commands.checkpoint.download import fetch_checkpoint

    if not path.startswith(SCHEME) and Path(path).is_dir():
        if (Path(path) / MANIFEST_NAME).is_file():
            check_manifest(Path(path))
        return Path(path)
    parse_tinker_path(path)
    fetch_checkpoint(context, path, scratch / "adapter", keeps_partial=False)
    return scratch / "adapter"


def _copy_adapter(adapter: Path, target: Path, private: Sequence[str], *, is_scratch: bool) -> None:
    """Copy an adapter without its private files; move it if it is a temporary download."""
    if is_scratch:
        adapter.rename(target)
        for name in private:
            (target / name).unlink(missing_ok=True)
        return
    try:
        shutil.copytree(adapter, target, ignore=shutil.ignore_patterns(*private))
    except shutil.Error as error:
        # copytree collects all failures; report the first one.
        source, _, reason = error.args[0][0]
        raise CliError(f"{source} cannot be copied: {reason}") from error


def _import_merge() -> Callable[..., None]:
    """Import merge_adapter; called before the download, because torch may be missing."""
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

    with progress_bar(context, "Merging", unit="bytes") as bar:

        def on_progress(progress: MergeProgress) -> None:
            bar.update(progress.done_bytes, progress.total_bytes)

        merge(*folders, dtype=dtype, progress=on_progress)


def _find_base_model(base_model: str | None, path: str) -> Path:
    """Return the base model's folder, from the home's model list or the hub cache."""
    from tinkex.engine.models import sources
    from tinkex.engine.models.hub_download import Hub
    from tinkex.engine.models.model_folder import read_model_folder
    from tinkex.home import Home
    from tinkex.settings import expand_path, read_environment

    hint = "Pass its folder with --base-model-path, or download it with `tinkex model add`."
    if base_model is None:
        raise CliError(f"{path} does not name its base model", hint)
    listed = sources.read_model_list(Home(read_environment().home).models_file)
    location = sources.add_built_in_models(listed).get(base_model, base_model)
    try:
        if sources.is_folder_location(location):
            return read_model_folder(expand_path(location)).path
        return Hub().find_cached(location).path
    except ConfigError as error:
        text = f"The base model {base_model!r} cannot be used: {error.message}"
        raise CliError(text, hint) from error
