"""What the scenarios of all clients share: where the server is, and how a scenario is declared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from tests.compat.clients.conversations import scripted


@dataclass(frozen=True)
class Place:
    """A server, keys of two of its tenants, and models."""

    url: str
    key: str
    other_key: str
    base_model: str
    #: The path of the adapter that was trained for the scenarios.
    agent: str
    #: A JSON file of texts whose log-probabilities `forward()` computed.
    scores: str = ""
    #: The folder of the tokenizer, for clients that cannot use the server's.
    tokenizer: str = ""
    #: Whether the models are those of the fake engine that say what the prompt says.
    is_scripted: bool = False

    @property
    def openai_url(self) -> str:
        """The base URL of clients of the OpenAI API."""
        return f"{self.url}/v1"

    def prompt(self, text: str, answer: str | None = None) -> str:
        """A text as it is sent to this server's models; scripted ones give this answer."""
        return scripted(text, answer) if self.is_scripted else text


Run: TypeAlias = Callable[[Place], None]


@dataclass(frozen=True)
class ClientScenario:
    """One thing that a client does."""

    title: str
    run: Run

    @property
    def name(self) -> str:
        """The name of its function, which is unique within a client."""
        return self.run.__name__


SCENARIOS: dict[str, ClientScenario] = {}


def scenario(title: str) -> Callable[[Run], Run]:
    """Register a function; one process runs the scenarios of one client."""

    def register(run: Run) -> Run:
        assert run.__name__ not in SCENARIOS, run.__name__
        SCENARIOS[run.__name__] = ClientScenario(title, run)
        return run

    return register
