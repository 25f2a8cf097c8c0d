"""The tokenizer of an added model in the cache of Hugging Face, for scripts of the official SDK."""

from __future__ import annotations

from tinkex.cli.progress import print_status
from tinkex.engine.models.hub_cache import TokenizerRegistration, hub_cache_directory


def report_tokenizer_registration(name: str, outcome: TokenizerRegistration | None) -> None:
    """Say what the copy is good for, or why there is none."""
    if outcome is TokenizerRegistration.DONE:
        print_status(
            f"AutoTokenizer.from_pretrained({name!r}) finds its tokenizer in {hub_cache_directory()}; "
            "`tinkex model remove` takes it away."
        )
    elif outcome is TokenizerRegistration.UNWRITABLE:
        print_status(
            f"The tokenizer is not in {hub_cache_directory()}, which cannot be written: the official SDK "
            "will not find it there; tinkex fetches it from the server."
        )
