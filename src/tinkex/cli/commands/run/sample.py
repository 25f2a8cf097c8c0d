"""The prompt of `tinkex run sample`: text or token ids, as an option, in a file or from stdin."""

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
from tinkex.cli.id_completion import CHECKPOINT
from tinkex.cli.options import Command
from tinkex.cli.output import announce, show
from tinkex.cli.progress import print_status, spinner
from tinkex.cli.prompts import resolve_output_file

if TYPE_CHECKING:
    from tinkex.cli.output.samples import SampleOutput
    from tinkex.client.sampling import SamplingClient
    from tinkex.text import Tokenizer

STDIN = "-"
_PROMPT_FLAGS = ("--prompt", "--prompt-file", "--prompt-tokens")


class PromptInput(NamedTuple):
    """What to continue."""

    text: str | None = None
    tokens: tuple[int, ...] | None = None

    def encode(self, tokenizer: Tokenizer | None, *, as_chat: bool) -> list[int]:
        """Its token ids; as a chat it is what a user says, and the answer comes next."""
        if self.text is None or tokenizer is None:
            return list(self.tokens or ())
        if as_chat:
            from tinkex.data.rendering import Renderer

            return Renderer(tokenizer).render_prompt(({"role": "user", "content": self.text},))
        from tinkex.types import ModelInput

        found = ModelInput.from_text(self.text, tokenizer).to_ints()
        if not found:
            raise CliError("The prompt has no tokens", "Give a text that is not empty.")
        return found


def read_prompt(
    prompt: str | None, prompt_file: str | None, prompt_tokens: str | None
) -> PromptInput:
    """The one prompt that was given; a newline at the end of a file is not part of it."""
    given = dict(zip(_PROMPT_FLAGS, (prompt, prompt_file, prompt_tokens), strict=True))
    named = [flag for flag, value in given.items() if value is not None]
    if not named:
        raise click.UsageError("There is no prompt: give --prompt or --prompt-file.")
    if len(named) > 1:
        raise click.UsageError(f"{' and '.join(named)} exclude each other: give one prompt.")
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
    """Token ids as `[1, 2]`, `1,2` or `1 2`; None if it is something else."""
    inner = text.strip()
    if inner.startswith("[") and inner.endswith("]"):
        inner = inner[1:-1]
    words = inner.replace(",", " ").split()
    if not words or not all(word.isascii() and word.isdecimal() for word in words):
        return None
    return tuple(int(word) for word in words)


def _read_tokens(given: str) -> tuple[int, ...]:
    found = parse_tokens(given)
    if found is None:
        try:
            found = parse_tokens(_read_stdin() if given == STDIN else _read_file(given))
        except FileNotFoundError:
            raise click.UsageError(
                f"--prompt-tokens {given} is neither a list of token ids such as 1,2,3 nor a file."
            ) from None
    if found is None:
        raise click.UsageError(
            f"--prompt-tokens {given} holds no token ids; write them as 1,2,3 or [1, 2, 3]."
        )
    return found


def _read_text_file(name: str) -> str:
    text = _read_stdin() if name == STDIN else _read_file(name)
    if not text:
        raise click.UsageError(f"The prompt in {name} is empty.")
    if _is_number_list(text):
        shown = "what stdin gave" if name == STDIN else name
        print_status(
            f"Note: {shown} is a list of numbers and is read as text; --prompt-tokens {name} "
            "reads it as token ids."
        )
    return text


def _is_number_list(text: str) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    is_list = isinstance(found, list) and bool(found)
    return is_list and all(type(item) is int for item in found)


def _read_file(name: str) -> str:
    try:
        return _without_last_newline(Path(name).expanduser().read_text("utf-8"))
    except UnicodeDecodeError as error:
        raise CliError(f"{name} is no UTF-8 text: {error}") from error


def _read_stdin() -> str:
    try:
        return _without_last_newline("" if sys.stdin is None else sys.stdin.read())
    except UnicodeDecodeError as error:
        raise CliError(f"stdin is no UTF-8 text: {error}") from error


def _without_last_newline(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


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
    from tinkex.system.atomic import write_file_atomic

    write_file_atomic(path, f"{text}\n".encode(), mode=0o644)
