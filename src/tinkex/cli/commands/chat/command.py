"""`tinkex chat`: talk with a model or a checkpoint."""

from __future__ import annotations

import contextlib
import select
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.client import service_client
from tinkex.cli.commands.sampling_options import SampleSource, SamplingOptions, sampling_options
from tinkex.cli.context import Context, pass_context
from tinkex.cli.id_completion import CHECKPOINT
from tinkex.cli.options import Command
from tinkex.cli.progress import spinner

if TYPE_CHECKING:
    from tinkex.cli.commands.chat.session import ChatSession


@click.command(cls=Command)
@click.argument("model", required=False, type=CHECKPOINT, metavar="[MODEL_OR_PATH]")
@click.option("--system", metavar="TEXT", help="What the model is told before everything.")
@sampling_options(max_tokens=1024, temperature=0.7)
@click.option("--stop", multiple=True, metavar="TEXT", help="End an answer at this text.")
@pass_context
def chat(
    context: Context, model: str | None, system: str | None, tokenizer: str | None, **given: Any
) -> None:
    """Talk with a model or a checkpoint.

    MODEL_OR_PATH is a base model's name, a tinker:// path, or latest, the newest sampler
    checkpoint. Without it, it is smollm2-135m if the server has it, else the only model that was
    added to it, else tinkex/tiny. Answers appear while they are made. /help lists the orders that
    can be typed. If stdin is not a terminal, every line is a message and is answered.
    """
    source = SampleSource.from_options(model, None)
    drawing = SamplingOptions(**{name: given[name] for name in SamplingOptions._fields})
    with service_client(context) as client:
        from tinkex.cli.commands.chat.session import ChatSession

        source = source.resolve(client)
        text = f"Loading the tokenizer of {source.name} ..." if context.is_stdin_terminal else ""
        with spinner(text):
            talk = ChatSession.start(context, client, source, drawing, tokenizer)
        talk.conversation.system = system
        if context.is_stdin_terminal:
            click.echo(f"Talking with {source.name}; /help says what can be typed.", err=True)
        _run_session(context, talk)


def _run_session(context: Context, talk: ChatSession) -> None:
    from tinkex.cli.commands.chat.session import QuitChat

    for text in read_messages(context):
        try:
            talk.handle(text)
        except QuitChat:
            return


INPUT_PROMPT, CONTINUATION_PROMPT = "> ", "... "
#: Lines of a paste come faster than this.
_PASTE_SECONDS = 0.05


def read_messages(context: Context) -> Iterator[str]:
    """What is said, one message at a time, until the end of stdin."""
    return _read_typed(context) if context.is_stdin_terminal else _read_piped()


def _read_piped() -> Iterator[str]:
    if sys.stdin is None:
        return
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")
    for line in sys.stdin:
        if line.strip():
            yield line.rstrip("\r\n")


def _read_typed(context: Context) -> Iterator[str]:
    with contextlib.suppress(ImportError):
        # Its presence gives input() a line that can be edited, and a history.
        import readline  # noqa: F401
    while True:
        try:
            text = _read_message(context)
        except EOFError:
            click.echo("", err=True)
            return
        except KeyboardInterrupt:
            click.echo("\nCtrl-D or /quit ends.", err=True)
            continue
        if text.strip():
            yield text


def _read_message(context: Context) -> str:
    """One message: lines that end with a backslash, or were pasted together, belong together."""
    lines = [_read_line(context, INPUT_PROMPT)]
    while True:
        if lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(_read_line(context, CONTINUATION_PROMPT))
        elif _has_pending_input():
            lines.append(_read_line(context, ""))
        else:
            return "\n".join(lines)


def _read_line(context: Context, prompt: str) -> str:
    if context.stdout.is_terminal:
        return input(prompt)
    # input() would write its prompt among the answers.
    click.echo(prompt, err=True, nl=False)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


def _has_pending_input() -> bool:
    try:
        return bool(select.select([sys.stdin], [], [], _PASTE_SECONDS)[0])
    except (OSError, ValueError):
        # Not something that can be waited for, as on Windows.
        return False
