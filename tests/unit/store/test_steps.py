"""The JSON form of step metrics."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from tinkex.store.steps import _as_json, _from_json


@given(st.dictionaries(st.text(), st.floats()))
def test_metrics_round_trip_through_strict_json(metrics: dict[str, float]) -> None:
    stored = json.dumps(_as_json(metrics), allow_nan=False)
    decoded = _from_json(json.loads(stored))
    assert decoded is not None
    assert decoded.keys() == metrics.keys()
    for name, value in metrics.items():
        assert decoded[name] == value or (math.isnan(decoded[name]) and math.isnan(value))


def test_missing_metrics_stay_none() -> None:
    assert _from_json(_as_json(None)) is None
