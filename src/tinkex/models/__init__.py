"""Base models that are included in the package and need no download."""

from __future__ import annotations

from pathlib import Path

#: A model of a few million parameters, trained with `tinkex.pipeline`; see its model card.
TINY = "tinkex/tiny"
TINY_FOLDER = Path(__file__).parent / "tiny"


def built_in() -> dict[str, str]:
    """Return the included models: name and folder."""
    # A package may omit the folder; the server then starts without the model.
    return {TINY: str(TINY_FOLDER)} if (TINY_FOLDER / "config.json").is_file() else {}
