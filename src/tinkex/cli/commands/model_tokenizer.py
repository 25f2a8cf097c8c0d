"""The tokenizer of an added model in the cache of Hugging Face, for scripts of the official SDK."""

from __future__ import annotations

from tinkex.cli.progress import tell
from tinkex.engine.models.hub_cache import Registered, cache_folder


def explain(name: str, outcome: Registered | None) -> None:
    """Say what the copy is good for, or why there is none."""
    if outcome is Registered.DONE:
        tell(
            f"AutoTokenizer.from_pretrained({name!r}) finds its tokenizer in {cache_folder()}; "
            "`tinkex model remove` takes it away."
        )
    elif outcome is Registered.UNWRITABLE:
        tell(
            f"The tokenizer is not in {cache_folder()}, which cannot be written: the official SDK "
            "will not find it there; tinkex fetches it from the server."
        )
