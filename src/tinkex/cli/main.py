"""The `tinkex` command."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import click

from tinkex.cli.context import Context
from tinkex.cli.lazy import LazyCommand, LazyGroup, first_argument_index
from tinkex.cli.options import scan_output_flags

COMMANDS = {
    "auth": LazyCommand(
        "tinkex.cli.commands.auth:auth", "Store keys of servers, and see which one is used."
    ),
    "billing": LazyCommand(
        "tinkex.cli.commands.usage:billing",
        "Show usage under the names of the official command line.",
    ),
    "chat": LazyCommand(
        "tinkex.cli.commands.chat.command:chat", "Talk with a model or a checkpoint."
    ),
    "checkpoint": LazyCommand(
        "tinkex.cli.commands.checkpoint:checkpoint", "Save, list and manage checkpoints."
    ),
    "completion": LazyCommand(
        "tinkex.cli.commands.completion:completion", "Print a script for the completion of a shell."
    ),
    "config": LazyCommand(
        "tinkex.cli.commands.config:config", "Show settings, and where they come from."
    ),
    "doctor": LazyCommand(
        "tinkex.cli.commands.doctor:doctor", "Check this installation, and say what to do."
    ),
    "key": LazyCommand(
        "tinkex.cli.commands.key:key", "Make, list and revoke keys of a server, and set quotas."
    ),
    "model": LazyCommand("tinkex.cli.commands.model:model", "Add, list and remove base models."),
    "pipeline": LazyCommand(
        "tinkex.cli.commands.pipeline:pipeline", "Train a model from nothing, stage by stage."
    ),
    "run": LazyCommand("tinkex.cli.commands.run:run", "List training runs and sample from them."),
    "sample": LazyCommand(
        "tinkex.cli.commands.run.sample:sample", "Sample from a base model or a checkpoint."
    ),
    "serve": LazyCommand("tinkex.cli.commands.serve:serve", "Run a server on this machine."),
    "session": LazyCommand(
        "tinkex.cli.commands.session:session",
        "List sessions, end them and export their timelines.",
    ),
    "train": LazyCommand("tinkex.cli.commands.train:train", "Fine-tune a model with a JSONL file."),
    "usage": LazyCommand(
        "tinkex.cli.commands.usage:usage", "Show tokens trained and sampled, and storage."
    ),
    "version": LazyCommand("tinkex.cli.commands.version:version", "Print the version of tinkex."),
}


class CliResult(NamedTuple):
    """How a command line ended."""

    exit_code: int
    error: BaseException | None = None


class RootGroup(LazyGroup):
    """The command itself: whatever happens below ends in an Outcome."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """`--version` is another name of the command `version`."""
        place = first_argument_index(args)
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
            _redirect_stdout_to_devnull()
        sys.exit(outcome.exit_code)


@click.group(
    cls=RootGroup,
    entries=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train and serve LoRA adapters through the Tinker API.",
)
@click.option("--version", is_flag=True, expose_value=False, help="Print the version and exit.")
def main() -> None:
    """The command without a subcommand shows help."""


def run(argv: Sequence[str], context: Context | None = None) -> CliResult:
    """Run a command line; prints to stdout and stderr and never ends the process."""
    asked = scan_output_flags(argv)
    try:
        with _log_output((context or Context())._replace(**asked)):
            code = _invoke(argv, context)
            sys.stdout.flush()
        return CliResult(code)
    except BrokenPipeError as error:
        # The reader has seen enough, as `head` does.
        return CliResult(1, error)
    except SystemExit as error:
        return CliResult(error.code if isinstance(error.code, int) else int(bool(error.code)))
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - the last resort of a command
        from tinkex.cli.errors import print_error

        failure = print_error(error, (context or Context.detect())._replace(**asked))
        return CliResult(failure.exit_code, error)


def _invoke(argv: Sequence[str], context: Context | None) -> int:
    try:
        with main.make_context("tinkex", list(argv), obj=context) as ctx:
            main.invoke(ctx)
    except click.exceptions.Exit as error:
        return error.exit_code
    return 0


@contextlib.contextmanager
def _log_output(context: Context) -> Iterator[None]:
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


def _redirect_stdout_to_devnull() -> None:
    """Let Python's last flush go nowhere; it would complain about the pipe once more."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
