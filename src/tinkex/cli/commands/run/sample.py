"""`tinkex run sample`: text from a base model or a checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tinkex.cli.client import service
from tinkex.cli.commands.drawing import Drawing, Source, drawing_options, tokenizer_of
from tinkex.cli.commands.run.prompt import Prompt, read_prompt
from tinkex.cli.completing import CHECKPOINT
from tinkex.cli.context import Context, pass_context
from tinkex.cli.errors import CliError, on_interrupt
from tinkex.cli.files import check_output
from tinkex.cli.format import format_count, format_duration
from tinkex.cli.options import Command
from tinkex.cli.output import announce, show
from tinkex.cli.progress import tell, waiting

if TYPE_CHECKING:
    from tinkex.cli.output.samples import Samples
    from tinkex.client.sampling import SamplingClient
    from tinkex.text import Tokenizer

MAX_SAMPLES = 1024


class Ask(NamedTuple):
    """What to sample, besides how."""

    num_samples: int
    tokenizer: str | None
    as_chat: bool
    with_logprobs: bool


@click.command(cls=Command)
@click.option("--base-model", metavar="NAME", help="The base model to sample from.")
@click.option(
    "--model-path",
    type=CHECKPOINT,
    metavar="PATH",
    help="The tinker:// path of weights to sample from, or latest.",
)
@click.option("--prompt", metavar="TEXT", help="The text to continue; - reads stdin.")
@click.option("--prompt-file", metavar="FILE", help="A file with the text; - reads stdin.")
@click.option(
    "--prompt-tokens",
    metavar="IDS",
    help="Token ids instead of text: 1,2,3 or [1,2,3], a file with them, or - for stdin.",
)
@click.option("--chat", "as_chat", is_flag=True, help="The prompt is what a user says in a chat.")
@drawing_options(max_tokens=64, temperature=1.0)
@click.option(
    "--num-samples",
    type=click.IntRange(1, MAX_SAMPLES),
    default=1,
    show_default=True,
    help="How many samples to draw.",
)
@click.option("--stop", multiple=True, metavar="TEXT", help="End at this text; may be repeated.")
@click.option("--logprobs", "with_logprobs", is_flag=True, help="Show how likely each token was.")
@click.option("--http-pool", metavar="NAME", help="The name of the pool of connections to use.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the result to this file instead of stdout.",
)
@pass_context
def sample(
    context: Context,
    base_model: str | None,
    model_path: str | None,
    http_pool: str | None,
    output: Path | None,
    **given: Any,
) -> None:
    """Sample from a base model or a checkpoint.

    Without --base-model and --model-path it is smollm2-135m if the server has it, else the only
    model that was added to it, else tinkex/tiny, which every server of tinkex has.
    """
    source = Source.of(base_model, model_path)
    prompt = read_prompt(*(given[f"prompt{tail}"] for tail in ("", "_file", "_tokens")))
    drawing = Drawing(**{name: given[name] for name in Drawing._fields})
    ask = Ask(**{name: given[name] for name in Ask._fields})
    settings: dict[str, Any] = {
        "http_pool": http_pool,
        "poll_timeout_seconds": context.timeout_seconds,
    }
    if output is not None:
        output = check_output(output.expanduser())
    with on_interrupt("Interrupted: no sample was kept."), service(context, **settings) as client:
        source = source.found(client)
        result = _draw(source.open(client), source, prompt, drawing, ask)
    if output is None:
        show(context, result)
        return
    _write(output, result.written(context.format))
    announce(context, f"Wrote {output}", {"output": output, "num_tokens": result.num_tokens})


def _draw(
    sampler: SamplingClient, source: Source, prompt: Prompt, drawing: Drawing, ask: Ask
) -> Samples:
    tokenizer = _tokenizer(sampler, prompt, ask)
    tokens = prompt.encode(tokenizer, as_chat=ask.as_chat)
    from tinkex.cli.output.samples import Asked, Samples
    from tinkex.types import ModelInput

    # Checked before anything is said: bad settings are a mistake, not a failed sample.
    params, model_input = drawing.params(), ModelInput.from_ints(tokens)
    wanted = format_count(ask.num_samples, "sample")
    length = format_count(drawing.max_tokens, "token")
    text = f"Sampling {wanted} of up to {length} from {source.name} ..."
    began = time.monotonic()
    with waiting(text):
        response = sampler.sample(
            model_input, ask.num_samples, params, include_prompt_logprobs=ask.with_logprobs
        ).result()
    asked = Asked(
        base_model=source.base_model,
        model_path=source.model_path,
        prompt_tokens=tokens,
        with_logprobs=ask.with_logprobs,
    )
    result = Samples(response, asked, tokenizer)
    drawn = format_count(result.num_tokens, "token")
    tell(f"Done: {drawn} in {format_duration(time.monotonic() - began)}.")
    if result.is_empty:
        tell(_explain_empty(as_chat=ask.as_chat))
    return result


def _explain_empty(*, as_chat: bool) -> str:
    """Why there is no text, and what to try."""
    said = "The model ended its text at once, so there is nothing to show."
    if as_chat:
        return f"{said} Another --prompt or a higher --temperature may give more."
    return f"{said} A model that was trained on conversations answers with --chat."


def _tokenizer(sampler: SamplingClient, prompt: Prompt, ask: Ask) -> Tokenizer | None:
    """The tokenizer; token ids can do without one, text cannot."""
    if prompt.tokens is not None and ask.as_chat:
        raise click.UsageError("--chat needs a text, not --prompt-tokens.")
    try:
        return tokenizer_of(sampler, ask.tokenizer)
    except CliError as error:
        if prompt.tokens is None or ask.tokenizer is not None:
            raise
        reason = error.message.removesuffix(".")
        tell(f"Note: {reason}; token ids are shown instead of text.")
        return None


def _write(path: Path, text: str) -> None:
    from tinkex.checkpoint.atomic import write_file_atomic

    write_file_atomic(path, f"{text}\n".encode(), mode=0o644)
