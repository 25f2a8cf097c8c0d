"""Which test files start processes, send signals or fill a disk."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Unit tests start no process; their conftest enforces it.
RINGS = ("tests/integration", "tests/acceptance")
#: A file that uses one of these can behave differently on a busy machine.
SIGNS = re.compile(
    r"\bsubprocess\b|\bmultiprocessing\b|\bProcessPoolExecutor\b|\bPostgresServer\b"
    r"|\bos\.(?:fork|kill|killpg|posix_spawn|system|openpty)\b|\bpty\.|\bsignal\.(?:raise_|SIG)"
    r"|\bpostgres\b|\brun_on_small_disk\b|\bENOSPC\b|\bnum_workers\b"
)


def process_tests(under: Iterable[str] = RINGS) -> list[str]:
    """The selected test files below these files or directories, relative to the repository."""
    found = [path for start in under for path in _test_files(ROOT / start)]
    return sorted(str(path.relative_to(ROOT)) for path in set(found) if is_selected(path))


def is_selected(test: Path) -> bool:
    """Whether a test file, its conftest or a test module that it imports shows one of the signs."""
    return any(SIGNS.search(path.read_text("utf-8")) for path in _sources(test))


def _test_files(start: Path) -> Iterator[Path]:
    if start.is_file():
        yield start
    yield from start.rglob("test_*.py")


def _sources(test: Path) -> set[Path]:
    """The file and all test modules that it uses."""
    waiting, seen = [test, *_conftests(test)], set[Path]()
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen.add(path)
            waiting += _imported(path)
    return seen


def _conftests(test: Path) -> list[Path]:
    # The one of all rings offers PostgreSQL to everyone; a test that takes it names it.
    folders = [each for each in test.parents if (ROOT / "tests") in each.parents]
    return [path for each in folders if (path := each / "conftest.py").is_file()]


@cache
def _imported(path: Path) -> tuple[Path, ...]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
        elif isinstance(node, ast.Import):
            names += [each.name for each in node.names]
    files = [ROOT / f"{name.replace('.', '/')}.py" for name in names if name.startswith("tests.")]
    return tuple(file for file in files if file.is_file())
