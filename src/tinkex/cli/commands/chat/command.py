"""`tinkex chat`: talk with a model or a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.client import service_client
from tinkex.cli.commands.chat.reading import read_messages
from tinkex.cli.commands.drawing import SampleSource, SamplingOptions, sampling_options
from tinkex.cli.completing import CHECKPOINT
from tinkex.cli.context import Context, pass_context
from tinkex.cli.options import Command
from tinkex.cli.progress import spinner

if TYPE_CHECKING:
    from tinkex.cli.commands.chat.talk import ChatSession


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
        from tinkex.cli.commands.chat.talk import ChatSession

        source = source.resolve(client)
        text = f"Loading the tokenizer of {source.name} ..." if context.is_stdin_terminal else ""
        with spinner(text):
            talk = ChatSession.start(context, client, source, drawing, tokenizer)
        talk.conversation.system = system
        if context.is_stdin_terminal:
            click.echo(f"Talking with {source.name}; /help says what can be typed.", err=True)
        _run_session(context, talk)


def _run_session(context: Context, talk: ChatSession) -> None:
    from tinkex.cli.commands.chat.conversation import QuitChat

    for text in read_messages(context):
        try:
            talk.handle(text)
        except QuitChat:
            return
