"""Reinforcement learning on a verifiable task: say the larger of two numbers.

    python examples/grpo.py [--base-model NAME] [--steps 20]

GRPO: the current weights answer every question several times; the advantage of an answer is its
reward relative to its group. `tinkex train rl` accepts a custom reward function.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from connection import (
    Progress,
    answered,
    at_least_one,
    close,
    connect,
    make_parser,
    moved,
    new_adapter,
    start,
)
from lessons import ask, prompt_tokens, text_of

import tinkex
from tinkex import AdamParams, Datum, ModelInput, SampledSequence, SamplingParams

MAX_TOKENS = 5
NUM_HELD_OUT = 16
#: Number of first and last steps to compare; a single step is too noisy.
NUM_COMPARED = 3


class Task(NamedTuple):
    """A question with its reward function."""

    one: int
    other: int

    @property
    def question(self) -> str:
        return f"Say the larger number: {self.one} or {self.other}"

    def is_right(self, answer: str) -> bool:
        """Return whether the first number in the answer is correct."""
        return re.findall(r"\d+", answer)[:1] == [str(max(self))]

    def reward(self, answer: str) -> float:
        """Reward correct answers, and more if they contain nothing else."""
        if not self.is_right(answer):
            return 0.0
        return 1.0 if answer.strip() == str(max(self)) else 0.5


class Attempt(NamedTuple):
    """A sampled answer and its reward."""

    task: Task
    drawn: SampledSequence
    text: str

    @property
    def reward(self) -> float:
        return self.task.reward(self.text)


class Group(NamedTuple):
    """The answers to one question."""

    prompt: list[int]
    attempts: list[Attempt]

    def data(self) -> list[Datum]:
        """Build a datum per answer; a group with equal rewards has no gradient."""
        rewards = [attempt.reward for attempt in self.attempts]
        mean, spread = fmean(rewards), pstdev(rewards)
        if spread == 0.0:
            return []
        return [
            make_datum(self.prompt, attempt.drawn, (reward - mean) / spread / len(rewards))
            for attempt, reward in zip(self.attempts, rewards, strict=True)
        ]


def main() -> int:
    parser = make_parser(__doc__, steps=20, learning_rate=5e-4)
    parser.add_argument("--num-questions", type=at_least_one, default=4, help="per step")
    parser.add_argument("--group-size", type=at_least_one, default=8, help="answers to each")
    parser.add_argument("--transcript", type=Path, help="file for all answers, a line for each")
    options = parser.parse_args()
    if options.group_size < 2:
        parser.error("--group-size must be at least 2: an answer is compared with others")
    tasks = [Task(one, other) for one in range(10) for other in range(10) if one != other]
    random.Random(0).shuffle(tasks)
    unseen, seen = tasks[:NUM_HELD_OUT], tasks[NUM_HELD_OUT:]
    if options.num_questions > len(seen):
        parser.error(f"--num-questions must be at most {len(seen)}: there are no more")
    questions = [task.question for task in unseen]
    with connect(options) as (service, base_model):
        training = new_adapter(service, base_model)
        before = ask(training, questions, MAX_TOKENS)
        steps = train(training, seen, options)
        after = ask(training, questions, MAX_TOKENS)
        saved = training.save_weights_for_sampler("grpo").result().path
    if options.transcript:
        write_transcript(options.transcript, steps)
    answered(questions[0], {"before": before[0], "after": after[0]})
    early = [attempt for step in steps[:NUM_COMPARED] for attempt in step]
    late = [attempt for step in steps[-NUM_COMPARED:] for attempt in step]
    moved("reward", mean_reward(early), mean_reward(late))
    moved("right while learning", share(early), share(late))
    old, new = num_right(unseen, before), num_right(unseen, after)
    moved("right on unseen questions", old / len(unseen), new / len(unseen))
    achieved = f"right on {old} of {len(unseen)} unseen questions before, on {new} after"
    close(options, achieved, "chat", saved)
    return 0


def num_right(tasks: Sequence[Task], answers: Sequence[str]) -> int:
    return sum(task.is_right(answer) for task, answer in zip(tasks, answers, strict=True))


def mean_reward(attempts: Sequence[Attempt]) -> float:
    return fmean(attempt.reward for attempt in attempts)


def share(attempts: Sequence[Attempt]) -> float:
    return fmean(attempt.task.is_right(attempt.text) for attempt in attempts)


def train(training: tinkex.TrainingClient, tasks: list[Task], options: Any) -> list[list[Attempt]]:
    """Train and return the answers of every step."""
    steps, dice = [], random.Random(1)
    with Progress(options.steps) as progress:
        for step in range(1, options.steps + 1):
            chosen = dice.sample(tasks, options.num_questions)
            groups = draw(training, chosen, options.group_size, seed=step)
            data = [datum for group in groups for datum in group.data()]
            if data:
                training.forward_backward(data, "importance_sampling")
                training.optim_step(AdamParams(learning_rate=options.learning_rate)).result()
            steps.append([attempt for group in groups for attempt in group.attempts])
            progress.report(step, reward=mean_reward(steps[-1]), right=share(steps[-1]))
    return steps


def draw(
    training: tinkex.TrainingClient, tasks: list[Task], group_size: int, seed: int
) -> list[Group]:
    """Sample answers to all questions concurrently and compute their rewards."""
    tokenizer = training.get_tokenizer()
    sampler = training.save_weights_and_get_sampling_client().result()
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=seed)
    prompts = [prompt_tokens(tokenizer, task.question) for task in tasks]
    asked = [sampler.sample(ModelInput.from_ints(each), group_size, params) for each in prompts]
    groups = []
    for task, prompt, future in zip(tasks, prompts, asked, strict=True):
        drawn = future.result().sequences
        attempts = [Attempt(task, each, text_of(tokenizer, each.tokens)) for each in drawn]
        groups.append(Group(prompt, attempts))
    return groups


def make_datum(prompt: list[int], answer: SampledSequence, advantage: float) -> Datum:
    """Build a datum; position i predicts token i + 1, and prompt positions have no advantage."""
    tokens, silent = [*prompt, *answer.tokens], [0.0] * (len(prompt) - 1)
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [*silent, *(answer.logprobs or [])],
            "advantages": [*silent, *([advantage] * len(answer.tokens))],
        },
    )


def write_transcript(file: Path, steps: list[list[Attempt]]) -> None:
    """Write all answers to a file, so that the rewards can be checked."""
    with file.open("w", encoding="utf-8") as out:
        for number, attempts in enumerate(steps, start=1):
            for attempt in attempts:
                record = {"question": attempt.task.question, "answer": attempt.text}
                out.write(json.dumps({"step": number, **record, "reward": attempt.reward}) + "\n")


if __name__ == "__main__":
    start(main)
