"""Checkpoints and their files."""

from __future__ import annotations

import io
import json
import tarfile

import numpy as np
import pytest

from tinkex.engine.fake.bigram import Bigram, Moments
from tinkex.ids import TinkerPath
from tinkex.testing.answers import Refusal
from tinkex.testing.downloads import parse_range
from tinkex.testing.weights import Checkpoint, Recipe


def checkpoint() -> Checkpoint:
    return Checkpoint(
        path=TinkerPath("run", "weights", "one"),
        tenant="",
        recipe=Recipe(base_model="tinkex/bigram", rank=4),
        model=Bigram(np.arange(4.0).reshape(2, 2)),
        moments=Moments(),
    )


def test_weights_are_written_as_safetensors() -> None:
    data = checkpoint().files()["adapter_model.safetensors"]
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert size % 8 == 0
    assert header == {"bigram.logits": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
    assert np.frombuffer(data[8 + size :], "<f4").tolist() == [0.0, 1.0, 2.0, 3.0]


def test_an_archive_holds_the_same_files() -> None:
    saved = checkpoint()
    with tarfile.open(fileobj=io.BytesIO(saved.archive())) as tar:
        content = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    assert content == saved.files()
    assert json.loads(content["adapter_config.json"])["r"] == 4


def test_a_checkpoint_lives_as_long_as_it_is_told() -> None:
    saved = checkpoint()
    assert saved.is_alive
    saved.set_ttl(3600)
    assert saved.is_alive
    saved.expires_at = saved.created_at
    assert not saved.is_alive
    saved.set_ttl(None)
    assert saved.is_alive
    with pytest.raises(Refusal, match="ttl_seconds is 0"):
        saved.set_ttl(0)


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("bytes=0-9", (0, 10)),
        ("bytes=90-", (90, 100)),
        ("bytes=-10", (90, 100)),
        ("bytes=-1000", (0, 100)),
        ("bytes=50-1000", (50, 100)),
        ("bytes=100-", None),
        ("bytes=5-4", None),
        ("bytes=-0", None),
        ("bytes=-", None),
        ("lines=1-2", None),
    ],
)
def test_ranges(text: str, bounds: tuple[int, int] | None) -> None:
    assert parse_range(text, 100) == bounds
