"""The servers of a run: one that computes, one that hands out tokens, and what they hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tinkex
from tests.compat.cookbook.workspace import write_models
from tests.support.real_server import RealServer, start_server

BASE_MODEL = "tinkex/tiny"


@dataclass(frozen=True)
class Servers:
    """What every version runs against."""

    plain: RealServer
    jwt: RealServer
    #: Models of the cookbook, and where they are.
    models: Mapping[str, Path]

    def place(self, name: str) -> dict[str, str]:
        """Tenants for one version."""
        jwt = {"jwt_url": self.jwt.url, "jwt_key": self.jwt.new_key(name)}
        return place(self.plain, name, BASE_MODEL) | jwt


@contextmanager
def serving(home: Path) -> Iterator[Servers]:
    """Start both servers, with homes of their own, and stop them."""
    models = write_models(home)
    options = {"gap_seconds": 3.0, "models": [f"{name}={at}" for name, at in models.items()]}
    plain = start_server(home / "plain", options, engine="local")
    try:
        jwt = start_server(home / "jwt", {"jwt": True})
        try:
            yield Servers(plain, jwt, models)
        finally:
            jwt.stop()
    finally:
        plain.stop()


def place(server: RealServer, name: str, base_model: str) -> dict[str, str]:
    """What scenarios need to know: tenants of their own, and runs with checkpoints."""
    key, external_key = server.new_key(name), server.new_key(f"{name}-external")
    return {
        "url": server.url,
        "key": key,
        "other_key": server.new_key(f"{name}-other"),
        "jwt_url": server.url,
        "jwt_key": key,
        "base_model": base_model,
        "run": new_run(server.url, key, base_model),
        "external_key": external_key,
        "external_run": new_run(server.url, external_key, base_model, has_external=True),
    }


def new_run(url: str, key: str, base_model: str, *, has_external: bool = False) -> str:
    """A training run with checkpoints of each type."""
    with tinkex.ServiceClient(base_url=url, api_key=key) as service:
        client = service.create_lora_training_client(base_model, rank=8)
        saved: list[Any] = [client.save_state("plain"), client.save_state("spare")]
        saved.append(client.save_weights_for_sampler("plain"))
        if has_external:
            saved.append(client.save_weights_external("exported"))
        for each in saved:
            each.result()
        return str(client.model_id)
