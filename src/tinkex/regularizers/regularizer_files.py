"""Read regularizers from TOML files and plain values.

[[regularizer]]
kind = "kl"
weight = 0.1
direction = "reverse"
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from tinkex.errors import InvalidInput
from tinkex.regularizers.base import Regularizer
from tinkex.regularizers.between_datums import Consistency, GradientPenalty, Orthogonality
from tinkex.regularizers.combined import check_regularizers
from tinkex.regularizers.elementwise import L1, L2, ElasticNet, Entropy, KLDivergence

#: Regularizers by the `kind` of a file.
KINDS: Mapping[str, type[Regularizer]] = {
    cls.kind: cls
    for cls in (
        *(L1, L2, ElasticNet, Entropy, KLDivergence),
        *(Consistency, Orthogonality, GradientPenalty),
    )
}
#: A larger file is not a list of regularizers.
MAX_FILE_BYTES = 65_536


def load_regularizers(path: Path) -> tuple[Regularizer, ...]:
    """Read the `[[regularizer]]` tables of a TOML file."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise InvalidInput(f"{path} has more than {MAX_FILE_BYTES} bytes")
        tables = tomllib.loads(content.decode())
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidInput(f"the regularizer file {path} cannot be read: {reason}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path} is not valid TOML: {error}") from error
    rows = tables.pop("regularizer", None)
    if tables or not isinstance(rows, list):
        raise InvalidInput(
            f"{path} must contain only [[regularizer]] tables; it has {sorted(tables)}"
        )
    return parse_regularizers(rows)


def parse_regularizers(rows: Sequence[Mapping[str, Any]]) -> tuple[Regularizer, ...]:
    """Create regularizers from plain values, such as `{"kind": "l2", "weight": 0.1}`."""
    parsed = tuple(_parse(row) for row in rows)
    check_regularizers(parsed)
    return parsed


def regularizer_to_dict(regularizer: Regularizer) -> dict[str, object]:
    """Return the plain values of a regularizer; parse_regularizers() reads them."""
    values = {field.name: getattr(regularizer, field.name) for field in fields(regularizer)}
    return {"kind": regularizer.kind, **values}


def _parse(row: Mapping[str, Any]) -> Regularizer:
    if not isinstance(row, Mapping):
        raise InvalidInput(f"a regularizer is {row!r:.80}; expected a table")
    settings = dict(row)
    kind = settings.pop("kind", None)
    cls = KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise InvalidInput(
            f"the kind of a regularizer is {kind!r}; expected one of {', '.join(sorted(KINDS))}"
        )
    names = [field.name for field in fields(cls)]
    if unknown := sorted(settings.keys() - set(names)):
        raise InvalidInput(
            f"the regularizer {kind!r} has no setting {unknown[0]!r}; it has {', '.join(names)}"
        )
    if "weight" not in settings:
        raise InvalidInput(f"the regularizer {kind!r} has no weight; add one, such as weight = 0.1")
    try:
        return cls(**settings)
    except TypeError as error:
        raise InvalidInput(f"the regularizer {kind!r} has an invalid setting: {error}") from error
