"""`tinkex checkpoint create`: create or restore an adapter and save its sampler weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex import clock
from tinkex.cli.client import service_client
from tinkex.cli.context import Context, pass_context
from tinkex.cli.errors import CliError
from tinkex.cli.format import format_optional
from tinkex.cli.options import Command
from tinkex.cli.output import PropertiesOutput, show
from tinkex.cli.progress import print_status, spinner
from tinkex.cli.prompts import resolve_output_file
from tinkex.ids import SCHEME, parse_tinker_path
from tinkex.settings import package_version

if TYPE_CHECKING:
    from tinkex.client.service import ServiceClient
    from tinkex.client.training import TrainingClient

#: Name of the checkpoint; each one belongs to a new run.
CHECKPOINT_NAME = "checkpoint"
#: Options of a new adapter; a restored one keeps its settings.
LORA_OPTIONS = ("rank", "seed", "train_mlp", "train_attn", "train_unembed")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCreateOptions:
    """Options of the command."""

    base_model: str | None
    model_path: str | None
    output: Path
    rank: int
    seed: int | None
    train_mlp: bool
    train_attn: bool
    train_unembed: bool

    def __post_init__(self) -> None:
        if not self.base_model and not self.model_path:
            raise click.UsageError("Give --base-model or --model-path.")
        if not (self.train_mlp or self.train_attn or self.train_unembed):
            raise click.UsageError(
                "Nothing to train: enable --train-mlp, --train-attn or --train-unembed."
            )
        if self.source_path is not None:
            parse_tinker_path(self.source_path)

    @property
    def source_path(self) -> str | None:
        """The checkpoint to start from; None creates a new adapter."""
        is_address = bool(self.model_path) and str(self.model_path).startswith(SCHEME)
        return self.model_path if is_address else None

    @property
    def lora_settings(self) -> Mapping[str, object]:
        """Settings of the new adapter."""
        return {name: getattr(self, name) for name in LORA_OPTIONS}


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatedAdapter:
    """A training client and the settings of its adapter."""

    client: TrainingClient
    base_model: str
    lora: Mapping[str, object]


def create_adapter(
    client: ServiceClient, options: CheckpointCreateOptions, on_status: Callable[[str], None]
) -> CreatedAdapter:
    """Create the training client: a new adapter, or one that starts from a checkpoint."""
    if options.source_path is None:
        model = str(options.base_model or options.model_path)
        on_status(f"Creating the training client: {model}, rank {options.rank} ...")
        return CreatedAdapter(
            client=client.create_lora_training_client(
                model,
                rank=options.rank,
                seed=options.seed,
                train_mlp=options.train_mlp,
                train_attn=options.train_attn,
                train_unembed=options.train_unembed,
            ).result(),
            base_model=model,
            lora=options.lora_settings,
        )
    on_status(f"Creating the training client from {options.source_path} ...")
    info = client.rest_client().get_weights_info_by_tinker_path(options.source_path).result()
    parts = {name: getattr(info, name) for name in ("train_mlp", "train_attn", "train_unembed")}
    return CreatedAdapter(
        client=client.create_training_client_from_state(
            options.source_path, options.base_model or None
        ).result(),
        base_model=options.base_model or info.base_model,
        lora={"rank": info.lora_rank, "seed": None, **parts},
    )


def save_weights(
    options: CheckpointCreateOptions, adapter: CreatedAdapter, on_status: Callable[[str], None]
) -> dict[str, object]:
    """Save the weights and return metadata about them."""
    on_status("Saving weights ...")
    response = adapter.client.save_weights_for_sampler(CHECKPOINT_NAME).result()
    return {
        "base_model": adapter.base_model,
        "model_path": options.model_path,
        # Do not substitute the base model if the server returned no id.
        "model_id": adapter.client.model_id or None,
        "weights_path": response.path,
        "saved_at": clock.utc_now().isoformat(timespec="seconds"),
        "lora": adapter.lora,
        "session_id": adapter.client.holder.known_session_id,
        "cli_version": package_version(),
        "response": response.model_dump(),
    }


def write_metadata(path: Path, metadata: dict[str, object]) -> None:
    """Write the metadata atomically; create missing directories."""
    from tinkex.cli.output.base import to_json
    from tinkex.system.atomic import write_file_atomic

    try:
        write_file_atomic(path, f"{to_json(metadata)}\n".encode(), mode=0o666)
    except OSError as error:
        raise CliError(
            f"{path} cannot be written: {error.strerror or error}",
            f"The weights were saved as {metadata['weights_path']}",
        ) from error


@click.command(cls=Command)
@click.option("--base-model", metavar="NAME", help="Base model to adapt.")
@click.option(
    "--model-path",
    metavar="PATH",
    help="tinker:// path of training weights to start from; other values mean --base-model.",
)
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    metavar="FILE",
    help="Write metadata of the checkpoint to this JSON file.",
)
@click.option(
    "--rank",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    metavar="N",
    help="LoRA rank.",
)
@click.option("--seed", type=int, metavar="N", help="Random seed of the initial weights.")
@click.option("--train-mlp/--no-train-mlp", default=True, help="Adapt the MLP layers.")
@click.option("--train-attn/--no-train-attn", default=True, help="Adapt the attention layers.")
@click.option("--train-unembed/--no-train-unembed", default=True, help="Adapt the unembedding.")
@pass_context
def create(context: Context, /, **options: Any) -> None:
    """Create an adapter and save its weights.

    The weights stay on the server, ready for sampling; FILE records their path. Nothing is
    downloaded.

    \b
      tinkex checkpoint --base-model NAME --output made.json --rank 16
    """
    plan = CheckpointCreateOptions(**options)
    _check_option_combination(plan)
    output = resolve_output_file(plan.output)
    # An operation may need several polls; --timeout limits all of them together.
    with (
        service_client(context, poll_timeout_seconds=context.timeout_seconds) as client,
        spinner("Starting a session ...") as shown,
    ):
        adapter = create_adapter(client, plan, shown.show)
        metadata = save_weights(plan, adapter, shown.show)
    write_metadata(output, metadata)
    show(
        context,
        PropertiesOutput(
            {**metadata, "output": plan.output}, _metadata_rows(metadata, adapter.lora, plan.output)
        ),
    )


def _check_option_combination(options: CheckpointCreateOptions) -> None:
    """Reject or report options that cannot be combined."""
    ctx = click.get_current_context()
    typed = click.core.ParameterSource.COMMANDLINE
    given = [name for name in LORA_OPTIONS if ctx.get_parameter_source(name) is typed]
    if options.source_path is not None and given:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise click.UsageError(
            f"{flags}: only for a new adapter; {options.source_path} keeps its own settings."
        )
    if options.source_path is None and options.base_model and options.model_path:
        print_status(
            f"--model-path {options.model_path} is not a tinker:// path; using --base-model."
        )


def _metadata_rows(
    metadata: Mapping[str, object], lora: Mapping[str, object], output: Path
) -> list[tuple[str, str]]:
    parts = [part for part in ("mlp", "attn", "unembed") if lora[f"train_{part}"] is not False]
    return [
        ("Weights Path", str(metadata["weights_path"])),
        ("Base Model", str(metadata["base_model"])),
        ("Model ID", format_optional(metadata["model_id"])),
        ("LoRA", f"Rank {format_optional(lora['rank'])} ({', '.join(parts)})"),
        ("Session ID", format_optional(metadata["session_id"])),
        ("Written To", str(output)),
    ]
