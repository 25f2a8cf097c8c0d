"""What `tinkex checkpoint create` makes: a plan, the steps on the server, and the record of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex import clock
from tinkex.cli.errors import CliError
from tinkex.ids import SCHEME, parse_tinker_path
from tinkex.settings import package_version

if TYPE_CHECKING:
    from tinkex.client.service import ServiceClient
    from tinkex.client.training import TrainingClient

#: The name of the checkpoint; every one belongs to a run of its own.
CHECKPOINT_NAME = "checkpoint"
#: What describes a new adapter; one that exists has its own.
LORA_OPTIONS = ("rank", "seed", "train_mlp", "train_attn", "train_unembed")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCreateOptions:
    """Which adapter to make or restore, and where to write about it."""

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
            raise click.UsageError("Give --base-model, or --model-path.")
        if not (self.train_mlp or self.train_attn or self.train_unembed):
            raise click.UsageError(
                "Nothing is left to train: --train-mlp, --train-attn or --train-unembed is needed."
            )
        if self.source_path is not None:
            parse_tinker_path(self.source_path)

    @property
    def source_path(self) -> str | None:
        """The checkpoint to start from; None makes a new adapter."""
        is_address = bool(self.model_path) and str(self.model_path).startswith(SCHEME)
        return self.model_path if is_address else None

    @property
    def lora_settings(self) -> dict[str, Any]:
        """The adapter that is asked for."""
        return {name: getattr(self, name) for name in LORA_OPTIONS}


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatedAdapter:
    """A training client, and what it trains."""

    client: TrainingClient
    base_model: str
    lora: dict[str, Any]


def create_adapter(
    client: ServiceClient, options: CheckpointCreateOptions, on_status: Callable[[str], None]
) -> CreatedAdapter:
    """Create the training client: a new adapter, or one that starts from a checkpoint."""
    if options.source_path is None:
        model = str(options.base_model or options.model_path)
        on_status(f"Creating the training client: {model}, rank {options.rank} ...")
        return CreatedAdapter(
            client=client.create_lora_training_client(model, **options.lora_settings),
            base_model=model,
            lora=options.lora_settings,
        )
    on_status(f"Creating the training client from {options.source_path} ...")
    info = client.rest_client().get_weights_info_by_tinker_path(options.source_path).result()
    parts = {name: getattr(info, name) for name in ("train_mlp", "train_attn", "train_unembed")}
    return CreatedAdapter(
        client=client.create_training_client_from_state(
            options.source_path, options.base_model or None
        ),
        base_model=options.base_model or info.base_model,
        lora={"rank": info.lora_rank, "seed": None, **parts},
    )


def save_weights(
    options: CheckpointCreateOptions, adapter: CreatedAdapter, on_status: Callable[[str], None]
) -> dict[str, Any]:
    """Save the weights, and say all that is known about them."""
    on_status("Saving weights ...")
    response = adapter.client.save_weights_for_sampler(CHECKPOINT_NAME).result()
    return {
        "base_model": adapter.base_model,
        "model_path": options.model_path,
        # Never the base model: a server that did not name the new one did not name it.
        "model_id": adapter.client.model_id or None,
        "weights_path": response.path,
        "saved_at": clock.utc_now().isoformat(timespec="seconds"),
        "lora": adapter.lora,
        "session_id": adapter.client.holder.known_session_id,
        "cli_version": package_version(),
        "response": response.model_dump(),
    }


def write_metadata(path: Path, metadata: dict[str, Any]) -> None:
    """Write the record whole or not at all, and its directories if they are missing."""
    from tinkex.checkpoint.atomic import write_file_atomic
    from tinkex.cli.output.plain import to_json

    try:
        write_file_atomic(path, f"{to_json(metadata)}\n".encode(), mode=0o666)
    except OSError as error:
        raise CliError(
            f"{path} cannot be written: {error.strerror or error}",
            f"The weights are saved nevertheless, as {metadata['weights_path']}",
        ) from error
