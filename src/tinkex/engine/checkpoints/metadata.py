"""The metadata files of checkpoints: what the weights belong to, and the training progress."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self, TypeVar

import msgspec

from tinkex.engine.protocol import DEFAULT_ALPHA, AdapterSpec, lora_scale
from tinkex.errors import CheckpointError, InvalidInput
from tinkex.types.base import preload_type

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
OPTIMIZER_NAME = "optimizer.safetensors"
STATE_NAME = "trainer_state.json"
METADATA_NAME = "tinkex.json"
SNAPSHOT_NAME = "snapshot.safetensors"

#: The latest format; later ones cannot be read.
FORMAT_VERSION = 2
#: The format of adapters with the default scale and all modules of their kinds. Versions of tinkex
#: that do not know other adapters read it.
_PLAIN_FORMAT = 1

Count = Annotated[int, msgspec.Meta(ge=0)]
RecordT = TypeVar("RecordT")


class AdapterMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """The properties that an adapter must have to load the saved weights."""

    base_model: str
    rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool
    format: int = _PLAIN_FORMAT
    """The version of the file format."""
    alpha: float = DEFAULT_ALPHA
    use_rslora: bool = False
    target_modules: tuple[str, ...] | None = None

    @property
    def scale(self) -> float:
        """The scale of the low-rank update."""
        return lora_scale(self.alpha, self.rank, use_rslora=self.use_rslora)

    @classmethod
    def from_spec(cls, spec: AdapterSpec) -> Self:
        """The metadata of an adapter."""
        return cls(
            base_model=spec.base_model,
            rank=spec.rank,
            train_unembed=spec.train_unembed,
            train_mlp=spec.train_mlp,
            train_attn=spec.train_attn,
            format=_PLAIN_FORMAT if _is_plain(spec) else FORMAT_VERSION,
            alpha=spec.alpha,
            use_rslora=spec.use_rslora,
            target_modules=spec.target_modules,
        )


def _is_plain(spec: AdapterSpec) -> bool:
    is_default_scale = spec.alpha == DEFAULT_ALPHA and not spec.use_rslora
    return is_default_scale and spec.target_modules is None


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """The optimizer state besides tensors."""

    num_steps: Count
    optimizer: str
    """Its type; the state cannot be used by another one."""
    seed: int
    """The seed of the initial weights."""
    format: int = _PLAIN_FORMAT

    @classmethod
    def from_spec(cls, spec: AdapterSpec, num_steps: int) -> Self:
        """The state of an adapter after a number of steps."""
        optimizer = str(spec.optimizer.get("type"))
        return cls(num_steps=num_steps, optimizer=optimizer, seed=spec.seed)


def read_metadata(directory: Path) -> AdapterMetadata:
    """Read the metadata of the weights in a directory."""
    metadata = read_struct(directory / METADATA_NAME, AdapterMetadata)
    check_format(directory / METADATA_NAME, metadata.format)
    return metadata


def check_format(path: Path, version: int) -> None:
    """Raise CheckpointError for a later format."""
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{short_path(path)} has format {version}, but this version of tinkex reads up to "
            f"{FORMAT_VERSION}; upgrade tinkex"
        )


#: Fields that may differ: weights of another scale are rescaled.
_CONVERTIBLE_FIELDS = ("format", "alpha", "use_rslora")


def check_compatible(metadata: AdapterMetadata, spec: AdapterSpec) -> None:
    """Raise InvalidInput at the first difference between a checkpoint and an adapter."""
    expected = AdapterMetadata.from_spec(spec)
    for name in AdapterMetadata.__struct_fields__:
        saved, own = getattr(metadata, name), getattr(expected, name)
        if name not in _CONVERTIBLE_FIELDS and saved != own:
            raise InvalidInput(
                f"the checkpoint was saved with {name} {saved!r}, but the adapter has {own!r}; "
                f"create one with {name} {saved!r} to load it"
            )


def read_trainer_state(directory: Path, spec: AdapterSpec) -> TrainerState:
    """Read the training progress; the optimizer must be of the spec's type."""
    if not (directory / STATE_NAME).exists() and not (directory / OPTIMIZER_NAME).exists():
        raise InvalidInput(
            "the checkpoint has no optimizer state; load it without the optimizer, or use one "
            "that save_state wrote"
        )
    state = read_struct(directory / STATE_NAME, TrainerState)
    check_format(directory / STATE_NAME, state.format)
    expected = spec.optimizer.get("type")
    if state.optimizer != expected:
        raise InvalidInput(
            f"the checkpoint's optimizer is {state.optimizer!r}, but the adapter trains with "
            f"{expected!r}; load it without the optimizer"
        )
    return state


# --- JSON files ----------------------------------------------------------------------------------


def write_json(path: Path, content: object) -> None:
    """Write indented JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")


def read_struct(path: Path, type_: type[RecordT]) -> RecordT:
    """Read JSON of a type; raises CheckpointError if it is missing or invalid."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=preload_type(type_))
    except FileNotFoundError:
        raise CheckpointError(f"{short_path(path)} is missing") from None
    except OSError as error:
        # Keeps the cause: an I/O error does not mean that the checkpoint is damaged.
        raise CheckpointError(
            f"{short_path(path)} cannot be read: {error.strerror or error}"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{short_path(path)} cannot be read: {error}") from None


def short_path(path: Path) -> str:
    """A file's name for messages, without the full path on the server."""
    return f"{path.parent.name}/{path.name}"
