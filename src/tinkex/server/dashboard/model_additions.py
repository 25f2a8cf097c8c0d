"""Adding a base model to a running server: which ones the operator may add, and the command.

A model is added by `tinkex model add` in a process of its own, because it may download and convert
weights. The worker notices the changed model list by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tinkex import clock
from tinkex.engine.models.pip_models import PIP_MODELS
from tinkex.engine.models.sources import check_model_name
from tinkex.errors import BadRequestError, ConfigError, ConflictError
from tinkex.server.config import ServerConfig
from tinkex.server.http.request_context import Services
from tinkex.server.http.store_access import write
from tinkex.settings import expand_path
from tinkex.store import settings
from tinkex.store.database import Connection

#: An addition that takes longer is ended; a large package takes minutes to download.
MAX_ADDITION_SECONDS = 3600.0
#: Entries of each folder of `model_folders` that are looked at.
MAX_FOLDER_ENTRIES = 1000
MAX_MESSAGE_CHARS = 500
_SETTING = "model_addition"
#: The event loop itself has only weak references to its tasks.
_TASKS: set[asyncio.Task[None]] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A model that the operator may add."""

    name: str
    location: str
    """The folder or GGUF file; empty for a package."""

    @property
    def value(self) -> str:
        """Name and location as the text of a form's option."""
        return msgspec.json.encode([self.name, self.location]).decode()

    @property
    def arguments(self) -> list[str]:
        """The arguments of `tinkex model add`."""
        return [self.name, self.location] if self.location else [self.name]


class Addition(msgspec.Struct, frozen=True, kw_only=True):
    """The last model that was added on the dashboard, or is being added."""

    name: str
    started_at: float
    finished_at: float | None = None
    error: str = ""

    def is_running(self, now: float) -> bool:
        """Whether it is in progress; one whose process was lost ends after the time limit."""
        return self.finished_at is None and now < self.started_at + MAX_ADDITION_SECONDS


def can_add(config: ServerConfig) -> bool:
    """Whether a running server notices models that are added to the list in its home."""
    return config.engine == "local" and not config.cluster


def list_candidates(config: ServerConfig, served: Sequence[str]) -> list[Candidate]:
    """List the packages and the models in `model_folders` that are not served yet."""
    packages = [Candidate(name=name, location="") for name in PIP_MODELS]
    folders = [candidate for root in config.model_folders for candidate in _scan_folder(root)]
    return [each for each in [*packages, *folders] if each.name not in served]


def _scan_folder(root: str) -> Iterator[Candidate]:
    folder = expand_path(root).resolve()
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir())[:MAX_FOLDER_ENTRIES]:
            # A link must not lead out of the folder that the operator has allowed.
            if path.name.startswith(".") or path.resolve().parent != folder:
                continue
            name = _model_name(path)
            if name:
                yield Candidate(name=name, location=str(path))


def _model_name(path: Path) -> str:
    """The name of the model in a folder or GGUF file; empty if it is none."""
    is_gguf = path.suffix.lower() == ".gguf" and path.is_file()
    if not is_gguf and not (path / "config.json").is_file():
        return ""
    try:
        return check_model_name(path.stem if is_gguf else path.name)
    except ConfigError:
        return ""


def read_addition(db: Connection) -> Addition | None:
    """Return the last addition."""
    stored = settings.get(db, _SETTING)
    return msgspec.convert(stored, Addition) if isinstance(stored, Mapping) else None


def choose_candidate(config: ServerConfig, name: str, location: str) -> Candidate:
    """Return the named candidate; raises BadRequestError if the operator has not allowed it."""
    if not can_add(config):
        raise BadRequestError(
            "this server takes its models from its settings; add the model there and restart it"
        )
    for candidate in list_candidates(config, ()):
        if (candidate.name, candidate.location) == (name, location):
            return candidate
    raise BadRequestError(
        f"{name!r:.200} is neither a package nor a model in a folder of the setting model_folders"
    )


async def start_addition(services: Services, candidate: Candidate) -> None:
    """Start to add a model; raises ConflictError while another one is being added."""
    now = clock.now()
    addition = Addition(name=candidate.name, started_at=now)

    def begin(db: Connection) -> None:
        last = read_addition(db)
        if last is not None and last.is_running(now):
            raise ConflictError(f"{last.name} is being added; try again when it is done")
        _store(db, addition)

    await write(services, begin)
    task = asyncio.create_task(_add(services, candidate, addition))
    _TASKS.add(task)
    task.add_done_callback(_TASKS.discard)


async def _add(services: Services, candidate: Candidate, addition: Addition) -> None:
    error = "the server was stopped; add it again"
    try:
        error = await _run_command(services.home.root, candidate)
    finally:
        ended = msgspec.structs.replace(addition, finished_at=clock.now(), error=error)
        # Not awaited: the task may have been cancelled because the process stops.
        services.database.write_soon(lambda db: _store(db, ended))


async def _run_command(home: Path, candidate: Candidate) -> str:
    """Run `tinkex model add`; returns its error message, empty if it has succeeded."""
    process = await asyncio.create_subprocess_exec(
        *add_command(home, candidate),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(MAX_ADDITION_SECONDS):
            _, output = await process.communicate()
    except TimeoutError:
        return f"it was not added within {MAX_ADDITION_SECONDS:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    return "" if process.returncode == 0 else _last_message(output.decode(errors="replace"))


def add_command(home: Path, candidate: Candidate) -> list[str]:
    """The command that adds a model; a name that begins with a dash is not an option."""
    command = [sys.executable, "-P", "-m", "tinkex", "model", "add", "--home", str(home)]
    return [*command, "--", *candidate.arguments]


def _last_message(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    message = (errors or lines or ["the command failed without a message"])[-1]
    return message[:MAX_MESSAGE_CHARS]


def _store(db: Connection, addition: Addition) -> None:
    settings.put(db, _SETTING, msgspec.to_builtins(addition))
