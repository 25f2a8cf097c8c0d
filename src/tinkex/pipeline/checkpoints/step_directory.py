"""The root directory of step checkpoints: layout, validation and pruning."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from tinkex.checkpoint.manifest import MANIFEST_NAME, check_manifest, read_manifest
from tinkex.checkpoint.retention import StepRetention, choose_steps_to_keep
from tinkex.errors import CheckpointError
from tinkex.logs import get_logger
from tinkex.system.atomic import fsync_path, remove_directory, remove_scratch, write_file_atomic

MODEL_FILE = "model.pth"
OPTIMIZER_FILE = "optimizer.pt"
STATE_FILE = "state.json"
RNG_FILE = "rng.pt"
CONFIG_FILE = "config.json"
#: Every checkpoint has these files; one without a manifest is in the older format.
REQUIRED_FILES = (MODEL_FILE, OPTIMIZER_FILE, STATE_FILE)
#: A file of this name in a step directory protects it from pruning.
PIN_FILE = "pinned"
#: A file (not a link) that contains the name of the newest step.
LATEST_FILE = "latest"
#: Prefix of a step that is being replaced, until the new version is in place.
REPLACED_PREFIX = ".replaced-"
#: Prefix of numbered folders for later steps that a rewound run left behind.
ABANDONED_PREFIX = "abandoned_"

_STEP_PATTERN = re.compile(r"step_([0-9]+)")

log = get_logger(__name__)


def step_name(step: int) -> str:
    """Return the directory name of a step."""
    return f"step_{step:08d}"


def step_number(path: Path) -> int | None:
    """Return the step number in a directory name, or None."""
    match = _STEP_PATTERN.fullmatch(path.name)
    return int(match[1]) if match else None


def find_step_problem(path: Path, *, verify_digests: bool = False) -> str | None:
    """Return why a directory is not a valid checkpoint, or None.

    Without `verify_digests` only file sizes are compared.
    """
    if not path.is_dir():
        return f"{path} is not a directory"
    missing = _find_missing_file(path)
    if missing is not None:
        return missing
    if (path / MANIFEST_NAME).exists():
        return _find_manifest_problem(path, verify_digests)
    # Check again: another process may have removed the directory in the meantime.
    return _find_missing_file(path)


def _find_missing_file(path: Path) -> str | None:
    for name in REQUIRED_FILES:
        file = path / name
        try:
            if not file.stat().st_size:
                return f"{name} is empty"
        except OSError:
            return f"{name} is missing"
        if not file.is_file():
            return f"{name} is not a file"
    return None


def _find_manifest_problem(path: Path, verify_digests: bool) -> str | None:
    try:
        if verify_digests:
            check_manifest(path)
            return None
        for name, expected in read_manifest(path).files.items():
            size = (path / name).stat().st_size
            if size != expected.size:
                return f"{name} has {size} bytes, expected {expected.size}"
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return None


def is_valid_step(path: Path) -> bool:
    """Return True if the required files exist with the sizes of the manifest, if there is one."""
    return find_step_problem(path) is None


#: Maximum number of listings when a writer changes the directory in the meantime.
MAX_LISTINGS = 10


def list_steps(root: Path) -> Iterator[tuple[int, Path]]:
    """Yield all step directories, valid or not, the highest number first.

    Read-only: a reader must not rename directories of a running writer.
    """
    if not root.is_dir():
        return
    entries = [(step_number(path), path) for path in root.iterdir()]
    numbered = [(step, path) for step, path in entries if step is not None and path.is_dir()]
    yield from sorted(numbered, reverse=True)


def latest_step(
    root: Path, *, below: int | None = None, verify_digests: bool = False
) -> Path | None:
    """Return the highest valid step, or None; logs a warning for each invalid one.

    Lists again if a writer replaced all listed steps by newer ones in the meantime.
    """
    for _ in range(MAX_LISTINGS):
        steps = list(list_steps(root))
        for step, path in steps:
            if below is not None and step >= below:
                continue
            problem = find_step_problem(path, verify_digests=verify_digests)
            if problem is None:
                return path
            log.warning("skipping checkpoint %s: %s", path, problem)
        if list(list_steps(root)) == steps:
            break
    return None


def prune_steps(
    root: Path, retention: StepRetention, *, best: int | None = None, newest: int | None = None
) -> list[Path]:
    """Remove expired steps, and invalid ones below the newest valid step; returns them.

    With `newest`, the step that a run has just written, later steps are ignored: the run skipped
    them or was rewound.
    """
    if retention.keep_last <= 0 or not root.is_dir():
        return []
    recover_replaced_steps(root)
    steps = [(step, path) for step, path in list_steps(root) if newest is None or step <= newest]
    broken = {path: find_step_problem(path) for _, path in steps}
    valid = [step for step, path in steps if broken[path] is None]
    pinned = [step for step, path in steps if (path / PIN_FILE).exists()]
    retained = choose_steps_to_keep(valid, retention, best=best, pinned=pinned)
    last = max(valid, default=-1)
    removed = []
    for step, path in steps:
        if step in pinned or step in retained or step >= last:
            continue
        if broken[path] is not None:
            log.warning("removing checkpoint %s: %s", path, broken[path])
        remove_directory(path)
        removed.append(path)
    return removed


def archive_later_steps(root: Path, step: int) -> Path | None:
    """Move the valid steps after `step` into a folder, so that none is taken for the newest."""
    later = [path for number, path in list_steps(root) if number > step and is_valid_step(path)]
    if not later:
        return None
    numbered = (root / f"{ABANDONED_PREFIX}{number}" for number in count(1))
    folder = next(path for path in numbered if not path.exists())
    folder.mkdir()
    for path in later:
        path.rename(folder / path.name)
    fsync_path(folder)
    fsync_path(root)
    log.warning(
        "training resumes from step %d; %d later checkpoints were moved to %s",
        *(step, len(later), folder),
    )
    return folder


def write_latest(root: Path, path: Path) -> None:
    """Write the name of the newest step, for other programs."""
    write_file_atomic(root / LATEST_FILE, f"{path.name}\n".encode(), mode=0o644)


def remove_interrupted_saves(root: Path) -> int:
    """Remove leftovers of a writer that died; call it only from the single writer."""
    if not root.is_dir():
        return 0
    recover_replaced_steps(root)
    return remove_scratch(root)


def recover_replaced_steps(root: Path) -> None:
    """Restore a step whose replacement was interrupted, and remove old versions.

    Call it only from the single writer.
    """
    for old in root.glob(f"{REPLACED_PREFIX}step_*"):
        final = root / old.name.removeprefix(REPLACED_PREFIX)
        if final.exists():
            remove_directory(old)
        else:
            old.rename(final)
