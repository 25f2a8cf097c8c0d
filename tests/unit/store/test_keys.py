"""The text form of API keys."""

from __future__ import annotations

import hashlib
import re

from tinkex.store import keys


def test_keys_are_long_random_and_safe_in_urls() -> None:
    generated = {keys.generate_key() for _ in range(100)}
    assert len(generated) == 100
    assert all(re.fullmatch(r"tml-[A-Za-z0-9_-]{43}", secret) for secret in generated)


def test_stored_digest_is_sha256() -> None:
    assert keys.hash_key("tml-ü") == hashlib.sha256("tml-ü".encode()).hexdigest()
