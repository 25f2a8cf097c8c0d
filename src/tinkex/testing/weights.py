"""Checkpoints in memory, and the files they are downloaded as."""

from __future__ import annotations

import hashlib
import io
import struct
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import msgspec

from tinkex import clock
from tinkex.engine.fake.bigram import Bigram, Moments
from tinkex.errors import InvalidInput
from tinkex.ids import TinkerPath, check_ttl
from tinkex.testing.answers import Refusal

ARCHIVE_NAME = "archive.tar"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a model is trained: what a checkpoint must remember of it besides the weights."""

    base_model: str
    rank: int = 32
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True
    optimizer_config: Mapping[str, Any] = field(default_factory=lambda: {"type": "adamw"})


@dataclass(slots=True, eq=False, kw_only=True)
class Checkpoint:
    """Saved weights; arrays never change, so nothing is copied."""

    path: TinkerPath
    tenant: str
    recipe: Recipe
    model: Bigram
    moments: Moments | None = None
    """The optimizer's memory; training checkpoints have it."""
    created_at: datetime = field(default_factory=clock.utc_now)
    expires_at: datetime | None = None
    is_public: bool = False
    user_metadata: Mapping[str, Any] | None = None
    _files: dict[str, bytes] | None = None

    @property
    def is_alive(self) -> bool:
        """False once its time to live has passed."""
        return self.expires_at is None or self.expires_at > clock.utc_now()

    @property
    def size_bytes(self) -> int:
        """What it would take on disk."""
        num_tables = 3 if self.moments is not None else 1
        return num_tables * self.model.logits_VV.size * 4

    def set_ttl(self, ttl_seconds: int | None) -> None:
        """Let it live this long from now; None lets it live for ever."""
        try:
            check_ttl(ttl_seconds)
        except InvalidInput as error:
            raise Refusal(400, error.message) from None
        self.expires_at = (
            None if ttl_seconds is None else clock.utc_now() + timedelta(seconds=ttl_seconds)
        )

    def describe(self) -> dict[str, Any]:
        """The checkpoint as lists show it."""
        return {
            "checkpoint_id": self.path.checkpoint_id,
            "checkpoint_type": self.path.checkpoint_type,
            "time": self.created_at,
            "tinker_path": str(self.path),
            "size_bytes": self.size_bytes,
            "public": self.is_public,
            "user_metadata": self.user_metadata,
            "expires_at": self.expires_at,
        }

    def files(self) -> dict[str, bytes]:
        """The files of a PEFT adapter directory, by name."""
        if self._files is None:
            self._files = {
                "adapter_config.json": msgspec.json.encode(_adapter_config(self.recipe)),
                "adapter_model.safetensors": _safetensors(self.model),
            }
        return self._files

    def archive(self) -> bytes:
        """The files as one tar."""
        target = io.BytesIO()
        with tarfile.open(fileobj=target, mode="w") as tar:
            for name, content in self.files().items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        return target.getvalue()


def _adapter_config(recipe: Recipe) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": recipe.base_model,
        "r": recipe.rank,
        "lora_alpha": recipe.rank,
        "target_modules": ["bigram"],
    }


def _safetensors(model: Bigram) -> bytes:
    """The table in the safetensors format: a length, a JSON header, raw numbers."""
    data = model.logits_VV.astype("<f4").tobytes()
    header = msgspec.json.encode(
        {
            "bigram.logits": {
                "dtype": "F32",
                "shape": list(model.logits_VV.shape),
                "data_offsets": [0, len(data)],
            }
        }
    )
    # The format wants the numbers aligned to eight bytes.
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + data


def file_etag(content: bytes) -> str:
    """The entity tag of a file."""
    return f'"{hashlib.sha256(content).hexdigest()[:32]}"'


class Vault:
    """All checkpoints by path; an expired one is as good as gone."""

    def __init__(self) -> None:
        self._by_path: dict[str, Checkpoint] = {}

    def add(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint, in place of one with the same path."""
        self._by_path[str(checkpoint.path)] = checkpoint

    def find(self, path: str) -> Checkpoint | None:
        """A checkpoint that is alive."""
        checkpoint = self._by_path.get(path)
        return checkpoint if checkpoint is not None and checkpoint.is_alive else None

    def remove(self, checkpoint: Checkpoint) -> None:
        """Delete a checkpoint."""
        self._by_path.pop(str(checkpoint.path), None)

    def owned(self, tenant: str, run_id: str | None = None) -> list[Checkpoint]:
        """The tenant's checkpoints, newest first; of one run if it is named."""
        found = [
            checkpoint
            for checkpoint in self._by_path.values()
            if checkpoint.tenant == tenant
            and checkpoint.is_alive
            and run_id in {None, checkpoint.path.run_id}
        ]
        return found[::-1]
