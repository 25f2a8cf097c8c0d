"""The error if a custom loss is used without torch."""

from __future__ import annotations

import sys
from typing import Any, cast

import pytest

from tinkex.client.custom_loss import (
    check_loss_fn,
    compute_surrogate,
    trace_loss,
)
from tinkex.errors import ConfigError


def test_missing_torch_error_shows_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    loss_fn = cast(Any, lambda *_: None)
    entrances = (
        lambda: check_loss_fn(loss_fn),
        lambda: trace_loss(loss_fn, {}),
        lambda: compute_surrogate([], [], loss_fn),
    )
    for enter in entrances:
        with pytest.raises(ConfigError, match=r"custom losses need torch: .* install .*torch"):
            enter()
