"""What the examples share: which server and model they use, and how they tell how far they are."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import tinkex

#: Taken if nobody names a model and it is there: small, and it knows some English.
FAVOURITE = "smollm2-135m"
BAR_WIDTH = 24


def make_parser(about: str, *, steps: int, learning_rate: float) -> argparse.ArgumentParser:
    """The options that all of them take."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("--base-model", help="model to train on; default: one that the server has")
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps")
    parser.add_argument("--learning-rate", type=float, default=learning_rate)
    parser.add_argument("--base-url", help="server to use; default: the one of this machine")
    parser.add_argument("--api-key", help="key for that server")
    return parser


@contextlib.contextmanager
def connect(options: argparse.Namespace) -> Iterator[tuple[tinkex.ServiceClient, str]]:
    """A client of the server, and the base model to use.

    With no address and no key the SDK finds this machine's server, or starts it.
    """
    with tinkex.ServiceClient(base_url=options.base_url, api_key=options.api_key) as service:
        yield service, options.base_model or choose_model(service)


def choose_model(service: tinkex.ServiceClient) -> str:
    """The favourite if the server has it, else the first that can be trained."""
    offered = service.get_server_capabilities().supported_models
    names = [model.model_name for model in offered if model.trainable is not False]
    if FAVOURITE in names:
        return FAVOURITE
    if not names or names[0] is None:
        raise tinkex.InvalidInput(
            "the server has no base model", hint=f"Add one with `tinkex model add {FAVOURITE}`."
        )
    return names[0]


class Progress:
    """Tells on stderr how far a run is: one line that changes in a terminal, else a few lines."""

    def __init__(self, total: int, label: str = "step", done: int = 0) -> None:
        self._total, self._label, self._done = total, label, done
        self._started = time.monotonic()

    def tell(self, step: int, **figures: float) -> None:
        """Called after every step, counted from 1."""
        is_last = step == self._total
        is_terminal = sys.stderr.isatty()
        if not (is_terminal or is_last or step == 1 or step % max(1, self._total // 10) == 0):
            return
        done = round(BAR_WIDTH * step / self._total)
        pace = (time.monotonic() - self._started) / (step - self._done)
        shown = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
        line = f"{self._label} {step:3}/{self._total} |{'#' * done:{BAR_WIDTH}}| {shown}"
        end = "\n" if is_last or not is_terminal else ""
        start = "\r\x1b[K" if is_terminal else ""
        left = "" if is_last else f"  {pace * (self._total - step):.0f} s left"
        sys.stderr.write(f"{start}{line}{left}{end}")
        sys.stderr.flush()


def start(main: Callable[[], int]) -> None:
    """Run an example; what goes wrong is told in a sentence."""
    try:
        sys.exit(main())
    except tinkex.TinkexError as error:
        sys.exit(f"Error: {error}\n{error.hint or ''}".rstrip())
    except KeyboardInterrupt:
        sys.exit(130)
