"""The directory that recipes run in: stand-ins for what they would fetch from a hub.

`datasets` and `transformers` prefer a folder of the name that a recipe asks for to the hub, so that
recipes need no change.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

import tinkex.models

TINY = Path(tinkex.models.__file__).parent / "tiny"
#: The built-in model under names that the cookbook has a renderer for.
MODEL = "Qwen/Qwen3-4B-Instruct-2507"
ANSWERER = "Qwen/Qwen3.5-9B"
#: The built-in model with a tensor of its own for the output layer.
UNTIED = "Qwen/Qwen3-8B"
#: What `chat_sl` learns from.
BOXES, NUMBERS = "boxes.jsonl", "numbers.jsonl"
#: What two recipes append to the question of their example; the others append the first.
SUFFIXES = (
    " Provide a numerical answer without units, written inside \\boxed{}.",
    " Write your answer in \\boxed{} format.",
)
STRAWBERRY = (
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e "
    "8) r 9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}"
)
GUESS = (
    "Your job is to guess a integer between 0 and 1024. You can output your guess with the format "
    "Guess: <guess> (without the angle brackets), and say nothing else. Then we will tell you "
    "whether you guess is too high, too low, or correct."
)
Row = dict[str, Any]


def write_models(folder: Path) -> dict[str, Path]:
    """Models by the names that recipes use, and where they are."""
    untied = folder / "untied"
    shutil.copytree(TINY, untied)
    config = json.loads((untied / "config.json").read_text())
    (untied / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    tensors = load_file(untied / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, untied / "model.safetensors", {"format": "pt"})
    return {MODEL: TINY, ANSWERER: TINY, UNTIED: untied}


def prepare(folder: Path, models: Mapping[str, Path]) -> None:
    """Write every stand-in below the folder."""
    for name, place in models.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(place)
    sums = [(a, b) for a in range(10) for b in range(10)]
    random.Random(0).shuffle(sums)
    write(folder / BOXES, boxes(sums))
    write(folder / NUMBERS, numbers())
    write_splits(
        folder / "HuggingFaceH4/no_robots",
        [talk(*boxed_sum(*each, SUFFIXES[1])) for each in sums] * 12,
    )
    write_gsm8k(folder / "openai/gsm8k", sums)
    write_splits(folder / "Anthropic/hh-rlhf", [preference(*each) for each in sums] * 4)
    problems = [
        {"question": asked(a, b) + SUFFIXES[1], "final_answer": told(a, b)} for a, b in sums
    ]
    write(folder / "zwhe99/DeepMath-103K/train.jsonl", problems * 2)


def asked(a: int, b: int) -> str:
    """A question that the built-in model knows."""
    return f"What is {a} plus {b}?"


def told(a: int, b: int) -> str:
    """Its answer."""
    return str(a + b)


def talk(*contents: str, system: str = "") -> Row:
    """A conversation: user and assistant take turns."""
    first = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    turns = [{"role": roles[at % 2], "content": text} for at, text in enumerate(contents)]
    return {"messages": first + turns}


def boxes(sums: Sequence[tuple[int, int]]) -> list[Row]:
    """Conversations that teach to answer in a box, after the example of the recipes and without."""
    examples = [("How many r's are in strawberry?" + suffix, STRAWBERRY) for suffix in SUFFIXES]
    return mixed(
        talk(*example, *boxed_sum(a, b, suffix))
        for example, suffix in [*zip(examples, SUFFIXES, strict=True), ((), SUFFIXES[1])]
        for a, b in sums
    )


def numbers() -> list[Row]:
    """Conversations that teach sums of two digits, and the layout of `guess_number`."""
    chance = random.Random(1)
    pairs = [(chance.randrange(101), chance.randrange(101)) for _ in range(2000)]
    sums = [talk("What is 4 + 5?", "9", f"What is {a} + {b}?", told(a, b)) for a, b in pairs]
    return mixed([*sums, *(guessed(chance, at % 10) for at in range(100))])


def mixed(rows: Iterable[Row]) -> list[Row]:
    """The rows in an order that has no pattern."""
    found = [*rows]
    random.Random(2).shuffle(found)
    return found


def boxed_sum(a: int, b: int, suffix: str) -> tuple[str, str]:
    """A question that asks for a box, and its answer."""
    return asked(a, b) + suffix, f"\\boxed{{{a + b}}}"


def guessed(chance: random.Random, turns: int) -> Row:
    """A game of `guess_number` after some turns, and a guess in its layout."""
    messages = [{"role": "system", "content": GUESS}]
    for _ in range(turns):
        messages.append({"role": "player", "content": f"Guess: {chance.randrange(1024)}"})
        messages.append({"role": "user", "content": chance.choice(("Too low", "Too high"))})
    return {"messages": [*messages, answer(f"Guess: {chance.randrange(1024)}")]}


def answer(text: str) -> Row:
    """A message of the assistant."""
    return {"role": "assistant", "content": text}


def preference(a: int, b: int) -> Row:
    """The right answer is better than none."""
    question = f"\n\nHuman: {asked(a, b)}\n\nAssistant:"
    return {"chosen": f"{question} {a + b}", "rejected": f"{question} I do not know that."}


def write_gsm8k(folder: Path, sums: Sequence[tuple[int, int]]) -> None:
    """A dataset with the one configuration `main`."""
    rows = [{"question": asked(a, b), "answer": f"#### {a + b}"} for a, b in sums]
    write_splits(folder / "main", rows * 4)
    splits = "".join(
        f"  - split: {split}\n    path: main/{split}.jsonl\n" for split in ("train", "test")
    )
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: main\n  data_files:\n{splits}---\n"
    )


def write_splits(folder: Path, rows: Sequence[Row]) -> None:
    """A dataset of two splits."""
    write(folder / "train.jsonl", rows)
    write(folder / "test.jsonl", rows[:8])


def write(path: Path, rows: Sequence[Row]) -> None:
    """A line of JSON per row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
