"""Settings of ranks: what is refused, and what follows from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tinkex.errors import ConfigError
from tinkex.server.config import ServerConfig


def config(**settings: Any) -> ServerConfig:
    return ServerConfig(home=Path("/nowhere"), **settings)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"ranks": 0}, "ranks is 0, which does not divide the 8 gradient_shards"),
        ({"ranks": 3}, "ranks is 3, which does not divide the 8 gradient_shards"),
        ({"ranks": 16}, "ranks is 16, which does not divide the 8 gradient_shards"),
        ({"ranks": 2, "gradient_shards": 1}, "ranks is 2, which does not divide the 1 gradient_sh"),
        ({"gradient_shards": 3}, "gradient_shards is 3; expected a power of two up to 64"),
        ({"gradient_shards": 128}, "gradient_shards is 128; expected a power of two up to 64"),
        ({"ranks": 2, "engine": "fake"}, "ranks is 2, but the engine 'fake' has only one"),
        ({"shard_base": True}, "shard_base needs at least 2 ranks"),
        ({"rendezvous": "host:1"}, "rendezvous needs one worker with at least 2 ranks"),
        ({"rendezvous": "host:1", "ranks": 2, "workers": 2}, "rendezvous needs one worker"),
        ({"rendezvous": "host", "ranks": 2}, "rendezvous is 'host'; expected HOST:PORT"),
    ],
)
def test_bad_settings_are_refused_with_one_sentence(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        config(**settings)


@pytest.mark.parametrize(
    ("settings", "shards"),
    [
        ({}, 1),
        ({"ranks": 4}, 8),
        ({"gradient_shards": 8}, 8),
        ({"ranks": 16, "gradient_shards": 16}, 16),
    ],
)
def test_shards_of_new_models(settings: dict[str, Any], shards: int) -> None:
    assert config(**settings).shards_per_model == shards


def test_batches_have_a_micro_batch_per_rank() -> None:
    assert config(ranks=4).batch_limits.max_pass_tokens == 4 * config().batch_limits.max_pass_tokens
