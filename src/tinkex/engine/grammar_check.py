"""Checks a grammar in a process of its own, because only a process can be ended.

python -P grammar_check.py CPU_SECONDS BYTES < GRAMMAR      prints what is wrong, or nothing

Imports nothing of tinkex, so that it starts quickly.
"""

from __future__ import annotations

import resource
import sys

from llguidance import LLMatcher, LLParserLimits


def main() -> None:
    """Check the grammar on standard input within limits of CPU time and memory."""
    num_seconds, num_bytes = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_CPU, (num_seconds, num_seconds))
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limits = LLParserLimits(verbose_errors=False)
    sys.stdout.write(LLMatcher.validate_grammar(sys.stdin.read(), limits=limits))


if __name__ == "__main__":
    main()
