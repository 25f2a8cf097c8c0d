"""Run recipes one after the other, and judge each by the metrics that it wrote."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.compat.cookbook.recipes import LOG, TAUGHT, Checkpoint, Recipe
from tests.compat.results import DEFECT, FAIL, PASS, Outcome
from tests.support.real_server import RealServer, clean_environment

PACKAGE = "tinker_cookbook.recipes"
#: No recipe takes this long here.
TIMEOUT_SECONDS = 600
UTILITIES = {
    "`weights.download` of a training checkpoint": "download",
    "`weights.download` of an export, `weights.build_lora_adapter`": "convert",
    "`weights.build_hf_model`, output layer not trained": "merge_body",
    "`weights.build_hf_model`, output layer trained": "merge_untied",
    "`weights.build_hf_model`, output layer trained, tied embeddings": "merge_tied",
}
#: What the cookbook cannot do: how its error starts, and why.
LIMITS = {
    "merge_tied": (
        "mapped to 'lm_head.weight' which does not exist",
        "An export is an adapter that PEFT loads, which names the output layer `lm_head`. A base "
        "with tied embeddings stores no such tensor, and the cookbook adds none. For an adapter "
        "that names the layer `unembed_tokens`, it changes the tensor that both ends share: the "
        "merged model then reads changed input embeddings and is not the model that was trained. "
        "`tinkex checkpoint export --merge` stores the output layer on its own.",
    )
}
SCRIPT = Path(__file__).with_name("utilities.py")
MISSING = "tinker://missing/weights/final"
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
        log_path = self.log_path(recipe.name)
        paths = {option: self.path_of(start) for option, start in recipe.starts.items()}
        if LOG in paths:
            log_path.mkdir(parents=True)
            row = {"name": "start", "batch": 0, "state_path": paths[LOG]}
            (log_path / "checkpoints.jsonl").write_text(json.dumps(row) + "\n")
        arguments = recipe.arguments(str(log_path), paths)
        problem = self.call("-m", f"{PACKAGE}.{recipe.module}", *arguments)
        values = values_of(log_path / "metrics.jsonl", recipe.metric)
        figure = f"{recipe.metric}: {', '.join(f'{value:.3g}' for value in values)}"
        if problem:
            return outcome_of(recipe.name, FAIL, problem)
        return outcome_of(recipe.name, PASS if recipe.rule(values) else FAIL, figure)

    def weights(self, name: str) -> Outcome:
        """Run one of the utilities, on weights of its own or on those of the first recipe."""
        kind = UTILITIES[name]
        arguments = [kind, str(self.folder / "weights" / kind)]
        if kind == "download":
            arguments.append(self.path_of(TAUGHT))
        problem = self.call(str(SCRIPT), *arguments)
        error, reason = LIMITS.get(kind, ("", ""))
        if error and error in " ".join(problem.split()):
            return outcome_of(name, DEFECT, reason)
        return outcome_of(name, FAIL if problem else PASS, problem)

    def log_path(self, name: str) -> Path:
        """Where a recipe keeps its metrics and checkpoints."""
        return self.folder / "runs" / re.sub(r"\W+", "-", name)

    def path_of(self, checkpoint: Checkpoint) -> str:
        """The path of a checkpoint; one that does not exist if its recipe did not get there."""
        path = self.log_path(checkpoint.recipe) / "checkpoints.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return str(rows[checkpoint.position][checkpoint.kind]) if rows else MISSING

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
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"still running after {TIMEOUT_SECONDS} s"
        return (done.stderr or done.stdout).strip()[-_TAIL:] if done.returncode else ""


def outcome_of(name: str, status: str, detail: str) -> Outcome:
    """An outcome of a recipe."""
    return Outcome(name, status, detail, group="Cookbook", title=f"`{name}`")


def values_of(path: Path, metric: str) -> list[float]:
    """A metric, step by step, as the recipe logged it."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [float(row[metric]) for row in rows if metric in row]
