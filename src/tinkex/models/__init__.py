"""Base models that come with the package: they are there without a hub, an index or a setting."""

from __future__ import annotations

from pathlib import Path

#: A model of a few million parameters, made by our own pipeline; its card says what it can do.
TINY = "tinkex/tiny"
TINY_FOLDER = Path(__file__).parent / "tiny"


def built_in() -> dict[str, str]:
    """The models that every server of ours has, each name with its folder."""
    # Whoever left the folder out of a package has none, and the server starts all the same.
    return {TINY: str(TINY_FOLDER)} if (TINY_FOLDER / "config.json").is_file() else {}
