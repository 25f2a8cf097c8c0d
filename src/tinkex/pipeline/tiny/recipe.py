"""Training recipe of tinkex/tiny: settings of the pipeline, and rows generated from a seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tinkex.pipeline.config import PipelineConfig
from tinkex.pipeline.run.plan import RunFlags
from tinkex.pipeline.run.report import RunOutput
from tinkex.pipeline.run.runner import run_pipeline
from tinkex.pipeline.run.stage_specs import DPO
from tinkex.pipeline.tiny.tasks import (
    ANIMALS,
    DAYS,
    FAMILIES,
    NAMES,
    PLACES,
    UNKNOWN,
    WORDS,
    TinyTask,
    draw_family_task,
    draw_task,
    random_word,
)
from tinkex.system.atomic import write_file_atomic

SEED = 1337
#: Held-out tasks per family, for the model card.
NUM_HELD_OUT = 40
_TRIES_PER_TASK = 50
#: Additional settings by stage. A model this small tolerates higher learning rates than
#: the defaults, except in DPO.
_STAGE_TRAINING: Mapping[str, Mapping[str, float]] = {
    "pretrain": {"learning_rate": 3e-3},
    "sft": {"learning_rate": 2e-3, "muon_lr": 0.02},
    "dpo": {},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingAmounts:
    """Number of rows, steps and held-out tasks."""

    num_rows: Mapping[str, int]
    num_steps: Mapping[str, int]
    num_held_out: int = NUM_HELD_OUT
    """Held-out tasks per family."""


#: Takes about 15 minutes on one core.
FULL = TrainingAmounts(
    num_rows={"pretrain": 12_000, "sft": 40_000, "dpo": 800},
    num_steps={"pretrain": 900, "sft": 700, "dpo": 50},
)
#: Takes half a minute; tests the recipe, the model is useless.
QUICK = TrainingAmounts(
    num_rows={"pretrain": 60, "sft": 60, "dpo": 20},
    num_steps={"pretrain": 2, "sft": 2, "dpo": 1},
    num_held_out=1,
)


def train(directory: Path, amounts: TrainingAmounts, output: RunOutput) -> Path:
    """Train all stages or resume them; returns the folder of the trained model."""
    data = write_rows(directory / "data", SEED, amounts.num_rows)
    config = make_config(directory / "out", data, amounts)
    run_pipeline(config, RunFlags(), output)
    return DPO.model_dir(config.out_dir)


def make_config(
    out_dir: Path, data: Mapping[str, Path], amounts: TrainingAmounts
) -> PipelineConfig:
    """Build the pipeline configuration."""
    return PipelineConfig(
        out_dir=out_dir,
        tf_dir=None,
        pretrain_json=data["pretrain"],
        sft_json=data["sft"],
        dpo_json=data["dpo"],
        vocab_size=1536,
        training={
            "hidden_size": 192,
            "num_layers": 5,
            "num_heads": 6,
            "num_kv_heads": 2,
            "max_seq_len": 256,
            "epochs": 1000,
            "batch_size": 4,
            "accumulation_steps": 1,
            "optimizer": "muon",
            "seed": SEED,
            "device": "cpu",
            "save_interval": 200,
            "keep_last_checkpoints": 2,
        },
        stage_training={
            stage: {"max_steps": amounts.num_steps[stage], **rates}
            for stage, rates in _STAGE_TRAINING.items()
        },
    )


# --- rows -----------------------------------------------------------------------------------


def write_rows(directory: Path, seed: int, sizes: Mapping[str, int]) -> dict[str, Path]:
    """Write `<stage>.jsonl` for each stage named in `sizes`; the same seed gives the same bytes."""
    written = {}
    for stage, num_rows in sizes.items():
        # A text seed is stable across processes; hash() is not.
        rng = Random(f"tiny {stage} {seed}")
        lines = [json.dumps(ROW_MAKERS[stage](rng)) + "\n" for _ in range(num_rows)]
        written[stage] = directory / f"{stage}.jsonl"
        write_file_atomic(written[stage], "".join(lines).encode(), mode=0o644)
    return written


def held_out_tasks(seed: int, num_each: int = NUM_HELD_OUT) -> dict[str, list[TinyTask]]:
    """Return up to `num_each` tasks per family that no training row contains."""
    return {family: list(_iter_held_out(family, seed, num_each)) for family in FAMILIES}


def _iter_held_out(family: str, seed: int, num_wanted: int) -> Iterator[TinyTask]:
    rng = Random(f"tiny held out {family} {seed}")
    seen: set[str] = set()
    for _ in range(num_wanted * _TRIES_PER_TASK):
        task = draw_family_task(family, rng, is_held_out=True)
        if task.question not in seen:
            seen.add(task.question)
            yield task
        if len(seen) == num_wanted:
            return


# --- a row of each stage --------------------------------------------------------------------


def pretrain_row(rng: Random) -> Mapping[str, object]:
    """Return a text: a story, a dialogue, or questions with answers."""
    choice = rng.random()
    if choice < 0.1:
        return {"text": _make_story(rng, rng.choice(ANIMALS))}
    if choice < 0.35:
        return {"text": _make_dialogue(rng)}
    tasks = [draw_task(rng)[1] for _ in range(rng.randint(3, 8))]
    return {"text": "\n".join(f"{task.question} {task.answer}" for task in tasks)}


def sft_row(rng: Random) -> Mapping[str, object]:
    """Return a conversation of one or two turns."""
    num_turns = 2 if rng.random() < 0.25 else 1
    return {"conversations": [message for _ in range(num_turns) for message in _chat_turn(rng)]}


def dpo_row(rng: Random) -> Mapping[str, object]:
    """Return a correct answer as chosen, and a wrong or evasive one as rejected."""
    family, task = draw_task(rng)
    other = draw_family_task(family, rng, is_held_out=False)
    while other.answer == task.answer:
        other = draw_task(rng)[1]
    is_evasive = task.answer != UNKNOWN and rng.random() < 0.3
    bad = UNKNOWN if is_evasive else other.answer
    return {"chosen": _pair(task.question, task.answer), "rejected": _pair(task.question, bad)}


ROW_MAKERS: Mapping[str, Callable[[Random], Mapping[str, object]]] = {
    "pretrain": pretrain_row,
    "sft": sft_row,
    "dpo": dpo_row,
}


def _chat_turn(rng: Random) -> list[dict[str, str]]:
    if rng.random() < 0.04:
        animal = rng.choice(ANIMALS)
        questions = (
            f"Tell me a story about a {animal}.",
            f"Tell a short story about a {animal}.",
            f"Write a story about a {animal}.",
        )
        return _pair(rng.choice(questions), _make_story(rng, animal))
    _, task = draw_task(rng)
    return _pair(task.question, task.answer)


def _pair(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _make_dialogue(rng: Random) -> str:
    """Return a dialogue with repetitions, which trains copying."""
    name, friend = rng.sample(NAMES, 2)
    lines = []
    for _ in range(rng.randint(2, 5)):
        said = " ".join(random_word(rng) for _ in range(rng.randint(1, 4)))
        lines += rng.choice(
            (
                [f'{name} said "{said}", and {friend} repeated "{said}".'],
                [f"{name} wrote {said}. {friend} wrote {said}."],
                [f"{name}: {said}", f"{friend}: {said}"],
            )
        )
    return " ".join(lines)


def _make_story(rng: Random, animal: str) -> str:
    name = rng.choice(NAMES)
    place, thing, day = rng.choice(PLACES), rng.choice(WORDS), rng.choice(DAYS)
    ends = (
        f"{name} was glad, and the {animal} was glad too.",
        f"They went home and slept until {rng.choice(DAYS)}.",
        f"The {place} was quiet again.",
    )
    return (
        f"One {day} {name} met a {animal} in the {place}. "
        f"The {animal} had lost a {thing}. "
        f"{name} looked for the {thing} and found it. {rng.choice(ends)}"
    )
