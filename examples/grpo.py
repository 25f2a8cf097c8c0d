"""Reinforcement learning on a task that can be checked: which of two numbers is larger?

    python examples/grpo.py [--base-model NAME] [--steps 15]

GRPO: the weights of the moment answer every question several times, and an answer counts as much as
it is better than the others of its group. `tinkex train rl` takes a reward function of your own.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from connection import Progress, connect, make_parser, start
from lessons import ask, prompt_tokens, text_of

import tinkex
from tinkex import AdamParams, Datum, ModelInput, SampledSequence, SamplingParams

MAX_TOKENS = 8
NUM_HELD_OUT = 16


class Task(NamedTuple):
    """A question, and how to judge an answer to it."""

    one: int
    other: int

    @property
    def question(self) -> str:
        return f"Which is larger, {self.one} or {self.other}?"

    def is_right(self, answer: str) -> bool:
        return re.findall(r"\d+", answer)[:1] == [str(max(self))]

    def reward(self, answer: str) -> float:
        """Rises in small steps: some number, the right one, the right one and nothing else."""
        if not re.search(r"\d", answer):
            return 0.0
        if not self.is_right(answer):
            return 0.1
        return 1.0 if answer.strip() == str(max(self)) else 0.7


def main() -> int:
    parser = make_parser(__doc__, steps=15, learning_rate=5e-4)
    parser.add_argument("--num-questions", type=int, default=4, help="per step")
    parser.add_argument("--group-size", type=int, default=8, help="answers to each")
    options = parser.parse_args()
    tasks = [Task(one, other) for one in range(10) for other in range(10) if one != other]
    random.Random(0).shuffle(tasks)
    unseen, seen = tasks[:NUM_HELD_OUT], tasks[NUM_HELD_OUT:]
    with connect(options) as (service, base_model):
        training = service.create_lora_training_client(base_model, rank=16, seed=0)
        before = ask(training, [task.question for task in unseen], MAX_TOKENS)
        rewards = train(training, seen, options)
        after = ask(training, [task.question for task in unseen], MAX_TOKENS)
        saved = training.save_weights_for_sampler("grpo").result().path
    print(f"{unseen[0].question}\n  before: {before[0]!r}\n  after:  {after[0]!r}\nsaved {saved}")
    print(f"reward {rewards[0]:.3f} -> {fmean(rewards[-3:]):.3f}")
    print(f"right on unseen questions {share(unseen, before):.3f} -> {share(unseen, after):.3f}")
    return 0


def share(tasks: Sequence[Task], answers: Sequence[str]) -> float:
    return fmean(task.is_right(answer) for task, answer in zip(tasks, answers, strict=True))


def train(training: tinkex.TrainingClient, tasks: list[Task], options: Any) -> list[float]:
    """The mean reward of every step."""
    progress, rewards, dice = Progress(options.steps), [], random.Random(1)
    for step in range(1, options.steps + 1):
        groups = draw(training, dice.sample(tasks, options.num_questions), options.group_size, step)
        rewards.append(fmean(reward for group in groups for reward in group.rewards))
        data = [datum for group in groups for datum in group.data()]
        if data:
            training.forward_backward(data, "importance_sampling")
            training.optim_step(AdamParams(learning_rate=options.learning_rate)).result()
        progress.tell(step, reward=rewards[-1])
    return rewards


class Group(NamedTuple):
    """The answers to one question, and what they are worth."""

    prompt: list[int]
    answers: Sequence[SampledSequence]
    rewards: list[float]

    def data(self) -> list[Datum]:
        """An example per answer; a group whose answers are all worth the same teaches nothing."""
        mean, spread = fmean(self.rewards), pstdev(self.rewards)
        if spread == 0.0:
            return []
        return [
            make_datum(self.prompt, answer, (reward - mean) / spread / len(self.answers))
            for answer, reward in zip(self.answers, self.rewards, strict=True)
        ]


def draw(
    training: tinkex.TrainingClient, tasks: list[Task], group_size: int, seed: int
) -> list[Group]:
    """Ask all questions at once, and judge the answers as they come."""
    tokenizer = training.get_tokenizer()
    sampler = training.save_weights_and_get_sampling_client()
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=seed)
    prompts = [prompt_tokens(tokenizer, task.question) for task in tasks]
    asked = [sampler.sample(ModelInput.from_ints(each), group_size, params) for each in prompts]
    groups = []
    for task, prompt, future in zip(tasks, prompts, asked, strict=True):
        answers = future.result().sequences
        rewards = [task.reward(text_of(tokenizer, answer.tokens)) for answer in answers]
        groups.append(Group(prompt, answers, rewards))
    return groups


def make_datum(prompt: list[int], answer: SampledSequence, advantage: float) -> Datum:
    """Position i predicts token i + 1; the prompt's own positions carry no advantage."""
    tokens, silent = [*prompt, *answer.tokens], [0.0] * (len(prompt) - 1)
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [*silent, *(answer.logprobs or [])],
            "advantages": [*silent, *([advantage] * len(answer.tokens))],
        },
    )


if __name__ == "__main__":
    start(main)
