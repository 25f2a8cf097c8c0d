"""Tokens, and a fake exchange of API keys for them."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

from tinkex.client.credentials import (
    Credential,
)
from tinkex.client.identity import TokenSource

KEY = "tml-secret-0123456789"


def make_jwt(**claims: Any) -> str:
    parts = ({"alg": "none"}, claims)
    coded = [base64.urlsafe_b64encode(json.dumps(p).encode()).decode().rstrip("=") for p in parts]
    return ".".join([*coded, "signature"])


class Exchange:
    """A fake token exchange: counts calls, can be slow or fail."""

    def __init__(self, lifetime_seconds: float = 3600.0) -> None:
        self.now = 1_000_000.0
        self.lifetime_seconds = lifetime_seconds
        self.seen: list[str] = []
        self.error: Exception | None = None
        self.gate: asyncio.Event | None = None

    def clock(self) -> float:
        return self.now

    async def __call__(self, raw: str) -> str:
        self.seen.append(raw)
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return make_jwt(exp=self.now + self.lifetime_seconds, n=len(self.seen))

    def source(self, credential: Credential | None = None) -> TokenSource:
        credential = credential or Credential(source="argument", value=KEY)
        return TokenSource(credential, self, clock=self.clock)
