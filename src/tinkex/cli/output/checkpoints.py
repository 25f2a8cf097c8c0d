"""Output of checkpoint commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from tinkex.cli.format import format_bool, format_optional, format_size, format_timestamp
from tinkex.cli.output.base import Column, Output, PropertiesOutput, list_title
from tinkex.cli.output.runs import metadata_rows
from tinkex.ids import parse_tinker_path

if TYPE_CHECKING:
    from tinkex.cli.client import Listing
    from tinkex.engine.models.hub_upload import HubUploadResult
    from tinkex.types import Checkpoint, TrainingRun


class CheckpointColumn(NamedTuple):
    """A column that a list of checkpoints can show."""

    column: Column
    cell: Callable[[Checkpoint], str]
    summary: str


CHECKPOINT_COLUMNS = {
    "id": CheckpointColumn(
        Column("Checkpoint ID", 4), lambda saved: saved.checkpoint_id, "id within its run"
    ),
    "type": CheckpointColumn(
        Column("Type", 3), lambda saved: saved.checkpoint_type, "training, sampler or external"
    ),
    "size": CheckpointColumn(
        Column("Size", 2, is_number=True),
        lambda saved: format_size(saved.size_bytes),
        "size of its files",
    ),
    "public": CheckpointColumn(
        Column("Public", 6), lambda saved: format_bool(saved.public), "whether it is public"
    ),
    "created": CheckpointColumn(
        Column("Created", 1), lambda saved: format_timestamp(saved.time), "creation time"
    ),
    "expires": CheckpointColumn(
        Column("Expires", 5), lambda saved: _format_expiry(saved), "expiry time"
    ),
    "path": CheckpointColumn(Column("Path"), lambda saved: saved.tinker_path, "tinker:// path"),
    "run": CheckpointColumn(Column("Run ID", 4), lambda saved: _get_run_id(saved), "id of its run"),
    "model": CheckpointColumn(
        Column("Base Model", 4), lambda saved: format_optional(saved.base_model), "its base model"
    ),
}
DEFAULT_CHECKPOINT_COLUMNS = ("id", "type", "size", "public", "created", "expires", "path")


def _format_expiry(saved: Checkpoint) -> str:
    return format_timestamp(saved.expires_at) if saved.expires_at else "Never"


def _get_run_id(saved: Checkpoint) -> str:
    return parse_tinker_path(saved.tinker_path).run_id


class CheckpointList(Output):
    """A list of checkpoints."""

    def __init__(
        self,
        checkpoints: Listing[Checkpoint],
        run_id: str | None = None,
        columns: Sequence[str] | None = None,
    ) -> None:
        """Columns chosen by name are always shown, even on a narrow screen."""
        self._checkpoints = checkpoints
        self._run_id = run_id
        self._names = tuple(columns or DEFAULT_CHECKPOINT_COLUMNS)
        self._is_chosen = columns is not None

    def to_dict(self) -> dict[str, object]:
        """The official JSON fields, plus the counts."""
        shown = [saved.model_dump() for saved in self._checkpoints.items]
        about = {"run_id": self._run_id} if self._run_id else {}
        counts = {"total": self._checkpoints.total, "shown": len(shown)}
        return {**about, "checkpoints": shown, **counts}

    def columns(self) -> Sequence[Column]:
        """The chosen columns."""
        chosen = [CHECKPOINT_COLUMNS[name].column for name in self._names]
        return [column._replace(rank=0) for column in chosen] if self._is_chosen else chosen

    def rows(self) -> Sequence[Sequence[str]]:
        """A row per checkpoint."""
        return [
            [CHECKPOINT_COLUMNS[name].cell(saved) for name in self._names]
            for saved in self._checkpoints.items
        ]

    def title(self) -> str:
        """The number of checkpoints, and their run."""
        about = f" for run {self._run_id}" if self._run_id else ""
        listing = self._checkpoints
        return list_title(len(listing.items), listing.num_hidden, "checkpoint", about)


class AliasList(Output):
    """A list of aliases."""

    def __init__(self, path_by_name: Mapping[str, str]) -> None:
        self._path_by_name = path_by_name

    def to_dict(self) -> dict[str, object]:
        """The aliases by name."""
        return {"aliases": dict(self._path_by_name)}

    def columns(self) -> Sequence[Column]:
        """Name and path."""
        return [Column("Alias"), Column("Path")]

    def rows(self) -> Sequence[Sequence[str]]:
        """One row per alias."""
        return [list(item) for item in self._path_by_name.items()]


class CheckpointInfo(PropertiesOutput):
    """One checkpoint with properties of its run."""

    def __init__(self, saved: Checkpoint, run: TrainingRun) -> None:
        lora = f"Yes (Rank {run.lora_rank})" if run.is_lora and run.lora_rank else None
        rows = [
            ("Checkpoint ID", saved.checkpoint_id),
            ("Type", saved.checkpoint_type),
            ("Tinker Path", saved.tinker_path),
            ("Size", format_optional(saved.size_bytes, format_size)),
            ("Public", format_bool(saved.public)),
            ("Created", format_timestamp(saved.time)),
            ("Expires", _format_expiry(saved)),
            ("Training Run ID", run.training_run_id),
            ("Base Model", run.base_model),
            ("LoRA", lora or format_bool(run.is_lora)),
            *metadata_rows(saved.user_metadata),
        ]
        data = saved.model_dump() | {"is_lora": run.is_lora, "lora_rank": run.lora_rank}
        more = {"training_run_id": run.training_run_id, "base_model": run.base_model}
        super().__init__(data | more, rows, f"Checkpoint: {saved.checkpoint_id}")


@dataclass(frozen=True, slots=True)
class FileTotals:
    """Number and total size of files."""

    num_bytes: int
    num_files: int

    @classmethod
    def measure(cls, path: Path) -> FileTotals:
        """Measure a file, or all files below a folder."""
        files = (
            [path]
            if path.is_file()
            else [file for file in path.rglob("*") if _is_regular_file(file)]
        )
        return cls(sum(file.stat().st_size for file in files), len(files))


def _is_regular_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


class CheckpointDownload(PropertiesOutput):
    """A downloaded checkpoint."""

    def __init__(self, checkpoint_path: str, destination: Path, contents: FileTotals) -> None:
        data = {
            "checkpoint_path": checkpoint_path,
            "destination": str(destination),
            "file_size_bytes": contents.num_bytes,
            "num_files": contents.num_files,
        }
        rows = [
            ("Checkpoint Path", checkpoint_path),
            ("Total Size", format_size(contents.num_bytes)),
            ("Files", str(contents.num_files)),
            ("Downloaded to", str(destination)),
        ]
        super().__init__(data, rows, f"Checkpoint Download: {checkpoint_path}")


class CheckpointExport(PropertiesOutput):
    """An exported checkpoint."""

    def __init__(
        self,
        checkpoint_path: str,
        format: Literal["peft", "merged"],
        dtype: str | None,
        *,
        destination: Path,
        contents: FileTotals,
        base_model: str | None,
    ) -> None:
        data = {
            "checkpoint_path": checkpoint_path,
            "format": format,
            "dtype": dtype,
            "destination": str(destination),
            "base_model": base_model,
            "file_size_bytes": contents.num_bytes,
            "num_files": contents.num_files,
        }
        rows = [
            ("Checkpoint Path", checkpoint_path),
            ("Format", _EXPORT_FORMATS[format]),
            ("Base Model", base_model or "N/A"),
            ("Total Size", format_size(contents.num_bytes)),
            ("Exported to", str(destination)),
        ]
        super().__init__(data, rows, f"Checkpoint Export: {checkpoint_path}")


_EXPORT_FORMATS = {"peft": "PEFT adapter", "merged": "full model, adapter merged in"}


class CheckpointPush(PropertiesOutput):
    """A checkpoint uploaded to the hub."""

    def __init__(self, checkpoint_path: str, pushed: HubUploadResult) -> None:
        known = {
            "checkpoint_path": checkpoint_path,
            "repo_id": pushed.repo_id,
            "revision": pushed.revision,
            "public": pushed.is_public,
            "url": pushed.url,
            "files": list(pushed.files),
            "commit_url": pushed.commit_url,
            "pr_url": pushed.pr_url,
        }
        rows = [
            ("Checkpoint Path", checkpoint_path),
            ("Repo ID", pushed.repo_id),
            *([("Revision", pushed.revision)] if pushed.revision else []),
            ("Public", format_bool(pushed.is_public)),
            ("Files", str(len(pushed.files))),
            ("URL", pushed.url),
            *([("Pull Request", pushed.pr_url)] if pushed.pr_url else []),
        ]
        data = {key: value for key, value in known.items() if value is not None}
        super().__init__(data, rows, f"Checkpoint Hub Upload: {checkpoint_path}")
