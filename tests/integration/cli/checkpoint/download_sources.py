"""Checkpoints that a stub server offers for download, as good or as bad as a test likes."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

from tinkex.cli.commands.checkpoint.download import checkpoint_folder_name
from tinkex.ids import parse_tinker_path
from tinkex.testing import Fault, StubServer

CONFIG = json.dumps(
    {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "org/base",
        "r": 8,
        "lora_alpha": 32,
        "target_modules": ["q_proj"],
    }
).encode()
WEIGHTS = "adapter_model.safetensors"
ADAPTER = {"adapter_config.json": CONFIG, WEIGHTS: bytes(range(256)) * 400}


def manifest(files: Mapping[str, bytes]) -> bytes:
    """The list that a server puts beside its files."""
    rows = {
        name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
    }
    return json.dumps({"files": rows}).encode()


def offer_files(server: StubServer, files: Mapping[str, bytes]) -> None:
    """Let the next checkpoint that is asked for consist of these files."""
    urls = {name: f"{server.url}/files/offer/{name}" for name in files}
    answer = {"urls": urls, "expires": "2100-01-01T00:00:00Z"}
    server.inject("external_weights_urls", Fault(status=200, body=answer), times=None)
    for name, content in files.items():
        server.inject(
            "download",
            Fault(status=200, body=content),
            times=None,
            match=lambda call, name=name: call.path.endswith(f"/{name}"),  # type: ignore[misc]
        )


def offer_archive(server: StubServer, archive: bytes) -> None:
    """Let the next checkpoint that comes as an archive be this one."""
    server.inject("download", Fault(status=200, body=archive), times=None)


def tar(members: Mapping[str, bytes | tarfile.TarInfo], *, is_packed: bool = False) -> bytes:
    """An archive of files, or of whatever a header says."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                archive.addfile(content)
                continue
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return gzip.compress(target.getvalue()) if is_packed else target.getvalue()


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    """A header of a link."""
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def folder_of(place: Path, path: str) -> Path:
    """Where a checkpoint's folder is made."""
    return place / checkpoint_folder_name(parse_tinker_path(path))


def names(place: Path) -> list[str]:
    """What is in a folder, hidden or not."""
    return sorted(path.name for path in place.iterdir())
