"""Run recipes one after the other, and judge each by the metrics that it wrote."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.acceptance.server.processes import RealServer, clean_environment
from tests.compat.cookbook.recipes import FIRST, LOG, Recipe
from tests.compat.results import FAIL, PASS, Outcome

PACKAGE = "tinker_cookbook.recipes"
#: No recipe takes this long here.
PATIENCE_SECONDS = 300
UTILITIES = {
    "weights: download of a training checkpoint": "download",
    "weights: download of an export, build_lora_adapter, build_hf_model": "build",
}
SCRIPT = Path(__file__).with_name("utilities.py")
_TAIL = 600


@dataclass(frozen=True)
class Cookbook:
    """A cookbook in its environment, a workspace, and the server that it uses.

    `front` stands between the interpreter and what it runs, and `path` precedes the packages of
    the environment: both are for tinkex in the place of the SDK.
    """

    python: Path
    folder: Path
    server: RealServer
    key: str
    front: tuple[str, ...] = ()
    path: str = ""

    def run(self, recipes: Iterable[Recipe], report: Callable[[Outcome], None]) -> list[Outcome]:
        """Run recipes, and then the utilities for weights."""
        found = []
        for recipe in recipes:
            found.append(self.outcome(recipe))
            report(found[-1])
        for name in UTILITIES:
            found.append(self.weights(name))
            report(found[-1])
        return found

    def outcome(self, recipe: Recipe) -> Outcome:
        """Run one recipe and look at its figure."""
        log_path = self.folder / "runs" / recipe.module
        log_path = log_path.with_name(log_path.name + f"-{recipe.options.get('env', '')}")
        log_path.parent.mkdir(exist_ok=True)
        start = self.last_checkpoint() if recipe.start else {}
        if recipe.start == LOG:
            log_path.mkdir()
            row = {"name": "start", "batch": 0, "state_path": start["state_path"]}
            (log_path / "checkpoints.jsonl").write_text(json.dumps(row) + "\n")
        kind = "sampler_path" if recipe.start == "teacher_checkpoint" else "state_path"
        arguments = recipe.arguments(str(log_path), start.get(kind, ""))
        problem = self.call("-m", f"{PACKAGE}.{recipe.module}", *arguments)
        values = values_of(log_path / "metrics.jsonl", recipe.metric)
        figure = f"{recipe.metric}: {', '.join(f'{value:.3g}' for value in values)}"
        if problem:
            return outcome_of(recipe.name, FAIL, problem)
        return outcome_of(recipe.name, PASS if recipe.rule(values) else FAIL, figure)

    def weights(self, name: str) -> Outcome:
        """Run one of the utilities on the weights of the first recipe."""
        kind, path = UTILITIES[name], self.last_checkpoint()["state_path"]
        problem = self.call(str(SCRIPT), kind, path, str(self.folder / "weights" / kind))
        return outcome_of(name, FAIL if problem else PASS, problem)

    def last_checkpoint(self) -> dict[str, str]:
        """The paths that the first recipe saved at its end; empty if it did not get there."""
        [folder] = (self.folder / "runs").glob(f"{FIRST.module}-*")
        path = folder / "checkpoints.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return rows[-1] if rows else {"state_path": "tinker://missing/weights/final"}

    def call(self, *arguments: str) -> str:
        """Run Python in the workspace; returns what went wrong, if anything did."""
        variables = clean_environment(
            TINKER_BASE_URL=self.server.url,
            TINKER_API_KEY=self.key,
            HF_HOME=str(self.folder / "hub"),
            PYTHONWARNINGS="ignore",
            PYTHONPATH=self.path,
        )
        try:
            done = subprocess.run(
                [str(self.python), *self.front, *arguments],
                cwd=self.folder,
                env=variables,
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                timeout=PATIENCE_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"still running after {PATIENCE_SECONDS} s"
        return (done.stderr or done.stdout).strip()[-_TAIL:] if done.returncode else ""


def outcome_of(name: str, status: str, detail: str) -> Outcome:
    """An outcome of a recipe."""
    return Outcome(name, status, detail, group="Cookbook", title=f"`{name}`")


def values_of(path: Path, metric: str) -> list[float]:
    """A metric, step by step, as the recipe logged it."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [float(row[metric]) for row in rows if metric in row]
