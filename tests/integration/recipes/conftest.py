"""Shared data, plans and runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import BASE_MODEL, Connect
from tinkex import ServiceClient
from tinkex.recipes import dpo, rl, sft
from tinkex.recipes.plan import DpoPlan, Plan, RlPlan, SftPlan
from tinkex.recipes.run import Run, RunOptions
from tinkex.testing import StubServer, ToyTokenizer

REWARD = """
def reward(row, text):
    return sum("a" <= letter <= "z" for letter in text) / max(1, len(text))
"""
ROWS: dict[str, list[dict[str, Any]]] = {
    "sft": [
        {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": c}]}
        for n, c in enumerate(["hello there", "good day", "how are you", "well met", "hi"])
    ]
    + [{"prompt": "two and two are ", "completion": "four"}],
    "dpo": [
        {"prompt": f"question {n}? ", "chosen": "yes, thank you", "rejected": "no, not at all"}
        for n in range(6)
    ],
    "rl": [{"prompt": f"say {n}: ", "n": n} for n in range(6)],
}
KINDS = ("sft", "dpo", "rl")

MakeRun = Callable[..., Run[Any, Any]]


@pytest.fixture
def service(server: StubServer, connect: Connect) -> ServiceClient:
    return connect(server, tokenizer_loader=lambda name: ToyTokenizer())


def write_data(directory: Path, kind: str) -> Path:
    """Write the data file and the reward function of a recipe."""
    path = directory / f"{kind}.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS[kind])))
    (directory / "judge.py").write_text(REWARD)
    return path


def make_plan(directory: Path, kind: str, **settings: Any) -> Plan:
    """Create a plan of six steps with a high learning rate."""
    common = {
        "data": write_data(directory, kind),
        "base_model": BASE_MODEL,
        "batch_size": 3,
        "epochs": 3,
        "learning_rate": 0.1,
        "save_every": 2,
        "sample_tokens": 4,
        **settings,
    }
    if kind == "sft":
        return SftPlan(**common)
    if kind == "dpo":
        return DpoPlan(**common)
    reward = f"{directory / 'judge.py'}:reward"
    return RlPlan(**{"answer_tokens": 6, "group_size": 16, "reward": reward, **common})


def start(plan: Plan, service: ServiceClient, directory: Path, **options: Any) -> Run[Any, Any]:
    """Create the run of a plan in a directory."""
    modules: dict[str, Any] = {"sft": sft, "dpo": dpo, "rl": rl}
    run: Run[Any, Any] = modules[plan.kind].run(
        plan, service, RunOptions(run_dir=directory, **options), lambda sentence: None
    )
    return run


def losses(run: Run[Any, Any]) -> list[float]:
    """Return the logged losses of a run."""
    return [row["loss"] for row in run.run_directory.read_metrics()]
