"""Every requirement of the pipeline, and the tests that show that it is met.

R are the numbered requirements, W the faults of older scripts that this one must not have, S the
ten points of the format and of how a run is resumed.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NAMED = (ast.FunctionDef, ast.AsyncFunctionDef)
IDS = [
    *(f"R{number}" for number in range(1, 32)),
    *(f"W{number}" for number in range(1, 41)),
    *(f"S{number}" for number in range(1, 11)),
]
NOT_A_TESTS_MATTER = {
    "R3": "context: the languages and libraries to use",
    "W36": "the model predicts one token at a time: there is no second head to be off by one",
}

#: One test in each line, its path below tests/.
TABLE = Path(__file__).with_name("requirements.txt")
TRAINERS = ("train_pretrain", "train_full_sft", "train_dpo", "train_distill_reason")


def read_table() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = defaultdict(tuple)
    for line in filter(None, TABLE.read_text("utf-8").splitlines()):
        requirement, test = line.split()
        found[requirement] += (f"tests/{test}",)
    return dict(found)


REQUIREMENTS = read_table()


def test_every_requirement_is_shown_or_is_not_a_tests_matter() -> None:
    forgotten = [one for one in IDS if one not in REQUIREMENTS | NOT_A_TESTS_MATTER]
    assert not forgotten, f"no test and no reason for {', '.join(forgotten)}"
    twice = sorted(REQUIREMENTS.keys() & NOT_A_TESTS_MATTER.keys())
    assert not twice, f"both shown and called no test's matter: {', '.join(twice)}"
    unknown = sorted((REQUIREMENTS.keys() | NOT_A_TESTS_MATTER.keys()) - set(IDS))
    assert not unknown, f"no such requirement: {', '.join(unknown)}"


@cache
def body_of(path: str) -> dict[str, ast.stmt]:
    """The functions of a file by name; none when there is no such file."""
    file = ROOT / path
    body = ast.parse(file.read_text("utf-8")).body if file.exists() else []
    return {node.name: node for node in body if isinstance(node, NAMED)}


@pytest.mark.parametrize("requirement", REQUIREMENTS)
def test_the_tests_of_a_requirement_exist(requirement: str) -> None:
    for test in REQUIREMENTS[requirement]:
        path, _, name = test.partition("::")
        assert name.startswith("test_")
        assert name in body_of(path), f"{requirement} is shown by {test}, which does not exist"
    assert len(set(REQUIREMENTS[requirement])) == len(REQUIREMENTS[requirement])


# --- requirements about the code itself -------------------------------------------------------


def test_the_functions_have_the_agreed_signatures() -> None:
    """R12, R13: read, not imported, for torch is not needed to see them."""
    found = body_of("trainer/checkpoint_manager.py")
    agreed = {
        "is_valid_checkpoint": (["path"], []),
        "latest_checkpoint": (["ckpt_root"], []),
        "prune_checkpoints": (["ckpt_root", "keep_last"], []),
        "save_checkpoint": ([], ["ckpt_root", "step", "model", "optimizer", "scaler", "state"]),
        "load_checkpoint": ([], ["ckpt_path", "model", "optimizer", "scaler", "device"]),
    }
    for name, (positional, keywords) in agreed.items():
        function = found[name]
        assert isinstance(function, ast.FunctionDef)
        assert [one.arg for one in function.args.args] == positional
        assert [one.arg for one in function.args.kwonlyargs] == keywords


def modules_in(path: Path) -> set[str]:
    """What a file imports from."""
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    return {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


def test_all_trainers_save_by_one_primitive() -> None:
    """R2: one entry, one loop, one writer of steps, which scripts of others use too."""
    for name in TRAINERS:
        path = ROOT / "trainer" / f"{name}.py"
        assert modules_in(path) == {"__future__", "tinkex.pipeline.entry"}
    writers = ("trainer/checkpoint_manager.py", "src/tinkex/pipeline/checkpoints/saver.py")
    for writer in writers:
        assert "tinkex.pipeline.checkpoints.step_files" in modules_in(ROOT / writer)
    assert "tinkex.system.atomic" in modules_in(
        ROOT / "src/tinkex/pipeline/checkpoints/step_files.py"
    )
