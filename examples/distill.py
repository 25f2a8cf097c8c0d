"""Reasoning distillation: learn to reason before answering, from a teacher's written reasoning.

    python examples/distill.py [--base-model NAME] [--steps 30]

Every row is <think>how</think><answer>what</answer>. The tags have a higher weight than the words
between them: they are few, and an answer without them cannot be parsed. The teacher here is a short
function; rows of a large model are used in the same way.
"""

from __future__ import annotations

import random
import re
from statistics import fmean
from typing import Any, NamedTuple

from connection import Progress, answered, close, connect, make_parser, moved, new_adapter, start
from lessons import answer_tokens, ask, make_datum, prompt_tokens

import tinkex
from tinkex import AdamParams, Datum
from tinkex.text import encode

TAG_WEIGHT = 4.0
BATCH_SIZE, NUM_HELD_OUT = 4, 12
MAX_TOKENS = 80
FORM = re.compile(r"\s*<think>.+</think>\s*<answer>(.+)</answer>\s*", re.DOTALL)


class Lesson(NamedTuple):
    """A question and the reasoning of the teacher."""

    question: str
    thought: str
    answer: str

    @property
    def pieces(self) -> list[tuple[str, float]]:
        """The parts of the answer, each with its weight."""
        return [
            ("<think>", TAG_WEIGHT),
            (self.thought, 1.0),
            ("</think>", TAG_WEIGHT),
            ("<answer>", TAG_WEIGHT),
            (self.answer, 1.0),
            ("</answer>", TAG_WEIGHT),
        ]


def teach(one: int, two: int, three: int) -> Lesson:
    """The teacher: exact, one small step at a time."""
    first, total = one + two, one + two + three
    thought = f"{one} plus {two} is {first}. {first} plus {three} is {total}."
    return Lesson(f"What is {one} plus {two} plus {three}?", thought, str(total))


def main() -> int:
    options = make_parser(__doc__, steps=30, learning_rate=1e-3).parse_args()
    lessons = [
        teach(one, first - one, three)
        for first in range(2, 10)
        for one in range(1, first)
        for three in range(1, 10)
    ]
    random.Random(0).shuffle(lessons)
    unseen, seen = lessons[:NUM_HELD_OUT], lessons[NUM_HELD_OUT:]
    with connect(options) as (service, base_model):
        training = new_adapter(service, base_model)
        before, loss_before = examine(training, unseen)
        train(training, seen, options)
        after, loss_after = examine(training, unseen)
        saved = training.save_weights_for_sampler("distill").result().path
    teacher = "".join(text for text, _ in unseen[0].pieces)
    answered(unseen[0].question, {"teacher": teacher, "before": before[0], "after": after[0]})
    moved("held-out loss", loss_before, loss_after)
    moved("thinks first", share_in_form(before), share_in_form(after))
    old, new = num_right(unseen, before), num_right(unseen, after)
    moved("right answers", old / len(unseen), new / len(unseen))
    achieved = f"right on {old} of {len(unseen)} unseen sums before, on {new} now that it thinks"
    close(options, f"{achieved}; the teacher on all", "chat", saved)
    return 0


def train(training: tinkex.TrainingClient, lessons: list[Lesson], options: Any) -> None:
    """Choose every batch by its number, so that a run is repeatable."""
    tokenizer = training.get_tokenizer()
    with Progress(options.steps) as progress:
        for step in range(1, options.steps + 1):
            data = make_batch(tokenizer, random.Random(step).sample(lessons, BATCH_SIZE))
            # Send both before waiting for either; the order is preserved.
            passed = training.forward_backward(data, "cross_entropy")
            stepped = training.optim_step(AdamParams(learning_rate=options.learning_rate))
            loss = passed.result().metrics["loss:sum"]
            stepped.result()
            progress.report(step, loss=loss)


def make_batch(tokenizer: Any, lessons: list[Lesson]) -> list[Datum]:
    """Scale the weights of a batch to a sum of 1, so that its loss is a weighted mean."""
    weighted = [weighted_tokens(tokenizer, lesson) for lesson in lessons]
    total = sum(sum(weights) for _, weights in weighted)
    prompts = [prompt_tokens(tokenizer, lesson.question) for lesson in lessons]
    return [
        make_datum(prompt, tokens, [weight / total for weight in weights])
        for prompt, (tokens, weights) in zip(prompts, weighted, strict=True)
    ]


def weighted_tokens(tokenizer: Any, lesson: Lesson) -> tuple[list[int], list[float]]:
    """Return the tokens of the teacher's answer and their weights.

    Parts are tokenized one by one: a tag is a single token in one model and five in another.
    """
    tokens: list[int] = []
    weights: list[float] = []
    for text, weight in lesson.pieces:
        found = encode(tokenizer, text, add_special_tokens=False)
        tokens += found
        weights += [weight] * len(found)
    ending = answer_tokens(tokenizer, "")
    return tokens + ending, weights + [TAG_WEIGHT] * len(ending)


def examine(training: tinkex.TrainingClient, lessons: list[Lesson]) -> tuple[list[str], float]:
    """Sample answers to unseen lessons, and compute the loss of the teacher's answers."""
    data = make_batch(training.get_tokenizer(), lessons)
    scored = training.forward(data, "cross_entropy")
    answers = ask(training, [lesson.question for lesson in lessons], MAX_TOKENS)
    return answers, scored.result().metrics["loss:sum"]


def share_in_form(answers: list[str]) -> float:
    return fmean(FORM.fullmatch(answer) is not None for answer in answers)


def num_right(lessons: list[Lesson], answers: list[str]) -> int:
    """Return the number in the answer tag, or the last number of an answer without tags."""
    pairs = zip(lessons, answers, strict=True)
    return sum(final_number(answer) == lesson.answer for lesson, answer in pairs)


def final_number(answer: str) -> str:
    found = FORM.fullmatch(answer)
    return found[1] if found else (re.findall(r"\d+", answer) or [""])[-1]


if __name__ == "__main__":
    start(main)
