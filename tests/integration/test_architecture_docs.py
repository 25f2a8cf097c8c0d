"""docs/architecture.md names only modules that exist, and every package and top-level module."""

from __future__ import annotations

import re

from tests.integration.doc_pages import DOCS, ROOT

SOURCE = ROOT / "src" / "tinkex"
PAGE = (DOCS / "architecture.md").read_text(encoding="utf-8")
#: Directories of the repository that the page mentions.
OUTSIDE = {"trainer/"}


def named_paths() -> set[str]:
    """Modules such as `client/http.py` and packages such as `nn/ops/`, in backticks."""
    return set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:/|\.py))`", PAGE)) - OUTSIDE


def packages() -> set[str]:
    """Packages of tinkex and their direct subpackages."""
    markers = [*SOURCE.glob("*/__init__.py"), *SOURCE.glob("*/*/__init__.py")]
    return {f"{marker.parent.relative_to(SOURCE).as_posix()}/" for marker in markers}


def test_every_named_module_exists() -> None:
    assert sorted(path for path in named_paths() if not (SOURCE / path).exists()) == []


def test_every_package_is_listed() -> None:
    assert sorted(packages() - named_paths()) == []


def test_every_top_level_module_is_listed() -> None:
    modules = {path.name for path in SOURCE.glob("*.py")} - {"__init__.py"}
    assert sorted(modules - set(re.findall(r"`(\w+\.py)`", PAGE))) == []


def test_the_layers_are_those_of_import_linter() -> None:
    config = (ROOT / ".importlinter").read_text(encoding="utf-8")
    [layers] = re.findall(r"containers = tinkex\nlayers =\n((?:    .+\n)+)", config)
    enforced = [set(line.split(" | ")) for line in layers.replace("    ", "").splitlines()]
    drawn = [set(box.split(" · ")) for box in re.findall(r'\["([a-z_ ·]+)"]', PAGE)]
    assert drawn == enforced[1:], "the diagram of packages differs from .importlinter"


def test_the_states_of_a_job_are_those_of_the_store() -> None:
    source = (SOURCE / "store" / "records.py").read_text(encoding="utf-8")
    body = source.partition("class JobState")[2].partition("\nclass ")[0]
    states = set(re.findall(r'^    [A-Z]+ = "(\w+)"', body, re.MULTILINE))
    diagram = PAGE.partition("stateDiagram-v2")[2].partition("```")[0]
    drawn = {name for pair in re.findall(r"(\S+) --> ([^\s:]+)", diagram) for name in pair}
    assert drawn - {"[*]"} == states
