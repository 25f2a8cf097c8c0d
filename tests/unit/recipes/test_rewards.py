from __future__ import annotations

from pathlib import Path

import pytest

from tinkex.errors import InvalidInput
from tinkex.recipes.rl import load_reward


def write_file(tmp_path: Path, body: str) -> str:
    path = tmp_path / "judge.py"
    path.write_text(body)
    return f"{path}:reward"


def test_reward_function_receives_row_and_text(tmp_path: Path) -> None:
    text = "def reward(row, text):\n    return row.pop('base') + len(text)\n"
    reward = load_reward(write_file(tmp_path, text))
    row = {"base": 1}
    assert reward(row, "abc") == 4.0
    assert row == {"base": 1}


def test_reward_file_may_use_dataclasses_and_import_neighbours(tmp_path: Path) -> None:
    (tmp_path / "beside_the_judge.py").write_text("WORTH = 3.0\n")
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from beside_the_judge import WORTH\n"
        "@dataclass\nclass Verdict:\n    worth: float = WORTH\n"
        "def reward(row, text): return Verdict().worth\n"
    )
    assert load_reward(write_file(tmp_path, text))({}, "x") == 3.0


def test_digest_is_that_of_the_file(tmp_path: Path) -> None:
    first = load_reward(write_file(tmp_path, "def reward(row, text): return 1\n")).digest
    second = load_reward(write_file(tmp_path, "def reward(row, text): return 2\n")).digest
    assert first != second


@pytest.mark.parametrize(
    "text", ["reward", "judge.py", "judge:reward", "judge.py:", "judge.py:a b"]
)
def test_invalid_reward_name_is_rejected(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"expected FILE\.py:FUNCTION"):
        load_reward(text)


def test_missing_reward_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read: No such file"):
        load_reward(f"{tmp_path}/none.py:reward")


def test_missing_reward_function_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="has no function 'reward'"):
        load_reward(write_file(tmp_path, "other = 1\n"))


def test_failing_reward_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="failed: ZeroDivisionError"):
        load_reward(write_file(tmp_path, "1 / 0\n"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('answer')", r"failed on 'abc': KeyError: 'answer'"),
        ("return None", "returned None for 'abc'; expected a finite number"),
        ("return float('nan')", "returned nan"),
        ("return 'good'", "returned 'good'"),
    ],
)
def test_non_finite_reward_is_rejected(tmp_path: Path, body: str, message: str) -> None:
    reward = load_reward(write_file(tmp_path, f"def reward(row, text):\n    {body}\n"))
    with pytest.raises(InvalidInput, match=message):
        reward({}, "abc")
