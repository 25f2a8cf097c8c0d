"""A Tinker server for tests: real HTTP, a real tiny model, and faults on demand.

    with StubServer() as server:
        client = ServiceClient(base_url=server.url, api_key="tml-test")
        server.inject("optim_step", Fault(status=503))
        ...
        assert len(server.calls("optim_step")) == 2

`python -m tinkex.testing` serves from a process of its own. Needs the extra `tinkex[server]`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinkex.engine.fake.toy_tokenizer import ToyTokenizer as ToyTokenizer
    from tinkex.testing.calls import Call as Call
    from tinkex.testing.faults import Fault as Fault
    from tinkex.testing.server import StubServer as StubServer

_HOME = {
    "Call": "tinkex.testing.calls",
    "Fault": "tinkex.testing.faults",
    "StubServer": "tinkex.testing.server",
    "ToyTokenizer": "tinkex.engine.fake.toy_tokenizer",
}
__all__ = ["Call", "Fault", "StubServer", "ToyTokenizer"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
