"""Which recipes run, with what, and what has to come out of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.compat.cookbook.workspace import BOXES, MODEL, NUMBERS

Values = Sequence[float]
REWARD = "env/all/reward/total"
NLL = "train_mean_nll"
#: A reward that a model earns only if it can do what a recipe asks for.
HIGH = 0.5
#: The same for sums of two digits, of which a guess gets one in two hundred right.
EARNED = 0.1


def falls(values: Values) -> bool:
    """The last value is below the first."""
    return len(values) > 1 and values[-1] < values[0]


def is_high(values: Values) -> bool:
    """The second half of the steps has a high mean."""
    return _later_mean(values) >= HIGH


def is_earned(values: Values) -> bool:
    """The second half of the steps has a mean far above chance."""
    return _later_mean(values) >= EARNED


def _later_mean(values: Values) -> float:
    later = values[len(values) // 2 :]
    return sum(later) / len(later) if later else -math.inf


def is_there(values: Values) -> bool:
    """The recipe reports the figure at every step."""
    return bool(values)


@dataclass(frozen=True)
class Checkpoint:
    """One that an earlier recipe saved: its last one, or an earlier one by its position."""

    recipe: str
    position: int = -1
    kind: str = "state_path"


@dataclass(frozen=True)
class Recipe:
    """A recipe with its options and the figure that shows whether it worked."""

    name: str
    module: str
    options: dict[str, object]
    metric: str
    rule: Callable[[Values], bool]
    stands_in: str = ""
    #: Options that take a checkpoint; `LOG` stands for the recipe's log folder.
    starts: Mapping[str, Checkpoint] = field(default_factory=dict)
    steps: int = 3

    def arguments(self, log_path: str, paths: Mapping[str, str]) -> list[str]:
        """The command line of the recipe."""
        options = {"model_name": MODEL, "log_path": log_path, "max_steps": self.steps}
        options |= {**self.options, **paths}
        return [f"{name}={value}" for name, value in options.items() if name != LOG]


LOG, LOAD = "log", "load_checkpoint_path"
KEEP = {"behavior_if_log_dir_exists": "resume"}
SUMS = "sums of single digits"
LESSON = {
    "learning_rate": 5e-3,
    "train_on_what": "last_assistant_message",
    "eval_every": 0,
    "save_every": 20,
    **KEEP,
}
FIRST = Recipe(
    "chat_sl",
    "chat_sl.train",
    {"dataset": BOXES, "batch_size": 24, "num_epochs": 10, **LESSON},
    NLL,
    falls,
    "none: the recipe reads a JSONL file (answers in a box)",
    steps=75,
)
SECOND = Recipe(
    "chat_sl, second file",
    "chat_sl.train",
    {"dataset": NUMBERS, "batch_size": 64, "num_epochs": 5, **LESSON},
    NLL,
    falls,
    "none: the recipe reads a JSONL file (sums of two digits, guesses)",
    steps=100,
)
TAUGHT = Checkpoint(FIRST.name)
RECIPES = (
    FIRST,
    SECOND,
    Recipe(
        "sl_loop",
        "sl_loop",
        {"batch_size": 8, "learning_rate": 1e-3, "save_every": 3},
        NLL,
        falls,
        SUMS,
        steps=8,
    ),
    Recipe(
        "sl_basic",
        "sl_basic",
        {"learning_rate": 1e-3, "eval_every": 4},
        NLL,
        falls,
        SUMS,
        steps=8,
    ),
    Recipe(
        "prompt_distillation",
        "prompt_distillation.train",
        {
            "file_path": BOXES,
            "batch_size": 16,
            "learning_rate": 1e-3,
            "eval_every": 0,
            **KEEP,
        },
        NLL,
        falls,
        "a file of conversations, which its first step would write",
        steps=4,
    ),
    Recipe(
        "preference/dpo",
        "preference.dpo.train",
        {"batch_size": 8, "learning_rate": 1e-3, **KEEP},
        "dpo_loss",
        falls,
        SUMS,
        steps=5,
    ),
    Recipe(
        "rl_loop",
        "rl_loop",
        {"batch_size": 8, "group_size": 4, "max_tokens": 12, "learning_rate": 1e-4},
        "reward/total",
        is_high,
        SUMS,
        {LOG: TAUGHT},
    ),
    Recipe(
        "rl_basic",
        "rl_basic",
        {
            "dataset_builder": "tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder",
            "dataset_builder.batch_size": 8,
            "dataset_builder.group_size": 4,
            "dataset_builder.model_name_for_tokenizer": MODEL,
            "dataset_builder.renderer_name": "qwen3_instruct",
            "max_tokens": 12,
            "learning_rate": 1e-4,
        },
        REWARD,
        is_high,
        SUMS,
        {LOAD: TAUGHT},
    ),
    Recipe(
        "math_rl, gsm8k",
        "math_rl.train",
        {
            "env": "gsm8k",
            "groups_per_batch": 8,
            "group_size": 4,
            "max_tokens": 12,
            "eval_every": 0,
            **KEEP,
        },
        REWARD,
        is_high,
        SUMS,
        {LOAD: TAUGHT},
    ),
    Recipe(
        "math_rl, arithmetic",
        "math_rl.train",
        {"env": "arithmetic", "groups_per_batch": 16, "group_size": 4, "eval_every": 0, **KEEP},
        REWARD,
        is_earned,
        "none: it makes its problems",
        {LOAD: Checkpoint(SECOND.name)},
    ),
    Recipe(
        "distillation/on_policy_distillation",
        "distillation.on_policy_distillation",
        {
            "teacher_model": MODEL,
            "groups_per_batch": 32,
            "group_size": 4,
            "max_tokens": 12,
            "lora_rank": 32,
            "learning_rate": 2e-3,
            "eval_every": 0,
            **KEEP,
        },
        "teacher_kl",
        falls,
        SUMS,
        {
            LOAD: Checkpoint(FIRST.name, 0),
            "teacher_checkpoint": Checkpoint(FIRST.name, kind="sampler_path"),
        },
        steps=12,
    ),
    Recipe(
        "preference/shorter",
        "preference.shorter.train",
        {
            "renderer_name": "qwen3_instruct",
            "batch_size": 2,
            "group_size": 4,
            "max_tokens": 24,
            "eval_every": 0,
            **KEEP,
        },
        REWARD,
        is_there,
        "none: it makes its prompts",
    ),
    Recipe(
        "multiplayer_rl/guess_number",
        "multiplayer_rl.guess_number.train",
        {
            "renderer_name": "qwen3_instruct",
            "batch_size": 2,
            "group_size": 2,
            "max_tokens": 16,
            "eval_every": 0,
            **KEEP,
        },
        REWARD,
        is_there,
        "none: it makes its numbers",
        {LOG: Checkpoint(SECOND.name)},
        steps=2,
    ),
    Recipe(
        "multiplayer_rl/twenty_questions",
        "multiplayer_rl.twenty_questions.train",
        {
            "renderer_name": "qwen3_instruct",
            "batch_size": 2,
            "group_size": 2,
            "max_tokens": 8,
            "eval_every": 0,
            **KEEP,
        },
        REWARD,
        is_there,
        "the words come with it; the built-in model answers",
        steps=1,
    ),
)
#: Recipes that do not run here, and why.
NOT_RUN = {
    "audio, vlm_classifier": "need a model that reads sound or images",
    "code_rl, harbor_rl, verifiers_rl": "need a sandbox service or another framework",
    "search_tool": "needs a vector database and embeddings of a remote service",
    "rubric, preference/rlhf": "need a trained judge, which a model of this size cannot be",
    "multiplayer_rl/text_arena": "needs the package textarena",
    "forecasting, decisions, sdft, rl_numerics_check, true_thinking_score": "need datasets of "
    "the hub whose contents are the point of the recipe",
}
