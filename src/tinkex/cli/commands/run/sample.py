"""`tinkex sample`: sample from a model; the prompt is text or token ids."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tinkex.cli.client import service_client
from tinkex.cli.commands.sampling_options import (
    SampleSource,
    SamplingOptions,
    load_tokenizer_for,
    sampling_options,
)
from tinkex.cli.context import Context, pass_context
from tinkex.cli.errors import CliError, on_interrupt
from tinkex.cli.format import format_count, format_duration
from tinkex.cli.id_arguments import CHECKPOINT
from tinkex.cli.options import Command
from tinkex.cli.output import announce, show
from tinkex.cli.progress import print_status, spinner
from tinkex.cli.prompts import resolve_output_file

if TYPE_CHECKING:
    from tinkex.cli.context import Screen
    from tinkex.cli.output.samples import SampleOutput
    from tinkex.client.sampling import SamplingClient
    from tinkex.text import Tokenizer

STDIN = "-"
_PROMPT_FLAGS = ("--prompt", "--prompt-file", "--prompt-tokens")


class PromptInput(NamedTuple):
    """A prompt as text or as token ids."""

    text: str | None = None
    tokens: tuple[int, ...] | None = None

    def encode(self, tokenizer: Tokenizer | None, *, as_chat: bool) -> list[int]:
        """Return the token ids; with `as_chat`, render the text as a user message."""
        if self.text is None or tokenizer is None:
            return list(self.tokens or ())
        if as_chat:
            from tinkex.data.rendering import Renderer

            return Renderer(tokenizer).render_prompt(({"role": "user", "content": self.text},))
        from tinkex.types import ModelInput

        tokens = ModelInput.from_text(self.text, tokenizer).to_ints()
        if not tokens:
            raise CliError("The prompt has no tokens", "Give a text that is not empty.")
        return tokens


def read_prompt(
    prompt: str | None, prompt_file: str | None, prompt_tokens: str | None
) -> PromptInput:
    """Read the prompt from one of the options; drop a newline at the end of a file."""
    given = dict(zip(_PROMPT_FLAGS, (prompt, prompt_file, prompt_tokens), strict=True))
    named = [flag for flag, value in given.items() if value is not None]
    if not named:
        raise click.UsageError("No prompt: give --prompt or --prompt-file.")
    if len(named) > 1:
        raise click.UsageError(f"{' and '.join(named)} cannot be combined: give one prompt.")
    if prompt_tokens is not None:
        return PromptInput(tokens=_read_tokens(prompt_tokens))
    if prompt_file is not None:
        return PromptInput(text=_read_text_file(prompt_file))
    assert prompt is not None
    text = _read_stdin() if prompt == STDIN else prompt
    if not text:
        raise click.UsageError("The prompt is empty.")
    return PromptInput(text=text)


def parse_tokens(text: str) -> tuple[int, ...] | None:
    """Parse token ids written as `[1, 2]`, `1,2` or `1 2`; None for anything else."""
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1]
    words = inner.replace(",", " ").split()
    if not words or not all(word.isascii() and word.isdecimal() for word in words):
        return None
    return tuple(int(word) for word in words)


def _read_tokens(given: str) -> tuple[int, ...]:
    tokens = parse_tokens(given)
    if tokens is None:
        try:
            tokens = parse_tokens(_read_stdin() if given == STDIN else _read_file(given))
        except FileNotFoundError:
            raise click.UsageError(
                f"--prompt-tokens {given} is neither a list of token ids such as 1,2,3 nor a file."
            ) from None
    if tokens is None:
        raise click.UsageError(
            f"--prompt-tokens {given} contains no token ids; write them as 1,2,3 or [1, 2, 3]."
        )
    return tokens


def _read_text_file(name: str) -> str:
    text = _read_stdin() if name == STDIN else _read_file(name)
    if not text:
        raise click.UsageError(f"The prompt in {name} is empty.")
    if _is_number_list(text):
        source = "stdin" if name == STDIN else name
        print_status(
            f"Note: {source} is a list of numbers and is used as text; --prompt-tokens {name} "
            "reads it as token ids."
        )
    return text


def _is_number_list(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(type(item) is int for item in value)


def _read_file(name: str) -> str:
    try:
        return _without_last_newline(Path(name).expanduser().read_text("utf-8"))
    except UnicodeDecodeError as error:
        raise CliError(f"{name} is not UTF-8 text: {error}") from error


def _read_stdin() -> str:
    try:
        return _without_last_newline("" if sys.stdin is None else sys.stdin.read())
    except UnicodeDecodeError as error:
        raise CliError(f"stdin is not UTF-8 text: {error}") from error


def _without_last_newline(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


MAX_SAMPLES = 1024


class SampleArguments(NamedTuple):
    """Options of the command besides the prompt and the sampling parameters."""

    num_samples: int
    tokenizer: str | None
    as_chat: bool
    with_logprobs: bool


@click.command(cls=Command)
@click.option("--base-model", metavar="NAME", help="Base model to sample from.")
@click.option(
    "--model-path",
    type=CHECKPOINT,
    metavar="PATH",
    help="tinker:// path of sampler weights, or latest.",
)
@click.option("--prompt", metavar="TEXT", help="Text to continue; - reads stdin.")
@click.option("--prompt-file", metavar="FILE", help="File with the text; - reads stdin.")
@click.option(
    "--prompt-tokens",
    metavar="IDS",
    help="Token ids instead of text: 1,2,3 or [1,2,3], a file with them, or - for stdin.",
)
@click.option(
    "--chat", "as_chat", is_flag=True, help="Send the prompt as a user message of a chat."
)
@sampling_options(max_tokens=64, temperature=1.0)
@click.option(
    "--num-samples",
    type=click.IntRange(1, MAX_SAMPLES),
    default=1,
    show_default=True,
    help="Number of samples.",
)
@click.option("--stop", multiple=True, metavar="TEXT", help="Stop at this text; may be repeated.")
@click.option(
    "--logprobs", "with_logprobs", is_flag=True, help="Show the log-probability of each token."
)
@click.option("--http-pool", metavar="NAME", help="Name of the HTTP connection pool.")
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
    /,
    base_model: str | None,
    model_path: str | None,
    http_pool: str | None,
    output: Path | None,
    **given: Any,
) -> None:
    """Sample from a base model or a checkpoint.

    Without --base-model and --model-path, the model is smollm2-135m if the server has it, else the
    only model added to the server, else the built-in tinkex/tiny. The text of a single sample is
    printed while it is generated.
    """
    source = SampleSource.from_options(base_model, model_path)
    prompt = read_prompt(*(given[f"prompt{tail}"] for tail in ("", "_file", "_tokens")))
    options = SamplingOptions(**{name: given[name] for name in SamplingOptions._fields})
    arguments = SampleArguments(**{name: given[name] for name in SampleArguments._fields})
    if output is not None:
        output = resolve_output_file(output.expanduser())
    with (
        on_interrupt("Interrupted before the samples were complete."),
        service_client(
            context, http_pool=http_pool, poll_timeout_seconds=context.timeout_seconds
        ) as client,
    ):
        source = source.resolve(client)
        sampler = source.create_client(client)
        screen = context.stdout if output is None and not context.is_json else None
        result, is_shown = _request_samples(sampler, source, prompt, options, arguments, screen)
    if is_shown:
        return
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
    screen: Screen | None = None,
) -> tuple[SampleOutput, bool]:
    """Return the samples, and whether their text was printed while it was generated.

    `screen` is where the text goes; None for other outputs.
    """
    tokenizer = _load_tokenizer(sampler, prompt, arguments)
    tokens = prompt.encode(tokenizer, as_chat=arguments.as_chat)
    from tinkex.cli.output.samples import SampleOutput, SampleRequestInfo
    from tinkex.types import ModelInput

    # Validate the settings before printing any status.
    params, model_input = options.to_sampling_params(), ModelInput.from_ints(tokens)
    wanted = format_count(arguments.num_samples, "sample")
    length = format_count(options.max_tokens, "token")
    text = f"Sampling {wanted} of up to {length} from {source.name} ..."
    start = time.monotonic()
    response, is_shown = None, False
    with spinner(text) as status:
        if screen is not None and tokenizer is not None and _can_stream(options, arguments):
            from tinkex.cli.commands.run.streamed_sample import SamplePrinter

            printer = SamplePrinter(tokenizer, screen, status)
            response = printer.print_sample(sampler, source.name, tokens, params)
            is_shown = response is not None
        if response is None:
            response = sampler.sample(
                model_input,
                arguments.num_samples,
                params,
                include_prompt_logprobs=arguments.with_logprobs,
            ).result()
    request = SampleRequestInfo(
        base_model=source.base_model,
        model_path=source.model_path,
        prompt_tokens=tokens,
        with_logprobs=arguments.with_logprobs,
    )
    result = SampleOutput(response, request, tokenizer)
    count = format_count(result.num_tokens, "token")
    print_status(f"Done: {count} in {format_duration(time.monotonic() - start)}.")
    if result.is_empty:
        print_status(_explain_empty(as_chat=arguments.as_chat))
    return result, is_shown


def _can_stream(options: SamplingOptions, arguments: SampleArguments) -> bool:
    """Whether text can be printed as it is generated: one sample, nothing printed after it."""
    # A stop text is part of a sample, but not of a stream.
    return arguments.num_samples == 1 and not arguments.with_logprobs and not options.stop


def _explain_empty(*, as_chat: bool) -> str:
    """Explain an empty result and suggest what to try."""
    reason = "The model produced no text."
    if as_chat:
        return f"{reason} Try another --prompt or a higher --temperature."
    return f"{reason} Try --chat if the model was trained on conversations."


def _load_tokenizer(
    sampler: SamplingClient, prompt: PromptInput, arguments: SampleArguments
) -> Tokenizer | None:
    """Load the tokenizer; it is optional for a prompt of token ids."""
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
    from tinkex.system.atomic import write_file_atomic

    write_file_atomic(path, f"{text}\n".encode(), mode=0o644)
