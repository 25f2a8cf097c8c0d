"""What was downloaded, exported or pushed, as it is printed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.cli.format import format_bool, format_size
from tinkex.cli.output.base import PropertiesOutput

if TYPE_CHECKING:
    from tinkex.engine.models.uploads import HubUploadResult


@dataclass(frozen=True, slots=True)
class FileTotals:
    """How much is at a place."""

    num_bytes: int
    num_files: int

    @classmethod
    def measure(cls, place: Path) -> FileTotals:
        """Look at a file, or at all files below a folder."""
        found = (
            [place]
            if place.is_file()
            else [file for file in place.rglob("*") if _is_regular_file(file)]
        )
        return cls(sum(file.stat().st_size for file in found), len(found))


def _is_regular_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


class CheckpointDownload(PropertiesOutput):
    """A checkpoint that has arrived."""

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
    """A checkpoint that other tools can load."""

    def __init__(
        self, data: dict[str, Any], destination: Path, contents: FileTotals, base_model: str | None
    ) -> None:
        """`data` says what was exported, and as what."""
        about = {
            "destination": str(destination),
            "base_model": base_model,
            "file_size_bytes": contents.num_bytes,
            "num_files": contents.num_files,
        }
        rows = [
            ("Checkpoint Path", data["checkpoint_path"]),
            ("Format", _EXPORT_FORMATS[data["format"]]),
            ("Base Model", base_model or "N/A"),
            ("Total Size", format_size(contents.num_bytes)),
            ("Exported to", str(destination)),
        ]
        super().__init__(data | about, rows, f"Checkpoint Export: {data['checkpoint_path']}")


_EXPORT_FORMATS = {"peft": "PEFT adapter", "merged": "full model, adapter merged in"}


class CheckpointPush(PropertiesOutput):
    """A checkpoint that is on the hub now."""

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
