"""`tinkex chat`: the command, and reading of messages from a terminal or a pipe."""

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
from tinkex.cli.id_arguments import CHECKPOINT
from tinkex.cli.options import Command
from tinkex.cli.progress import spinner

if TYPE_CHECKING:
    from tinkex.cli.commands.chat.session import ChatSession


@click.command(cls=Command)
@click.argument("model", required=False, type=CHECKPOINT, metavar="[MODEL_OR_PATH]")
@click.option("--system", metavar="TEXT", help="System message.")
@sampling_options(max_tokens=1024, temperature=0.7)
@click.option(
    "--stop", multiple=True, metavar="TEXT", help="End a reply at this text; may be repeated."
)
@pass_context
def chat(
    context: Context, /, model: str | None, system: str | None, tokenizer: str | None, **given: Any
) -> None:
    """Chat with a model or a checkpoint.

    MODEL_OR_PATH is the name of a base model, a tinker:// path, or latest, the newest sampler
    checkpoint. The default is smollm2-135m if the server has it, else the only model added to the
    server, else tinkex/tiny. Replies are streamed. /help lists the chat commands. If stdin is not a
    terminal, every line is a message.
    """
    source = SampleSource.from_options(model, None)
    options = SamplingOptions(**{name: given[name] for name in SamplingOptions._fields})
    with service_client(context) as client:
        from tinkex.cli.commands.chat.session import ChatSession

        source = source.resolve(client)
        text = f"Loading the tokenizer of {source.name} ..." if context.is_stdin_terminal else ""
        with spinner(text):
            session = ChatSession.start(context, client, source, options, tokenizer)
        session.conversation.system = system
        if context.is_stdin_terminal:
            click.echo(f"Chatting with {source.name}; /help lists the commands.", err=True)
        _run_session(context, session)


def _run_session(context: Context, session: ChatSession) -> None:
    from tinkex.cli.commands.chat.session import QuitChat

    for text in read_messages(context):
        try:
            session.handle(text)
        except QuitChat:
            return


INPUT_PROMPT, CONTINUATION_PROMPT = "> ", "... "
#: Pasted lines arrive within this time of each other.
_PASTE_SECONDS = 0.05


def read_messages(context: Context) -> Iterator[str]:
    """Yield the user's messages until the end of stdin."""
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
        # Importing readline gives input() line editing and a history.
        import readline  # noqa: F401
    while True:
        try:
            text = _read_message(context)
        except EOFError:
            click.echo("", err=True)
            return
        except KeyboardInterrupt:
            click.echo("\nPress Ctrl-D or type /quit to end.", err=True)
            continue
        if text.strip():
            yield text


def _read_message(context: Context) -> str:
    """Read one message: lines joined by a trailing backslash or pasted together."""
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
    # input() would write its prompt to stdout, between the replies.
    click.echo(prompt, err=True, nl=False)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


def _has_pending_input() -> bool:
    try:
        return bool(select.select([sys.stdin], [], [], _PASTE_SECONDS)[0])
    except (OSError, ValueError):
        # stdin does not support select(), as on Windows.
        return False
