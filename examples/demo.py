"""The whole product in two minutes: a base model, a local server, a LoRA adapter that learns.

    python examples/demo.py                 # everything stays in ./.demo; run it again to go on

What you see: a small base model is made from nothing; the SDK starts a server on this machine by
itself; the model is asked some questions, trained on the answers and asked again; its weights are
saved, listed and downloaded. It is the SDK you would use with any Tinker server.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

import tinkex
from tinkex import AdamParams, Datum, ModelInput, SamplingParams
from tinkex.text import Tokenizer

MODEL = "demo/small"
ANSWERS = {
    "grass": "green",
    "the sky": "blue",
    "snow": "white",
    "coal": "black",
    "a lemon": "yellow",
    "a cherry": "red",
    "a carrot": "orange",
    "chocolate": "brown",
}
BLOCKS = " ▁▂▃▄▅▆▇█"
console = Console(stderr=True, highlight=False, emoji=False)


def main() -> int:
    options = parse_options()
    home = options.folder.absolute()
    prepare(home, options.base_steps)
    title("A server on this machine")
    try:
        # No address and no key: the SDK starts the server of this home by itself.
        with tinkex.ServiceClient(local_home=home, display_name="demo") as service:
            say(f"it runs at {service.config.base_url}")
            run(service, home, options)
    finally:
        command("serve", "stop", "--home", str(home))
    return 0


def run(service: tinkex.ServiceClient, home: Path, options: argparse.Namespace) -> None:
    title("A LoRA adapter on the base model")
    training = service.create_lora_training_client(MODEL, rank=16, seed=1)
    tokenizer = training.get_tokenizer()
    say(f"model {training.model_id}")

    title("Ask it before it has learned anything")
    before = ask(training, tokenizer)
    show({"before": before})

    title(f"Train on {len(ANSWERS)} answers")
    train(training, tokenizer, options.steps)

    title("Ask again")
    after = ask(training, tokenizer)
    show({"before": before, "after": after})
    num_right = sum(after[thing] == color for thing, color in ANSWERS.items())
    say(f"{num_right} of {len(ANSWERS)} are right")

    title("Save, list, download")
    training.save_state("demo-final", overwrite=True).result()
    saved = training.save_weights_for_sampler("demo-final").result()
    rest = service.rest_client()
    listed = Table(Column("checkpoint", overflow="fold"), "size")
    for checkpoint in rest.list_checkpoints(training.model_id).result().checkpoints:
        listed.add_row(checkpoint.tinker_path, f"{(checkpoint.size_bytes or 0) / 1e6:.1f} MB")
    console.print(listed)
    where = rest.download_checkpoint(saved.path, home / "adapter", force=True).result()
    say("the adapter loads with peft.PeftModel.from_pretrained; it is in")
    print(where)


# --- learning ------------------------------------------------------------------------------------


def train(training: tinkex.TrainingClient, tokenizer: Tokenizer, num_steps: int) -> None:
    """Both calls of a step are sent before either is waited for, so the server never idles."""
    data = [example(tokenizer, thing, color) for thing, color in ANSWERS.items()]
    num_tokens = sum(sum(datum.loss_fn_inputs["weights"].data) for datum in data)
    losses: list[float] = []
    columns = (
        SpinnerColumn(),
        TextColumn("step {task.completed:>3}/{task.total}"),
        BarColumn(24),
        TextColumn("loss {task.fields[loss]:6.3f}  [green]{task.fields[curve]}[/]"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        shown = progress.add_task("train", total=num_steps, loss=float("nan"), curve="")
        for _ in range(num_steps):
            forward_backward = training.forward_backward(data, "cross_entropy")
            optim_step = training.optim_step(AdamParams(learning_rate=5e-3))
            losses.append(forward_backward.result().metrics["loss:sum"] / num_tokens)
            optim_step.result()
            progress.update(shown, advance=1, loss=losses[-1], curve=curve(losses))
    say(f"loss per token {losses[0]:.3f} -> {losses[-1]:.3f}")


def example(tokenizer: Tokenizer, thing: str, color: str) -> Datum:
    """A question with its answer; only the answer counts."""
    prompt = tokenizer.encode(question(thing))
    answer = [*tokenizer.encode(color), tokenizer.eos_token_id]
    tokens = prompt + answer
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(answer),
        },
    )


def ask(training: tinkex.TrainingClient, tokenizer: Tokenizer) -> dict[str, str]:
    """What the model says about every thing; all questions are on their way at once."""
    sampler = training.save_weights_and_get_sampling_client()
    params = SamplingParams(max_tokens=12, temperature=0.0)
    asked = {
        thing: sampler.sample(ModelInput.from_text(question(thing), tokenizer), 1, params)
        for thing in ANSWERS
    }
    return {
        thing: tokenizer.decode(future.result().sequences[0].tokens).removesuffix("<|end|>")
        for thing, future in asked.items()
    }


def question(thing: str) -> str:
    return f"Q: What color is {thing}?\nA: "


# --- the base model and the server ---------------------------------------------------------------


def prepare(home: Path, num_steps: int) -> None:
    """Make the base model once, and have the server of this home serve it."""
    folder = home / "small-model"
    if not (folder / "config.json").exists():
        title("A small base model, from nothing")
        # Late, because it loads torch, which this process needs for nothing else.
        from small_model import make_model

        columns = (
            SpinnerColumn(),
            TextColumn("step {task.completed:>3}/{task.total}"),
            BarColumn(24),
            TextColumn("loss {task.fields[loss]:6.3f}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console) as progress:
            shown = progress.add_task("make", total=None, loss=float("nan"))
            make_model(
                folder,
                num_steps=num_steps,
                report=lambda step, total, loss: progress.update(
                    shown, completed=step, total=total, loss=loss
                ),
            )
    command("model", "add", MODEL, str(folder), "--home", str(home))


def command(*words: str) -> None:
    """Run the command line tool, and be quiet unless it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "tinkex", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        console.print(done.stderr, style="red")


# --- what a person sees --------------------------------------------------------------------------


def title(text: str) -> None:
    console.print(f"\n[bold cyan]{text}[/]")


def say(text: str) -> None:
    console.print(f"  {escape(text)}", soft_wrap=True)


def show(answers: dict[str, dict[str, str]]) -> None:
    table = Table("question", *answers, "wanted")
    for thing, color in ANSWERS.items():
        said = [by[thing] for by in answers.values()]
        cells = [f"[{'green' if word == color else 'dim'}]{escape(repr(word))}[/]" for word in said]
        table.add_row(question(thing).splitlines()[0], *cells, color)
    console.print(table)


def curve(values: list[float], width: int = 24) -> str:
    """The values as a row of bars, the newest on the right."""
    shown = values[:: max(1, len(values) // width)][-width:]
    top = max(shown)
    return "".join(BLOCKS[round((len(BLOCKS) - 1) * value / top)] for value in shown)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="where everything stays")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps")
    parser.add_argument(
        "--base-steps", type=int, default=200, help="steps that make the base model"
    )
    return parser.parse_args()


if __name__ == "__main__":
    try:
        begun = time.monotonic()
        code = main()
        console.print(f"\nDone in {time.monotonic() - begun:.0f} s.")
        sys.exit(code)
    except tinkex.TinkexError as error:
        console.print(f"Error: {error}", style="red")
        if error.hint:
            console.print(f"  {error.hint}")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
