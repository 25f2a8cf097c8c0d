"""The servers of a run: one that computes, one that hands out tokens, and what they hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tinkex
from tests.acceptance.server.processes import RealServer, start_server

BASE_MODEL = "tinkex/tiny"


@dataclass(frozen=True)
class Servers:
    """What every version runs against."""

    plain: RealServer
    jwt: RealServer
    external_key: str
    external_run: str

    def place(self, name: str) -> dict[str, str]:
        """Tenants for one version, and checkpoints that its commands read."""
        key = self.plain.new_key(name)
        return {
            "url": self.plain.url,
            "key": key,
            "other_key": self.plain.new_key(f"{name}-other"),
            "jwt_url": self.jwt.url,
            "jwt_key": self.jwt.new_key(name),
            "run": new_run(self.plain.url, key),
            "external_key": self.external_key,
            "external_run": self.external_run,
        }


@contextmanager
def serving(home: Path) -> Iterator[Servers]:
    """Start both servers, with homes of their own, and stop them."""
    plain = start_server(home / "plain", {"gap_seconds": 3.0}, engine="local")
    try:
        jwt = start_server(home / "jwt", {"jwt": True})
        try:
            key = plain.new_key("external")
            run = new_run(plain.url, key, has_external=True)
            yield Servers(plain, jwt, key, run)
        finally:
            jwt.stop()
    finally:
        plain.stop()


def new_run(url: str, key: str, *, has_external: bool = False) -> str:
    """A training run with checkpoints of each type."""
    with tinkex.ServiceClient(base_url=url, api_key=key) as service:
        client = service.create_lora_training_client(BASE_MODEL, rank=8)
        saved = [client.save_state("plain"), client.save_state("spare")]
        saved.append(client.save_weights_for_sampler("plain"))
        if has_external:
            saved.append(client.save_weights_external("exported"))
        for each in saved:
            each.result()
        return str(client.model_id)
