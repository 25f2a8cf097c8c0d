"""`tinkex run sample`: text from a base model or a checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tinkex.cli.client import service_client
from tinkex.cli.commands.drawing import (
    SampleSource,
    SamplingOptions,
    load_tokenizer_for,
    sampling_options,
)
from tinkex.cli.commands.run.prompt import PromptInput, read_prompt
from tinkex.cli.completing import CHECKPOINT
from tinkex.cli.context import Context, pass_context
from tinkex.cli.errors import CliError, on_interrupt
from tinkex.cli.files import resolve_output_file
from tinkex.cli.format import format_count, format_duration
from tinkex.cli.options import Command
from tinkex.cli.output import announce, show
from tinkex.cli.progress import print_status, spinner

if TYPE_CHECKING:
    from tinkex.cli.output.samples import SampleOutput
    from tinkex.client.sampling import SamplingClient
    from tinkex.text import Tokenizer

MAX_SAMPLES = 1024


class SampleArguments(NamedTuple):
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
@sampling_options(max_tokens=64, temperature=1.0)
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
    source = SampleSource.from_options(base_model, model_path)
    prompt = read_prompt(*(given[f"prompt{tail}"] for tail in ("", "_file", "_tokens")))
    drawing = SamplingOptions(**{name: given[name] for name in SamplingOptions._fields})
    ask = SampleArguments(**{name: given[name] for name in SampleArguments._fields})
    settings: dict[str, Any] = {
        "http_pool": http_pool,
        "poll_timeout_seconds": context.timeout_seconds,
    }
    if output is not None:
        output = resolve_output_file(output.expanduser())
    with (
        on_interrupt("Interrupted: no sample was kept."),
        service_client(context, **settings) as client,
    ):
        source = source.resolve(client)
        result = _request_samples(source.create_client(client), source, prompt, drawing, ask)
    if output is None:
        show(context, result)
        return
    _write_result(output, result.to_file_text(context.format))
    announce(context, f"Wrote {output}", {"output": output, "num_tokens": result.num_tokens})


def _request_samples(
    sampler: SamplingClient,
    source: SampleSource,
    prompt: PromptInput,
    options: SamplingOptions,
    arguments: SampleArguments,
) -> SampleOutput:
    tokenizer = _load_tokenizer(sampler, prompt, arguments)
    tokens = prompt.encode(tokenizer, as_chat=arguments.as_chat)
    from tinkex.cli.output.samples import SampleOutput, SampleRequestInfo
    from tinkex.types import ModelInput

    # Checked before anything is said: bad settings are a mistake, not a failed sample.
    params, model_input = options.to_sampling_params(), ModelInput.from_ints(tokens)
    wanted = format_count(arguments.num_samples, "sample")
    length = format_count(options.max_tokens, "token")
    text = f"Sampling {wanted} of up to {length} from {source.name} ..."
    began = time.monotonic()
    with spinner(text):
        response = sampler.sample(
            model_input,
            arguments.num_samples,
            params,
            include_prompt_logprobs=arguments.with_logprobs,
        ).result()
    asked = SampleRequestInfo(
        base_model=source.base_model,
        model_path=source.model_path,
        prompt_tokens=tokens,
        with_logprobs=arguments.with_logprobs,
    )
    result = SampleOutput(response, asked, tokenizer)
    drawn = format_count(result.num_tokens, "token")
    print_status(f"Done: {drawn} in {format_duration(time.monotonic() - began)}.")
    if result.is_empty:
        print_status(_explain_empty(as_chat=arguments.as_chat))
    return result


def _explain_empty(*, as_chat: bool) -> str:
    """Why there is no text, and what to try."""
    said = "The model ended its text at once, so there is nothing to show."
    if as_chat:
        return f"{said} Another --prompt or a higher --temperature may give more."
    return f"{said} A model that was trained on conversations answers with --chat."


def _load_tokenizer(
    sampler: SamplingClient, prompt: PromptInput, arguments: SampleArguments
) -> Tokenizer | None:
    """The tokenizer; token ids can do without one, text cannot."""
    if prompt.tokens is not None and arguments.as_chat:
        raise click.UsageError("--chat needs a text, not --prompt-tokens.")
    try:
        return load_tokenizer_for(sampler, arguments.tokenizer)
    except CliError as error:
        if prompt.tokens is None or arguments.tokenizer is not None:
            raise
        reason = error.message.removesuffix(".")
        print_status(f"Note: {reason}; token ids are shown instead of text.")
        return None


def _write_result(path: Path, text: str) -> None:
    from tinkex.checkpoint.atomic import write_file_atomic

    write_file_atomic(path, f"{text}\n".encode(), mode=0o644)
