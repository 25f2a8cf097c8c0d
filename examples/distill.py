"""Reasoning distillation: learn to think before answering, from a teacher's written thoughts.

    python examples/distill.py [--base-model NAME] [--steps 40]

Every row is <think>how</think><answer>what</answer>. The tags weigh more than the words between
them: they are few, and an answer without them cannot be read. The teacher here is a short function;
rows of a large model are used in the same way.
"""

from __future__ import annotations

import random
import re
from statistics import fmean
from typing import Any, NamedTuple

from connection import Progress, connect, make_parser, start
from lessons import answer_tokens, ask, make_datum, prompt_tokens

import tinkex
from tinkex import AdamParams, Datum
from tinkex.text import encode

TAG_WEIGHT = 4.0
BATCH_SIZE, NUM_HELD_OUT = 8, 12
MAX_TOKENS = 120
FORM = re.compile(r"\s*<think>.+</think>\s*<answer>(.+)</answer>\s*", re.DOTALL)


class Lesson(NamedTuple):
    """A question, and how the teacher comes to the answer."""

    question: str
    thought: str
    answer: str

    @property
    def pieces(self) -> list[tuple[str, float]]:
        """What is to be said, with the weight of each part."""
        return [
            ("<think>", TAG_WEIGHT),
            (self.thought, 1.0),
            ("</think>", TAG_WEIGHT),
            ("<answer>", TAG_WEIGHT),
            (self.answer, 1.0),
            ("</answer>", TAG_WEIGHT),
        ]


def teach(one: int, other: int) -> Lesson:
    """The teacher: exact, and not in a hurry."""
    total = one + other
    steps = ", ".join(str(number) for number in range(one, total + 1))
    thought = f"I start at {one} and go {other} further: {steps}."
    return Lesson(f"What is {one} plus {other}?", thought, str(total))


def main() -> int:
    options = make_parser(__doc__, steps=40, learning_rate=1e-3).parse_args()
    lessons = [teach(one, other) for one in range(1, 10) for other in range(1, 6)]
    random.Random(0).shuffle(lessons)
    unseen, seen = lessons[:NUM_HELD_OUT], lessons[NUM_HELD_OUT:]
    with connect(options) as (service, base_model):
        training = service.create_lora_training_client(base_model, rank=16, seed=0)
        before, loss_before = examine(training, unseen)
        train(training, seen, options)
        after, loss_after = examine(training, unseen)
        saved = training.save_weights_for_sampler("distill").result().path
    print(f"{unseen[0].question}\n  before: {before[0]!r}\n  after:  {after[0]!r}\nsaved {saved}")
    print(f"held-out loss {loss_before:.3f} -> {loss_after:.3f}")
    print(f"thinks first {share(unseen, before):.3f} -> {share(unseen, after):.3f}")
    right = [share(unseen, answers, must_be_right=True) for answers in (before, after)]
    print(f"right answers {right[0]:.3f} -> {right[1]:.3f}")
    return 0


def train(training: tinkex.TrainingClient, lessons: list[Lesson], options: Any) -> None:
    """Every batch is drawn by its number, so that a run can be repeated."""
    progress, tokenizer = Progress(options.steps), training.get_tokenizer()
    for step in range(1, options.steps + 1):
        data = make_batch(tokenizer, random.Random(step).sample(lessons, BATCH_SIZE))
        # Both are sent before either is waited for; the server keeps them in order.
        passed = training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(AdamParams(learning_rate=options.learning_rate))
        loss = passed.result().metrics["loss:sum"]
        stepped.result()
        progress.tell(step, loss=loss)


def make_batch(tokenizer: Any, lessons: list[Lesson]) -> list[Datum]:
    """All weights of a batch add up to 1, so that its loss is a weighted mean."""
    told = [weighted_tokens(tokenizer, lesson) for lesson in lessons]
    total = sum(sum(weights) for _, weights in told)
    prompts = [prompt_tokens(tokenizer, lesson.question) for lesson in lessons]
    return [
        make_datum(prompt, tokens, [weight / total for weight in weights])
        for prompt, (tokens, weights) in zip(prompts, told, strict=True)
    ]


def weighted_tokens(tokenizer: Any, lesson: Lesson) -> tuple[list[int], list[float]]:
    """The teacher's answer, and what each token counts.

    Parts are tokenized one by one: in one model a tag is a single token, in another five.
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
    """Answers to lessons that are not learned, and the loss on what the teacher would say."""
    data = make_batch(training.get_tokenizer(), lessons)
    scored = training.forward(data, "cross_entropy")
    answers = ask(training, [lesson.question for lesson in lessons], MAX_TOKENS)
    return answers, scored.result().metrics["loss:sum"]


def share(lessons: list[Lesson], answers: list[str], must_be_right: bool = False) -> float:
    """How many answers have the form, and what is right in it if that is asked."""
    found = [FORM.fullmatch(answer) for answer in answers]
    return fmean(
        match is not None and (match[1] == lesson.answer or not must_be_right)
        for match, lesson in zip(found, lessons, strict=True)
    )


if __name__ == "__main__":
    start(main)
