"""The root of step checkpoints: which steps are in it, which can be trusted, which may go."""

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
#: Without these a directory is no checkpoint; with these alone it is one of the older kind.
REQUIRED_FILES = (MODEL_FILE, OPTIMIZER_FILE, STATE_FILE)
#: A file of this name in a step's directory keeps it from being pruned.
PIN_FILE = "pinned"
#: A file, not a link, that holds the name of the newest step.
LATEST_FILE = "latest"
#: A step that is being written again lies under this name until its new version is in place.
REPLACED_PREFIX = ".replaced-"
#: Folders in the root, by number, of steps that a run left behind when it went back.
ABANDONED_PREFIX = "abandoned_"

_STEP_PATTERN = re.compile(r"step_([0-9]+)")

log = get_logger(__name__)


def step_name(step: int) -> str:
    """The directory of a step."""
    return f"step_{step:08d}"


def step_number(path: Path) -> int | None:
    """The step a directory is named after, or None."""
    found = _STEP_PATTERN.fullmatch(path.name)
    return int(found[1]) if found else None


def find_step_problem(path: Path, *, verify_digests: bool = False) -> str | None:
    """Why a directory cannot be trusted as a checkpoint, or None; deep reads every byte."""
    if not path.is_dir():
        return f"{path} is no directory"
    missing = _find_missing_file(path)
    if missing is not None:
        return missing
    if (path / MANIFEST_NAME).exists():
        return _find_manifest_problem(path, verify_digests)
    # Somebody else may have taken it away just now: then it is no checkpoint of the older kind.
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
            return f"{name} is no file"
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
    """True for a directory with the three files, as long as its manifest says if it has one."""
    return find_step_problem(path) is None


#: How often the steps are listed again because a writer changed them meanwhile.
MAX_LISTINGS = 10


def list_steps(root: Path) -> Iterator[tuple[int, Path]]:
    """Every directory named after a step, the highest number first, valid or not.

    Only looks: whoever reads must not rename what somebody else is writing.
    """
    if not root.is_dir():
        return
    found = [(step_number(path), path) for path in root.iterdir()]
    numbered = [(step, path) for step, path in found if step is not None and path.is_dir()]
    yield from sorted(numbered, reverse=True)


def latest_step(
    root: Path, *, below: int | None = None, verify_digests: bool = False
) -> Path | None:
    """The valid step with the highest number, or None; warns about what it passes over.

    A writer may remove every listed step after it wrote newer ones: then the new ones are listed.
    """
    for _ in range(MAX_LISTINGS):
        steps = list(list_steps(root))
        for step, path in steps:
            if below is not None and step >= below:
                continue
            problem = find_step_problem(path, verify_digests=verify_digests)
            if problem is None:
                return path
            log.warning("checkpoint %s is passed over: %s", path, problem)
        if list(list_steps(root)) == steps:
            break
    return None


def prune_steps(
    root: Path, retention: StepRetention, *, best: int | None = None, newest: int | None = None
) -> list[Path]:
    """Remove the steps nobody wants and the broken ones below the newest good; returns them.

    With `newest`, the step that a run has just written, later ones are left alone and do not
    count: the run has passed over them or went back behind them.
    """
    if retention.keep_last <= 0 or not root.is_dir():
        return []
    recover_replaced_steps(root)
    steps = [(step, path) for step, path in list_steps(root) if newest is None or step <= newest]
    broken = {path: find_step_problem(path) for _, path in steps}
    valid = [step for step, path in steps if broken[path] is None]
    pinned = [step for step, path in steps if (path / PIN_FILE).exists()]
    kept = choose_steps_to_keep(valid, retention, best=best, pinned=pinned)
    last = max(valid, default=-1)
    removed = []
    for step, path in steps:
        if step in pinned or step in kept or step >= last:
            continue
        if broken[path] is not None:
            log.warning("checkpoint %s is removed: %s", path, broken[path])
        remove_directory(path)
        removed.append(path)
    return removed


def archive_later_steps(root: Path, step: int) -> Path | None:
    """Move the good steps after `step` into a folder, where nobody takes them for the newest."""
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
        "training goes on from step %d, so %d later checkpoints are moved to %s",
        *(step, len(later), folder),
    )
    return folder


def write_latest(root: Path, path: Path) -> None:
    """Write down which step is the newest, for those who look with other programs."""
    write_file_atomic(root / LATEST_FILE, f"{path.name}\n".encode(), mode=0o644)


def remove_interrupted_saves(root: Path) -> int:
    """Remove what a dead writer left behind; only whoever alone writes here may ask for it."""
    if not root.is_dir():
        return 0
    recover_replaced_steps(root)
    return remove_scratch(root)


def recover_replaced_steps(root: Path) -> None:
    """Put back a step whose writer died while it replaced it, and drop what was replaced.

    Only whoever alone writes here may ask for it.
    """
    for old in root.glob(f"{REPLACED_PREFIX}step_*"):
        final = root / old.name.removeprefix(REPLACED_PREFIX)
        if final.exists():
            remove_directory(old)
        else:
            old.rename(final)
