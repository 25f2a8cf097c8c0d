"""The default model when none is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tinkex.cli.commands.sampling_options import SampleSource
from tinkex.cli.errors import CliError
from tinkex.engine.models.sources import DEFAULT_MODEL
from tinkex.models import TINY


class Server:
    """Fake client of a server with some models; those in brackets cannot be sampled."""

    def __init__(self, *names: str) -> None:
        self._models = [
            SimpleNamespace(model_name=name.strip("[]"), sampleable=not name.startswith("["))
            for name in names
        ]

    def get_server_capabilities(self) -> Any:
        """Return the models of the server."""
        reply = SimpleNamespace(supported_models=self._models)
        return SimpleNamespace(result=lambda: reply)


def resolve_default(*names: str) -> str | None:
    client: Any = Server(*names)
    return SampleSource().resolve(client).base_model


def test_single_model_is_the_default() -> None:
    assert resolve_default("org/mine") == "org/mine"


def test_preferred_model_is_the_default() -> None:
    assert resolve_default("a", DEFAULT_MODEL, "z") == DEFAULT_MODEL


def test_added_model_precedes_built_in() -> None:
    assert resolve_default("org/mine", TINY) == "org/mine"
    assert resolve_default(TINY) == TINY
    assert resolve_default(f"[{DEFAULT_MODEL}]", TINY) == TINY


@pytest.mark.parametrize("names", [(), ("a", "b"), ("a", "b", f"[{DEFAULT_MODEL}]", TINY)])
def test_ambiguous_default_is_an_error(names: tuple[str, ...]) -> None:
    with pytest.raises(CliError, match="No model was given"):
        resolve_default(*names)


def test_explicit_model_overrides_default() -> None:
    client: Any = Server(DEFAULT_MODEL, "a")
    assert SampleSource("a").resolve(client).base_model == "a"
