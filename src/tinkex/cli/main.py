"""Entry point of the `tinkex` command."""

from __future__ import annotations

import contextlib
import gc
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
        "tinkex.cli.commands.auth:auth", "Store API keys and show which one is used."
    ),
    "billing": LazyCommand(
        "tinkex.cli.commands.usage:billing",
        "Show usage; same commands as the official CLI.",
    ),
    "chat": LazyCommand(
        "tinkex.cli.commands.chat.command:chat", "Chat with a model or a checkpoint."
    ),
    "checkpoint": LazyCommand(
        "tinkex.cli.commands.checkpoint:checkpoint", "Save, list and manage checkpoints."
    ),
    "cluster": LazyCommand(
        "tinkex.cli.commands.cluster:cluster",
        "Show, scale and drain the worker groups of a server.",
    ),
    "completion": LazyCommand(
        "tinkex.cli.commands.completion:completion", "Print a shell completion script."
    ),
    "config": LazyCommand(
        "tinkex.cli.commands.config:config", "Show the settings and their origin."
    ),
    "doctor": LazyCommand(
        "tinkex.cli.commands.doctor:doctor", "Check this installation and suggest fixes."
    ),
    "key": LazyCommand(
        "tinkex.cli.commands.key:key", "Create, list and revoke API keys of a server; set quotas."
    ),
    "model": LazyCommand("tinkex.cli.commands.model:model", "Add, list and remove base models."),
    "pipeline": LazyCommand(
        "tinkex.cli.commands.pipeline:pipeline", "Train a model from scratch, stage by stage."
    ),
    "run": LazyCommand("tinkex.cli.commands.run:run", "List training runs and sample from them."),
    "sample": LazyCommand(
        "tinkex.cli.commands.run.sample:sample", "Sample from a base model or a checkpoint."
    ),
    "serve": LazyCommand("tinkex.cli.commands.serve:serve", "Run a server on this machine."),
    "session": LazyCommand(
        "tinkex.cli.commands.session:session",
        "List sessions, finish them and export their traces.",
    ),
    "train": LazyCommand("tinkex.cli.commands.train:train", "Fine-tune a model on a JSONL file."),
    "usage": LazyCommand(
        "tinkex.cli.commands.usage:usage", "Show token usage and checkpoint storage."
    ),
    "version": LazyCommand("tinkex.cli.commands.version:version", "Print the version of tinkex."),
    "worker": LazyCommand(
        "tinkex.cli.commands.worker:worker", "Run a worker for the store of a server."
    ),
}


class CliResult(NamedTuple):
    """Exit code and error of a command line."""

    exit_code: int
    error: BaseException | None = None


class RootGroup(LazyGroup):
    """The root command; exits the process with the code of the CliResult."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Treat `--version` as the command `version`."""
        index = first_argument_index(args)
        if index is not None and args[index] == "--version":
            args = [*args[:index], "version", *args[index + 1 :]]
        return super().parse_args(ctx, args)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line and exit the process; nothing else in the CLI exits."""
        words = sys.argv[1:] if args is None else list(args)
        if not standalone_mode:
            return super().main(words, prog_name, complete_var, standalone_mode, **extra)
        self._main_shell_completion(extra, prog_name or "tinkex", complete_var)
        is_process = args is None
        if is_process:
            # Collect less often: what imports create stays, and most commands are short.
            gc.set_threshold(50_000, 20, 50)
        result = run(words, extra.get("obj"))
        if isinstance(result.error, BrokenPipeError):
            _redirect_stdout_to_devnull()
        if is_process:
            # The last collection of the interpreter takes long and frees nothing that is needed.
            gc.freeze()
        sys.exit(result.exit_code)


@click.group(
    cls=RootGroup,
    entries=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train and serve LoRA adapters through the Tinker API.",
)
@click.option("--version", is_flag=True, expose_value=False, help="Print the version and exit.")
def main() -> None:
    """Without a subcommand, print the help."""


def run(argv: Sequence[str], context: Context | None = None) -> CliResult:
    """Run a command line in this process: print its output and return its exit code."""
    output_flags = scan_output_flags(argv)
    try:
        with _log_output((context or Context())._replace(**output_flags)):
            code = _invoke(argv, context)
            sys.stdout.flush()
        return CliResult(code)
    except BrokenPipeError as error:
        # The reader closed the pipe, as `head` does.
        return CliResult(1, error)
    except SystemExit as error:
        return CliResult(error.code if isinstance(error.code, int) else int(bool(error.code)))
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - every error is reported
        from tinkex.cli.errors import print_error

        report = print_error(error, (context or Context.detect())._replace(**output_flags))
        return CliResult(report.exit_code, error)


def _invoke(argv: Sequence[str], context: Context | None) -> int:
    try:
        with main.make_context("tinkex", list(argv), obj=context) as ctx:
            main.invoke(ctx)
    except click.exceptions.Exit as error:
        return error.exit_code
    return 0


@contextlib.contextmanager
def _log_output(context: Context) -> Iterator[None]:
    """Print the library's log with --verbose; with JSON output, suppress it."""
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
    """Discard Python's final flush, which would fail on the broken pipe again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
