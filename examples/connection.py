"""Shared by the examples: connection, choice of model, and progress output."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

from rich import progress as bars
from rich.markup import escape
from screen import console, working

import tinkex

#: The default model if the server has it: small, and it knows some English.
DEFAULT_MODEL = "smollm2-135m"
BAR_WIDTH = 24
STARTED = time.monotonic()


def make_parser(about: str, *, steps: int, learning_rate: float) -> argparse.ArgumentParser:
    """Return a parser with the options of all examples."""
    first_line = about.partition("\n")[0]
    parser = argparse.ArgumentParser(description=first_line)
    parser.set_defaults(about=first_line)
    parser.add_argument("--base-model", help="model to train on; default: one that the server has")
    parser.add_argument("--steps", type=at_least_one, default=steps, help="optimizer steps")
    parser.add_argument("--learning-rate", type=float, default=learning_rate)
    parser.add_argument("--base-url", help="server to use; default: the one of this machine")
    parser.add_argument("--api-key", help="key for that server")
    return parser


def at_least_one(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


@contextlib.contextmanager
def connect(options: argparse.Namespace) -> Iterator[tuple[tinkex.ServiceClient, str]]:
    """Connect, print what the example does, and yield the client and the base model.

    Without a URL and a key, the SDK finds the server of this machine or starts it.
    """
    console.print(f"[bold]{escape(options.about)}[/]", soft_wrap=True)
    with contextlib.ExitStack() as stack:
        with working("connecting to the server"):
            service = stack.enter_context(open_client(options, options.api_key))
            base_model = options.base_model or choose_model(service)
        console.print(f"  {escape(base_model)}, {options.steps} steps", soft_wrap=True)
        yield service, base_model


def open_client(options: argparse.Namespace, api_key: str | None) -> tinkex.ServiceClient:
    """Return a client with its own connection."""
    return tinkex.ServiceClient(base_url=options.base_url, api_key=api_key)


def choose_model(service: tinkex.ServiceClient) -> str:
    """Return the default model if the server has it, otherwise the first trainable one."""
    offered = service.get_server_capabilities().result().supported_models
    names = [model.model_name for model in offered if model.trainable is not False]
    if DEFAULT_MODEL in names:
        return DEFAULT_MODEL
    if not names or names[0] is None:
        raise tinkex.InvalidInput(
            "the server has no base model", hint=f"Add one with `tinkex model add {DEFAULT_MODEL}`."
        )
    return names[0]


def new_adapter(
    service: tinkex.ServiceClient, base_model: str, rank: int = 16
) -> tinkex.TrainingClient:
    """Create a LoRA adapter; the first one on a base model waits until that is loaded."""
    with working(f"loading {base_model} and creating an adapter"):
        training = service.create_lora_training_client(base_model, rank=rank, seed=0).result()
        # Cached by the client; the first call takes seconds because it imports a large library.
        training.get_tokenizer()
    return training


class Progress:
    """Shows progress on stderr: a bar in a terminal, a few lines elsewhere.

    Use it as `with Progress(steps) as progress`, and call `progress.report(step, loss=...)`.
    """

    def __init__(self, total: int, label: str = "step", done: int = 0) -> None:
        self._total, self._label = total, label
        self._bar = bars.Progress(
            bars.SpinnerColumn(),
            bars.TextColumn(f"{label} {{task.completed:>3}}/{{task.total}}"),
            bars.BarColumn(BAR_WIDTH),
            bars.TextColumn("{task.fields[shown]}"),
            bars.TimeElapsedColumn(),
            bars.TextColumn("[dim]{task.fields[left]}[/]"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, completed=done, shown="", left="")
        self._started, self._done = time.monotonic(), done

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def report(self, step: int, **figures: float) -> None:
        """Report a finished step, counted from 1."""
        shown = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
        pace = (time.monotonic() - self._started) / (step - self._done)
        left = f"{pace * (self._total - step):.0f} s left" if step < self._total else ""
        self._bar.update(self._task, completed=step, shown=shown, left=left)
        every = max(1, self._total // 10)
        if not console.is_terminal and (step in (1, self._total) or step % every == 0):
            done = round(BAR_WIDTH * step / self._total)
            bar = f"{self._label} {step:3}/{self._total} |{'#' * done:{BAR_WIDTH}}|"
            print(f"{bar} {shown}  {left}".rstrip(), file=sys.stderr, flush=True)


def close(options: argparse.Namespace, achieved: str, *next_words: str) -> None:
    """Print the result and a command to continue with."""
    where = ("--base-url", options.base_url) if options.base_url else ()
    command = " ".join(("tinkex", *next_words, *where))
    print(f"Done in {time.monotonic() - STARTED:.0f} s: {achieved}. Next: {command}")


def start(main: Callable[[], int]) -> None:
    """Run an example and print errors as one message."""
    try:
        sys.exit(main())
    except tinkex.TinkexError as error:
        sys.exit(f"Error: {error}\n{error.hint or ''}".rstrip())
    except KeyboardInterrupt:
        print("\nStopped by Ctrl-C; saved checkpoints are not affected.", file=sys.stderr)
        sys.exit(130)


def moved(name: str, before: float, after: float) -> None:
    """Print a metric before and after training."""
    print(f"{name} {before:.3f} -> {after:.3f}")


def answered(question: str, answers: dict[str, Any]) -> None:
    """Print the answers to a question, each with its label."""
    print(question)
    for name, answer in answers.items():
        print(f"  {name + ':':8} {answer!r}")
