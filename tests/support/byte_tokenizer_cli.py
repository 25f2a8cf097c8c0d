"""A command line whose models speak bytes, so that no tokenizer has to be fetched."""

from __future__ import annotations

from tests.integration.conftest import KEY
from tinkex import ServiceClient
from tinkex.cli.context import Context, Screen
from tinkex.client.config import Config
from tinkex.engine.fake.toy_tokenizer import ToyTokenizer, toy_tokenizer


def load(name: str) -> ToyTokenizer:
    """The tokenizer of every model but one."""
    if name == "tinkex/mute":
        raise OSError("there is no such tokenizer.")
    return toy_tokenizer()


def make_service(config: Config) -> ServiceClient:
    """A client that loads tokenizers without files."""
    return ServiceClient(config=config.evolve(tokenizer_loader=load))


def context_for(url: str) -> Context:
    """The context of commands that speak to this server."""
    return Context(base_url=url, api_key=KEY, make_service=make_service, stdout=Screen(width=200))
