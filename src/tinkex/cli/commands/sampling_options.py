"""What sampling commands share: which model, which tokenizer, and how tokens are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from tinkex.cli.errors import CliError
from tinkex.cli.short_ids import LATEST, resolve_path
from tinkex.ids import SCHEME, looks_like_checkpoint, parse_tinker_path

if TYPE_CHECKING:
    from tinkex.client.sampling import SamplingClient
    from tinkex.client.service import ServiceClient
    from tinkex.text import Tokenizer
    from tinkex.types import SamplingParams, SupportedModel

F = TypeVar("F", bound=Callable[..., Any])


class SamplingOptions(NamedTuple):
    """How tokens are drawn."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def to_sampling_params(
        self, max_tokens: int | None = None, seed: int | None = None
    ) -> SamplingParams:
        """As the server is asked, perhaps for fewer tokens and with another seed."""
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
    """The options of a Drawing, with the defaults in which commands differ."""
    options = (
        click.option(
            "--max-tokens",
            type=click.IntRange(min=1),
            default=max_tokens,
            show_default=True,
            help="The most tokens to draw.",
        ),
        click.option(
            "--temperature",
            type=click.FloatRange(min=0.0),
            default=temperature,
            show_default=True,
            help="0 takes the likeliest token, more than 1 is wilder than the model.",
        ),
        click.option(
            "--top-k",
            type=int,
            default=-1,
            show_default=True,
            help="Draw from so many likeliest tokens; -1 does not limit.",
        ),
        click.option(
            "--top-p",
            type=click.FloatRange(min=0.0, min_open=True, max=1.0),
            default=1.0,
            show_default=True,
            help="Draw from the likeliest tokens that have this probability together.",
        ),
        click.option("--seed", type=int, metavar="N", help="Makes the draw repeatable."),
        click.option(
            "--tokenizer",
            metavar="NAME",
            help="A tokenizer's name or folder, instead of what the server says.",
        ),
    )

    def decorate(command: F) -> F:
        for add in reversed(options):
            command = add(command)
        return command

    return decorate


class SampleSource(NamedTuple):
    """What is sampled from: a base model, or a checkpoint; neither means the usual model."""

    base_model: str | None = None
    model_path: str | None = None

    @classmethod
    def from_options(cls, base_model: str | None, model_path: str | None) -> SampleSource:
        """Read the options; a path that is not an address is a model's name, and the reverse.

        `latest` is the newest sampler checkpoint.
        """
        if LATEST in {base_model, model_path} and not (base_model and model_path):
            return cls(None, LATEST)
        if model_path and looks_like_checkpoint(model_path):
            # Refused with the whole path that it may be a part of.
            parse_tinker_path(model_path)
        if model_path and not model_path.startswith(SCHEME):
            if base_model:
                raise click.UsageError(
                    f"--model-path {model_path} is no tinker:// path; drop it, or --base-model."
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
        """What to call it."""
        return self.model_path or self.base_model or "the usual model"

    def resolve(self, client: ServiceClient) -> SampleSource:
        """The same with its full path, or with the model that is meant if none was named."""
        if self.model_path:
            path = resolve_path(client.rest_client(), self.model_path, "sampler_weights")
            return SampleSource(None, path)
        if self.base_model:
            return self
        models = client.get_server_capabilities().supported_models
        return SampleSource(
            default_model(model for model in models if model.sampleable is not False)
        )

    def create_client(self, client: ServiceClient) -> SamplingClient:
        """A client that samples from it."""
        return client.create_sampling_client(model_path=self.model_path, base_model=self.base_model)


def default_model(models: Iterable[SupportedModel]) -> str:
    """The name of the model that is meant if nobody names one; an error asks for it."""
    from tinkex.engine.models.sources import choose_default_model

    names = [model.model_name for model in models if model.model_name]
    if found := choose_default_model(names):
        return found
    told = f"the server has: {', '.join(names)}" if names else "the server has none"
    raise CliError(
        f"Which model? {told}",
        "Name a base model or the tinker:// path of a checkpoint."
        if names
        else "`tinkex model add smollm2-135m` adds one to a server of yours.",
    )


def load_tokenizer_for(sampler: SamplingClient, name: str | None) -> Tokenizer:
    """The tokenizer that was named, else the model's own; InvalidInput says which one failed."""
    from tinkex.errors import InvalidInput
    from tinkex.text import load_tokenizer

    try:
        found: Tokenizer = load_tokenizer(name) if name else sampler.get_tokenizer()
    except InvalidInput as error:
        hint = f"{error.hint or ''} --tokenizer names another one.".strip()
        raise CliError(error.message, hint) from error
    return found
