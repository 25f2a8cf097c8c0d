"""Ranges of numeric server settings."""

from __future__ import annotations

import math
from typing import Protocol

from tinkex.errors import ConfigError

_NOT_NEGATIVE = (
    "max_connections",
    "max_connections_per_peer",
    "api_hang_seconds",
    "idle_stop_seconds",
    "inline_result_bytes",
    "gap_seconds",
    "fake_seconds",
    "fake_token_seconds",
    "max_models_per_tenant",
    "max_checkpoints_per_tenant",
    "max_stored_bytes_per_tenant",
    "max_tokens_per_hour",
    "max_sessions_per_hour",
    "inference_max_tokens",
)
_POSITIVE = (
    "stop_seconds",
    "max_body_bytes",
    "max_inflight_bytes",
    "body_seconds",
    "head_seconds",
    "jwt_seconds",
    "url_seconds",
    "max_request_tokens",
    "max_jobs_per_tenant",
    "max_bytes_per_tenant",
    "session_seconds",
    "snapshot_changes",
    "snapshot_seconds",
    "keep_sampler_weights",
    "metrics_seconds",
    "metrics_per_session",
    "max_attempts",
    "blob_cache_bytes",
    "inference_seconds",
    "inference_max_streams",
)
#: The fewest connections with which a process works.
MIN_CONNECTIONS = 3
#: Upper limits of settings that protect the server: a larger value would disable the protection.
_MAXIMUM = {
    "head_seconds": 600.0,
    "body_seconds": 600.0,
    "jwt_seconds": 30 * 86400.0,
    "max_connections": 1 << 20,
    "max_connections_per_peer": 1 << 20,
}
#: A shorter limit would replace a process only because the machine is busy.
MIN_HANG_SECONDS = 5.0
#: Workers renew their lease every 5 seconds; a shorter limit would move models of busy workers.
MIN_MOVE_SECONDS = 15.0


class NumericSettings(Protocol):
    """The settings with checks of their own; the tables name the others."""

    @property
    def store_connections(self) -> int: ...
    @property
    def move_after_seconds(self) -> float: ...
    @property
    def api_hang_seconds(self) -> float: ...


def check_numbers(config: NumericSettings) -> None:
    """Raise ConfigError for the first number that is out of range."""
    for name in _NOT_NEGATIVE:
        value = getattr(config, name)
        if not 0 <= value < math.inf:
            raise ConfigError(f"{name} is {value}; expected a number from 0")
    if config.store_connections < MIN_CONNECTIONS:
        raise ConfigError(
            f"store_connections is {config.store_connections}; expected {MIN_CONNECTIONS} or "
            "more: one listens, one writes, the others read"
        )
    for name in _POSITIVE:
        value = getattr(config, name)
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} is {value}; expected more than 0")
    for name, maximum in _MAXIMUM.items():
        value = getattr(config, name)
        if value > maximum:
            raise ConfigError(f"{name} is {value}; expected at most {maximum:g}")
    if not MIN_MOVE_SECONDS <= config.move_after_seconds < math.inf:
        raise ConfigError(
            f"move_after_seconds is {config.move_after_seconds}; expected {MIN_MOVE_SECONDS:g} "
            "or more"
        )
    if 0 < config.api_hang_seconds < MIN_HANG_SECONDS:
        raise ConfigError(
            f"api_hang_seconds is {config.api_hang_seconds}; expected {MIN_HANG_SECONDS:g} or "
            "more, or 0 to turn it off"
        )
