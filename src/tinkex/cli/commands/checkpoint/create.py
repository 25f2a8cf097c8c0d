"""`tinkex checkpoint create`, also without its name: an adapter is made and its weights saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tinkex.cli.client import service_client
from tinkex.cli.commands.checkpoint.creation import (
    LORA_OPTIONS,
    CheckpointCreateOptions,
    create_adapter,
    save_weights,
    write_metadata,
)
from tinkex.cli.context import Context, pass_context
from tinkex.cli.files import resolve_output_file
from tinkex.cli.format import format_optional
from tinkex.cli.options import Command
from tinkex.cli.output import PropertiesOutput, show
from tinkex.cli.progress import print_status, spinner


@click.command(cls=Command)
@click.option("--base-model", metavar="NAME", help="The model to adapt.")
@click.option(
    "--model-path",
    metavar="PATH",
    help="A tinker:// path of training weights to start from; else another word for --base-model.",
)
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    metavar="FILE",
    help="Where to write what was made, as JSON.",
)
@click.option(
    "--rank",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    metavar="N",
    help="The inner dimension of the adapter.",
)
@click.option("--seed", type=int, metavar="N", help="Makes the first weights repeatable.")
@click.option("--train-mlp/--no-train-mlp", default=True, help="Adapt the MLP layers.")
@click.option("--train-attn/--no-train-attn", default=True, help="Adapt the attention layers.")
@click.option("--train-unembed/--no-train-unembed", default=True, help="Adapt the unembedding.")
@pass_context
def create(context: Context, **options: Any) -> None:
    """Make an adapter and save its weights.

    The weights stay on the server, ready to be sampled from; FILE says where. Nothing is
    downloaded.

    \b
      tinkex checkpoint --base-model NAME --output made.json --rank 16
    """
    plan = CheckpointCreateOptions(**options)
    _check_option_combination(plan)
    output = resolve_output_file(plan.output)
    # One operation may take several answers: the time that was given is for all of them.
    with (
        service_client(context, poll_timeout_seconds=context.timeout_seconds) as client,
        spinner("Starting a session ...") as shown,
    ):
        metadata = save_weights(plan, create_adapter(client, plan, shown.show), shown.show)
    write_metadata(output, metadata)
    show(
        context,
        PropertiesOutput(
            {**metadata, "output": plan.output}, _metadata_rows(metadata, plan.output)
        ),
    )


def _check_option_combination(options: CheckpointCreateOptions) -> None:
    """Refuse, or name, options that mean nothing together."""
    ctx = click.get_current_context()
    typed = click.core.ParameterSource.COMMANDLINE
    given = [name for name in LORA_OPTIONS if ctx.get_parameter_source(name) is typed]
    if options.source_path is not None and given:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise click.UsageError(
            f"{flags}: for a new adapter only; {options.source_path} has its own."
        )
    if options.source_path is None and options.base_model and options.model_path:
        print_status(
            f"--model-path {options.model_path} is no tinker:// path: --base-model is used instead."
        )


def _metadata_rows(metadata: dict[str, Any], output: Path) -> list[tuple[str, str]]:
    lora = metadata["lora"]
    parts = [part for part in ("mlp", "attn", "unembed") if lora[f"train_{part}"] is not False]
    return [
        ("Weights Path", metadata["weights_path"]),
        ("Base Model", metadata["base_model"]),
        ("Model ID", format_optional(metadata["model_id"])),
        ("LoRA", f"Rank {format_optional(lora['rank'])} ({', '.join(parts)})"),
        ("Session ID", format_optional(metadata["session_id"])),
        ("Written To", str(output)),
    ]
