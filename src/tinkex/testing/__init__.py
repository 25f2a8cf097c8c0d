"""A Tinker server for tests: real HTTP, a real tiny model, and faults on demand.

    with StubServer() as server:
        client = ServiceClient(base_url=server.url, api_key="tml-test")
        server.inject("optim_step", Fault(status=503))
        ...
        assert len(server.calls("optim_step")) == 2

A server with `models=[scripted_model()]` answers chats with exactly the texts that prompts set with
`say`; `tinkex.engine.fake.scripted` describes it.

`python -m tinkex.testing` serves from a process of its own. Needs the extra `tinkex[server]`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinkex.engine.fake.scripted import SCRIPTED as SCRIPTED
    from tinkex.engine.fake.scripted import say as say
    from tinkex.engine.fake.scripted import scripted_model as scripted_model
    from tinkex.engine.fake.toy_tokenizer import ToyTokenizer as ToyTokenizer
    from tinkex.testing.calls import Call as Call
    from tinkex.testing.faults import Fault as Fault
    from tinkex.testing.server import StubServer as StubServer

_HOME = {
    "SCRIPTED": "tinkex.engine.fake.scripted",
    "Call": "tinkex.testing.calls",
    "Fault": "tinkex.testing.faults",
    "StubServer": "tinkex.testing.server",
    "ToyTokenizer": "tinkex.engine.fake.toy_tokenizer",
    "say": "tinkex.engine.fake.scripted",
    "scripted_model": "tinkex.engine.fake.scripted",
}
__all__ = ["SCRIPTED", "Call", "Fault", "StubServer", "ToyTokenizer", "say", "scripted_model"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
