"""Train a small model from scratch through all stages, and evaluate each on unseen data.

    pip install 'tinkex[pipeline]' reasoning-gym
    python examples/from_nothing.py                # about half an hour on one core
    python examples/from_nothing.py --quick        # half a minute: does all of it work?

Pretrain, SFT and DPO are those of tinkex/tiny. The reasoning stage learns three kinds of tasks of
reasoning-gym with written reasoning; the package makes the tasks and scores the answers. Run it
again after an interruption to resume.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from thoughts import Entry, Tasks, make_tasks, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_log

from tinkex.errors import TinkexError
from tinkex.pipeline.config import PipelineConfig
from tinkex.pipeline.run.plan import RunFlags
from tinkex.pipeline.run.report import RunOutput, plain_table, table_rows, write_table
from tinkex.pipeline.run.runner import run_pipeline
from tinkex.pipeline.run.stage_specs import DPO, R1
from tinkex.pipeline.tiny import recipe
from tinkex.pipeline.train.evaluation import extract_answer

ANSWERS_AT_ONCE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """Size of the reasoning stage; the recipe of tinkex/tiny defines the earlier stages."""

    before: recipe.TrainingAmounts
    num_rows: int
    num_steps: int
    num_held_out: int
    """Eval tasks of each kind."""
    longest_answer: int = 128
    """Maximum number of tokens of an answer, including the reasoning."""


FULL = Amounts(before=recipe.FULL, num_rows=12_000, num_steps=900, num_held_out=100)
QUICK = Amounts(before=recipe.QUICK, num_rows=60, num_steps=2, num_held_out=2, longest_answer=8)


def main() -> int:
    """Train, evaluate, and print two tables."""
    options = parse_options()
    amounts = QUICK if options.quick else FULL
    started = time.monotonic()
    tasks = make_tasks(amounts.num_rows, amounts.num_held_out, recipe.SEED)
    config = make_config(options.work, tasks, amounts)
    refuse_seen(tasks, config)
    outcomes = run_pipeline(config, RunFlags(run_r1=True), RunOutput(sys.stdout))
    sys.stdout.write("\nEval metrics before and after each stage:\n\n")
    write_table(table_rows(outcomes), sys.stdout)
    sys.stdout.write("\nCorrect answers to eval tasks, before and after the reasoning stage:\n\n")
    sys.stdout.write(plain_table([HEADINGS, *measure(tasks, config, amounts)]))
    sys.stdout.write(f"\n{time.monotonic() - started:.0f} s. {R1.model_dir(config.out_dir)}\n")
    return 0


def make_config(work: Path, tasks: Tasks, amounts: Amounts) -> PipelineConfig:
    """Return the configuration of tinkex/tiny with a reasoning stage."""
    data = recipe.write_rows(work / "data", recipe.SEED, amounts.before.num_rows)
    learned = write_rows(work / "data" / "r1.jsonl", tasks.train, recipe.SEED)
    measured = write_rows(work / "data" / "r1_held_out.jsonl", tasks.held_out, recipe.SEED)
    options = (
        f"--max_steps {amounts.num_steps} --epochs 1000 --batch_size 4 --accumulation_steps 1 "
        f"--learning_rate 2e-3 --muon_lr 0.02 --eval_samples 1000 "
        f"--eval_data_path {shlex.quote(str(measured))}"
    )
    config = recipe.make_config(work / "out", data, amounts.before)
    return replace(config, r1_json=learned, r1_args=options)


# --- eval tasks are not trained on ----------------------------------------------------------


def refuse_seen(tasks: Tasks, config: PipelineConfig) -> None:
    """Check that no training file contains an eval question."""
    held_out = {entry["question"] for some in tasks.held_out.values() for entry in some}
    for path in (config.pretrain_json, config.sft_json, config.dpo_json, config.r1_json):
        assert path is not None
        for line in path.read_text(encoding="utf-8").splitlines():
            seen = held_out.intersection(texts_of(json.loads(line)))
            assert not seen, f"{path} contains an eval task: {seen}"


def texts_of(value: object) -> Iterator[str]:
    """Yield every text of a row, and every line of it."""
    if isinstance(value, str):
        yield from (value, *value.splitlines())
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from texts_of(one)
    elif isinstance(value, list):
        for one in value:
            yield from texts_of(one)


# --- answers --------------------------------------------------------------------------------

HEADINGS = ("Task", "For example", "Answer", "Held out", "One answer for all", "Before", "After")


def measure(tasks: Tasks, config: PipelineConfig, amounts: Amounts) -> Iterator[tuple[str, ...]]:
    """Return a row for each kind of task with the accuracy before and after R1."""
    transformers_log.disable_progress_bar()
    folders = [stage.model_dir(config.out_dir) for stage in (DPO, R1)]
    answers = [answers_of(folder, tasks.held_out, amounts.longest_answer) for folder in folders]
    for name, entries in tasks.held_out.items():
        maker, usual = tasks.makers[name], Counter(entry["answer"] for entry in entries)
        shares = [
            sum(
                maker.score_answer(answer, entry) == 1.0
                for answer, entry in zip(some[name], entries, strict=True)
            )
            / len(entries)
            for some in answers
        ]
        # The accuracy of always giving the most frequent answer.
        cheap = usual.most_common(1)[0][1] / len(entries)
        cells = [f"{100 * share:.0f} %" for share in (cheap, *shares)]
        question, answer = entries[0]["question"].rpartition(": ")[2], entries[0]["answer"]
        yield (name, question, answer, str(len(entries)), *cells)


@torch.no_grad()
def answers_of(
    folder: Path, tasks: Mapping[str, Sequence[Entry]], longest: int
) -> dict[str, list[str]]:
    """Return greedy answers to all questions."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    found: dict[str, list[str]] = {}
    for name, entries in tasks.items():
        found[name] = []
        for some in batches(entries):
            asked = [[{"role": "user", "content": entry["question"]}] for entry in some]
            tokens = tokenizer.apply_chat_template(
                asked,
                add_generation_prompt=True,
                padding=True,
                return_tensors="pt",
                return_dict=True,
            )
            out = model.generate(**tokens, max_new_tokens=longest, do_sample=False)
            start = tokens["input_ids"].shape[1]
            found[name] += [
                extract_answer(written(tokenizer, ids)) for ids in out[:, start:].tolist()
            ]
    return found


def batches(entries: Sequence[Entry]) -> Iterable[Sequence[Entry]]:
    """Split the questions into batches."""
    starts = range(0, len(entries), ANSWERS_AT_ONCE)
    return [entries[start : start + ANSWERS_AT_ONCE] for start in starts]


def written(tokenizer: AutoTokenizer, ids: Sequence[int]) -> str:
    """Decode an answer up to its end; the tags are special tokens and are kept."""
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id}
    stop = next((at for at, token in enumerate(ids) if token in ends), len(ids))
    text: str = tokenizer.decode(ids[:stop])
    return text


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--work", type=Path, default=Path("out/from_nothing"), help="directory for all files"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few steps only, to see that all of it works"
    )
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TinkexError as error:
        print(f"Error: {error.message}\n{error.hint or ''}".rstrip(), file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 1))
    except KeyboardInterrupt:
        sys.exit(130)
