"""Names the official package exports for low-level use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict


@dataclass(frozen=True, slots=True)
class Timeout:
    """Time limits in seconds; the single value stands for those not given."""

    timeout: float | None = None
    connect: float | None = None
    read: float | None = None
    write: float | None = None
    pool: float | None = None


class RequestOptions(TypedDict, total=False):
    """Options of one low-level request."""

    headers: dict[str, str]
    max_retries: int
    timeout: float | Timeout | None
    params: dict[str, object]
    extra_json: dict[str, object]
    idempotency_key: str
