"""Valid and invalid checkpoints that a stub server offers for download."""

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
    """The manifest of a checkpoint's files."""
    rows = {
        name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
    }
    return json.dumps({"files": rows}).encode()


def offer_files(server: StubServer, files: Mapping[str, bytes]) -> None:
    """Serve the next requested checkpoint as these files."""
    urls = {name: f"{server.url}/api/v1/files/offer/{name}" for name in files}
    answer = {"urls": urls, "expires": "2100-01-01T00:00:00Z"}
    server.inject("external_weights_urls", Fault(status=200, body=answer), times=None)
    for name, content in files.items():
        server.inject(
            "download",
            Fault(status=200, body=content),
            times=None,
            match=lambda call, name=name: call.path.endswith(f"/{name}"),  # type: ignore[misc]
        )


def refuse_file_links(server: StubServer) -> None:
    """Offer training and sampler weights as archives only, like the official server."""
    server.inject(
        "external_weights_urls",
        Fault(status=400, body={"detail": "these weights were not exported"}),
        times=None,
        match=lambda call: "/external_weights/" not in call.path,
    )


def offer_archive(server: StubServer, archive: bytes) -> None:
    """Serve checkpoints as archives with this content."""
    refuse_file_links(server)
    server.inject("download", Fault(status=200, body=archive), times=None)


def tar(members: Mapping[str, bytes | tarfile.TarInfo], *, is_packed: bool = False) -> bytes:
    """Build an archive of files or raw headers."""
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
    """Build the tar header of a link."""
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def folder_of(place: Path, path: str) -> Path:
    """Return the download folder of a checkpoint."""
    return place / checkpoint_folder_name(parse_tinker_path(path))


def names(place: Path) -> list[str]:
    """Return the entries of a folder, including hidden ones."""
    return sorted(path.name for path in place.iterdir())
