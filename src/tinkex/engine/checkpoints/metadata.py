"""The small files beside an adapter's numbers: what the numbers fit, and how far training was."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self, TypeVar

import msgspec

from tinkex.engine.protocol import AdapterSpec
from tinkex.errors import CheckpointError, InvalidInput
from tinkex.types.base import preload_type

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
OPTIMIZER_NAME = "optimizer.safetensors"
STATE_NAME = "trainer_state.json"
METADATA_NAME = "tinkex.json"
SNAPSHOT_NAME = "snapshot.safetensors"

#: What this version writes; it reads no later ones.
FORMAT_VERSION = 1

Count = Annotated[int, msgspec.Meta(ge=0)]
RecordT = TypeVar("RecordT")


class AdapterMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What an adapter must be like for saved weights to fit it."""

    base_model: str
    rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool
    format: int = FORMAT_VERSION
    """Which version of these files it is."""

    @classmethod
    def from_spec(cls, spec: AdapterSpec) -> Self:
        """The summary of an adapter made so."""
        return cls(
            base_model=spec.base_model,
            rank=spec.rank,
            train_unembed=spec.train_unembed,
            train_mlp=spec.train_mlp,
            train_attn=spec.train_attn,
        )


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """What an optimizer remembers besides tables."""

    num_steps: Count
    optimizer: str
    """Its type; the tables of one are of no use to another."""
    seed: int
    """What the first weights were made from."""
    format: int = FORMAT_VERSION

    @classmethod
    def from_spec(cls, spec: AdapterSpec, num_steps: int) -> Self:
        """The state of an adapter after so many steps."""
        optimizer = str(spec.optimizer.get("type"))
        return cls(num_steps=num_steps, optimizer=optimizer, seed=spec.seed)


def read_metadata(directory: Path) -> AdapterMetadata:
    """What the weights in a directory fit."""
    summary = read_struct(directory / METADATA_NAME, AdapterMetadata)
    check_format(directory / METADATA_NAME, summary.format)
    return summary


def check_format(path: Path, version: int) -> None:
    """Refuse files of a later version."""
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{short_path(path)} has format {version}, and this version of tinkex reads up to "
            f"{FORMAT_VERSION}; "
            "upgrade tinkex"
        )


def check_compatible(metadata: AdapterMetadata, spec: AdapterSpec) -> None:
    """Refuse weights that were saved from an adapter made otherwise, by the first difference."""
    wanted = AdapterMetadata.from_spec(spec)
    for name in AdapterMetadata.__struct_fields__:
        theirs, ours = getattr(metadata, name), getattr(wanted, name)
        if name != "format" and theirs != ours:
            raise InvalidInput(
                f"the checkpoint was saved with {name} {theirs!r}, but the adapter has {ours!r}; "
                f"create one with {name} {theirs!r} to load it"
            )


def read_trainer_state(directory: Path, spec: AdapterSpec) -> TrainerState:
    """How far the saved training was; its optimizer must be of the spec's type."""
    if not (directory / STATE_NAME).exists() and not (directory / OPTIMIZER_NAME).exists():
        raise InvalidInput(
            "the checkpoint has no optimizer state; load it without the optimizer, or use one "
            "that save_state wrote"
        )
    state = read_struct(directory / STATE_NAME, TrainerState)
    check_format(directory / STATE_NAME, state.format)
    wanted = spec.optimizer.get("type")
    if state.optimizer != wanted:
        raise InvalidInput(
            f"the checkpoint's optimizer is {state.optimizer!r}, but the adapter trains with "
            f"{wanted!r}; load it without the optimizer"
        )
    return state


# --- single files --------------------------------------------------------------------------------


def write_json(path: Path, content: object) -> None:
    """Write JSON that people can read."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")


def read_struct(path: Path, type_: type[RecordT]) -> RecordT:
    """Read JSON of a known shape; CheckpointError if there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=preload_type(type_))
    except FileNotFoundError:
        raise CheckpointError(f"{short_path(path)} is missing") from None
    except OSError as error:
        # The cause stays: a disk in trouble is no damage.
        raise CheckpointError(
            f"{short_path(path)} cannot be read: {error.strerror or error}"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{short_path(path)} cannot be read: {error}") from None


def short_path(path: Path) -> str:
    """A file's name for messages; the whole path is the server's own affair."""
    return f"{path.parent.name}/{path.name}"
