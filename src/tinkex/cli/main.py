"""The `tinkex` command."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import click

from tinkex.cli.context import Context
from tinkex.cli.lazy import Entry, LazyGroup, first_word
from tinkex.cli.options import asked_for

COMMANDS = {
    "auth": Entry(
        "tinkex.cli.commands.auth.group:auth", "Store keys of servers, and see which one is used."
    ),
    "billing": Entry(
        "tinkex.cli.commands.usage.group:billing",
        "Show usage under the names of the official command line.",
    ),
    "chat": Entry("tinkex.cli.commands.chat.command:chat", "Talk with a model or a checkpoint."),
    "checkpoint": Entry(
        "tinkex.cli.commands.checkpoint.group:checkpoint", "Save, list and manage checkpoints."
    ),
    "completion": Entry(
        "tinkex.cli.commands.completion:completion", "Print a script for the completion of a shell."
    ),
    "config": Entry(
        "tinkex.cli.commands.config:config", "Show settings, and where they come from."
    ),
    "doctor": Entry(
        "tinkex.cli.commands.doctor.command:doctor", "Check this installation, and say what to do."
    ),
    "key": Entry(
        "tinkex.cli.commands.key:key", "Make, list and revoke keys of a server, and set quotas."
    ),
    "model": Entry("tinkex.cli.commands.model:model", "Add, list and remove base models."),
    "pipeline": Entry(
        "tinkex.cli.commands.pipeline:pipeline", "Train a model from nothing, stage by stage."
    ),
    "run": Entry("tinkex.cli.commands.run.group:run", "List training runs and sample from them."),
    "sample": Entry(
        "tinkex.cli.commands.run.sample:sample", "Sample from a base model or a checkpoint."
    ),
    "serve": Entry("tinkex.cli.commands.serve:serve", "Run a server on this machine."),
    "session": Entry(
        "tinkex.cli.commands.session.group:session",
        "List sessions, end them and export their timelines.",
    ),
    "train": Entry("tinkex.cli.commands.train.group:train", "Fine-tune a model with a JSONL file."),
    "usage": Entry(
        "tinkex.cli.commands.usage.group:usage", "Show tokens trained and sampled, and storage."
    ),
    "version": Entry("tinkex.cli.commands.version:version", "Print the version of tinkex."),
}


class Outcome(NamedTuple):
    """How a command line ended."""

    exit_code: int
    error: BaseException | None = None


class Root(LazyGroup):
    """The command itself: whatever happens below ends in an Outcome."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """`--version` is another name of the command `version`."""
        place = first_word(args)
        if place is not None and args[place] == "--version":
            args = [*args[:place], "version", *args[place + 1 :]]
        return super().parse_args(ctx, args)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line and end the process; the only place that does."""
        words = sys.argv[1:] if args is None else list(args)
        if not standalone_mode:
            return super().main(words, prog_name, complete_var, standalone_mode, **extra)
        self._main_shell_completion(extra, prog_name or "tinkex", complete_var)
        outcome = run(words, extra.get("obj"))
        if isinstance(outcome.error, BrokenPipeError):
            _forget_stdout()
        sys.exit(outcome.exit_code)


@click.group(
    cls=Root,
    entries=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train and serve LoRA adapters through the Tinker API.",
)
@click.option("--version", is_flag=True, expose_value=False, help="Print the version and exit.")
def main() -> None:
    """The command without a subcommand shows help."""


def run(argv: Sequence[str], context: Context | None = None) -> Outcome:
    """Run a command line; prints to stdout and stderr and never ends the process."""
    asked = asked_for(argv)
    try:
        with _logging((context or Context())._replace(**asked)):
            code = _invoke(argv, context)
            sys.stdout.flush()
        return Outcome(code)
    except BrokenPipeError as error:
        # The reader has seen enough, as `head` does.
        return Outcome(1, error)
    except SystemExit as error:
        return Outcome(error.code if isinstance(error.code, int) else int(bool(error.code)))
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the last resort of a command
        from tinkex.cli.errors import report

        failure = report(error, (context or Context.detect())._replace(**asked))
        return Outcome(failure.exit_code, error)


def _invoke(argv: Sequence[str], context: Context | None) -> int:
    try:
        with main.make_context("tinkex", list(argv), obj=context) as ctx:
            main.invoke(ctx)
    except click.exceptions.Exit as error:
        return error.exit_code
    return 0


@contextlib.contextmanager
def _logging(context: Context) -> Iterator[None]:
    """Show the library's log if asked, and none of it beside JSON."""
    if not context.verbose and not context.is_json:
        yield
        return
    import logging

    from tinkex.logs import ROOT, attach_logger, detach_logger

    logger = logging.getLogger(ROOT)
    level = logger.level
    handler = attach_logger("info") if context.verbose else logging.NullHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        detach_logger(handler)
        logger.setLevel(level)


def _forget_stdout() -> None:
    """Let Python's last flush go nowhere; it would complain about the pipe once more."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
