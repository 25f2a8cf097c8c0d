"""A run in a child process that a test kills."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.integration.recipes.conftest import make_plan, start
from tinkex import ServiceClient
from tinkex.testing import ToyTokenizer


def main() -> None:
    url, kind, data, directory = sys.argv[1:]
    with ServiceClient(
        base_url=url, api_key="tml-integration", tokenizer_loader=lambda name: ToyTokenizer()
    ) as service:
        for _ in start(make_plan(Path(data), kind), service, Path(directory)):
            pass


if __name__ == "__main__":
    main()
