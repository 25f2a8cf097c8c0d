"""Options shared by sampling commands: model, tokenizer and sampling parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import click

from tinkex.cli.errors import CliError
from tinkex.cli.id_arguments import LATEST, resolve_path
from tinkex.cli.options import F
from tinkex.ids import SCHEME, looks_like_checkpoint, parse_tinker_path

if TYPE_CHECKING:
    from tinkex.client.sampling import SamplingClient
    from tinkex.client.service import ServiceClient
    from tinkex.text import Tokenizer
    from tinkex.types import SamplingParams, SupportedModel


class SamplingOptions(NamedTuple):
    """Sampling parameters given on the command line."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def to_sampling_params(
        self, max_tokens: int | None = None, seed: int | None = None
    ) -> SamplingParams:
        """Convert to SamplingParams, optionally with another token limit and seed."""
        from tinkex.types import SamplingParams

        return SamplingParams(
            max_tokens=self.max_tokens if max_tokens is None else max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed if seed is None else seed,
            stop=list(self.stop) or None,
        )


def sampling_options(max_tokens: int, temperature: float) -> Callable[[F], F]:
    """Add the options of SamplingOptions, with the defaults of a command."""
    options = (
        click.option(
            "--max-tokens",
            type=click.IntRange(min=1),
            default=max_tokens,
            show_default=True,
            help="Maximum number of tokens to sample.",
        ),
        click.option(
            "--temperature",
            type=click.FloatRange(min=0.0),
            default=temperature,
            show_default=True,
            help="Sampling temperature; 0 always takes the most likely token.",
        ),
        click.option(
            "--top-k",
            type=int,
            default=-1,
            show_default=True,
            help="Sample only from the K most likely tokens (-1: no limit).",
        ),
        click.option(
            "--top-p",
            type=click.FloatRange(min=0.0, min_open=True, max=1.0),
            default=1.0,
            show_default=True,
            help="Sample only from the most likely tokens with this total probability.",
        ),
        click.option("--seed", type=int, metavar="N", help="Random seed for reproducible samples."),
        click.option(
            "--tokenizer",
            metavar="NAME",
            help="Name or folder of a tokenizer, instead of the model's own.",
        ),
    )

    def decorate(command: F) -> F:
        for add in reversed(options):
            command = add(command)
        return command

    return decorate


class SampleSource(NamedTuple):
    """The base model or checkpoint to sample from; neither means the default model."""

    base_model: str | None = None
    model_path: str | None = None

    @classmethod
    def from_options(cls, base_model: str | None, model_path: str | None) -> SampleSource:
        """Read both options; each accepts a model name or a tinker:// path.

        `latest` is the newest sampler checkpoint.
        """
        if LATEST in {base_model, model_path} and not (base_model and model_path):
            return cls(None, LATEST)
        if model_path and looks_like_checkpoint(model_path):
            # Raises an error that suggests the full path.
            parse_tinker_path(model_path)
        if model_path and not model_path.startswith(SCHEME):
            if base_model:
                raise click.UsageError(
                    f"--model-path {model_path} is not a tinker:// path; remove it or --base-model."
                )
            base_model, model_path = model_path, None
        if base_model and base_model.startswith(SCHEME):
            if model_path:
                raise click.UsageError("--base-model is a model's name, not a tinker:// path.")
            base_model, model_path = None, base_model
        if model_path:
            parse_tinker_path(model_path)
        return cls(base_model or None, model_path or None)

    @property
    def name(self) -> str:
        """The model or path, for messages."""
        return self.model_path or self.base_model or "the default model"

    def resolve(self, client: ServiceClient) -> SampleSource:
        """Return the source with its full path, or with the default model if none was given."""
        if self.model_path:
            path = resolve_path(client.rest_client(), self.model_path, "sampler_weights")
            return SampleSource(None, path)
        if self.base_model:
            return self
        models = client.get_server_capabilities().result().supported_models
        return SampleSource(
            default_model(model for model in models if model.sampleable is not False)
        )

    def create_client(self, client: ServiceClient) -> SamplingClient:
        """Create a client that samples from this source."""
        created = client.create_sampling_client(self.model_path, self.base_model)
        return created.result()


def default_model(models: Iterable[SupportedModel]) -> str:
    """Return the default model of a server; raise CliError if there is no obvious one."""
    from tinkex.engine.models.sources import choose_default_model

    names = [model.model_name for model in models if model.model_name]
    if default := choose_default_model(names):
        return default
    available = f"the server has: {', '.join(names)}" if names else "the server has no models"
    raise CliError(
        f"No model was given; {available}",
        "Give a base model or the tinker:// path of a checkpoint."
        if names
        else "`tinkex model add smollm2-135m` adds one to your server.",
    )


def load_tokenizer_for(sampler: SamplingClient, name: str | None) -> Tokenizer:
    """Load the given tokenizer, or the model's own; raise CliError if it cannot be loaded."""
    from tinkex.client.sampling import load_minimal_tokenizer
    from tinkex.errors import InvalidInput
    from tinkex.text import load_tokenizer

    try:
        return load_tokenizer(name, is_minimal=True) if name else load_minimal_tokenizer(sampler)
    except InvalidInput as error:
        hint = f"{error.hint or ''} --tokenizer selects another one.".strip()
        raise CliError(error.message, hint) from error
