"""Grammars that restrict the tokens of a sequence, compiled by llguidance.

Installed with the extra `structured`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sized
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tinkex.engine.sampling.request import GrammarSpec
from tinkex.engine.sampling.stop_conditions import StopTextMatcher
from tinkex.errors import InvalidInput
from tinkex.installation import install_command

if TYPE_CHECKING:
    from tinkex.detokenizer import TextDecoder

Mask = npt.NDArray[np.bool_]

#: Limits of one token: about 5 ms of computation, and 20 MB of lexer states.
_LIMITS = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 50_000,
    "max_lexer_states": 10_000,
    "verbose_errors": False,
}


class Grammar:
    """The state of a grammar after the tokens of a sequence."""

    def __init__(
        self, matcher: Any, vocab_size: int, decoder: TextDecoder, start_text: str = ""
    ) -> None:
        """The grammar begins after the token that completes `start_text`; empty: at once."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._decoder = decoder
        self._start_text = start_text
        self._start = StopTextMatcher(decoder, [start_text]) if start_text else None

    def copy(self) -> Grammar:
        """A grammar at the beginning, for another sequence."""
        matcher = self._matcher.deep_copy()
        return Grammar(matcher, self._vocab_size, self._decoder, self._start_text)

    @property
    def has_started(self) -> bool:
        """Whether the next token must follow the grammar."""
        return self._start is None

    def allowed_tokens(self) -> Mask:
        """Which tokens may be next; raises InvalidInput if the grammar is too complex."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: self._vocab_size].view(np.bool_)
        if self._matcher.is_error() or not allowed.any():
            reason = " ".join(self._matcher.get_error().split()) or "no token may follow"
            raise InvalidInput(f"the answer cannot follow the JSON schema: {reason:.300}")
        return allowed

    def accept(self, token: int) -> None:
        """Add the next token of the sequence."""
        if self._start is None:
            self._matcher.consume_token(token)
        elif self._start.matches_after(token):
            self._start = None


class GrammarCompiler:
    """Compiles the grammars of one model, one at a time on a thread."""

    def __init__(
        self, decoder: TextDecoder | None, vocab_size: int, eos_tokens: frozenset[int]
    ) -> None:
        self._decoder = decoder
        self._vocab_size = vocab_size
        self._eos_tokens = sorted(eos_tokens)
        self._executor: ThreadPoolExecutor | None = None
        self._tokenizer: Any = None

    def submit(self, spec: GrammarSpec) -> Future[Grammar]:
        """Compile a grammar; the future raises InvalidInput if that is impossible."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="tinkex-grammars")
        return self._executor.submit(self.compile, spec)

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Compile a grammar; raises InvalidInput if that is impossible."""
        llguidance = _import("llguidance")
        if self._decoder is None or not self._eos_tokens:
            raise InvalidInput("structured output needs a model with a tokenizer and EOS tokens")
        if self._tokenizer is None:
            self._tokenizer = self._build_tokenizer()
        matcher = llguidance.LLMatcher(
            self._tokenizer,
            spec.text,
            log_level=0,
            limits=llguidance.LLParserLimits(**_LIMITS),
        )
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split())
            raise InvalidInput(f"the JSON schema cannot be used: {reason:.300}")
        return Grammar(matcher, self._vocab_size, self._decoder, spec.start_text)

    def _build_tokenizer(self) -> Any:
        # Some models have fewer rows of logits than their tokenizer has tokens, others more.
        num_tokens = len(self._decoder) if isinstance(self._decoder, Sized) else 0
        try:
            return _import("llguidance.hf").from_tokenizer(
                self._decoder,
                n_vocab=max(self._vocab_size, num_tokens),
                eos_token=self._eos_tokens,
            )
        except ValueError as error:
            raise InvalidInput(f"structured output needs another tokenizer: {error}") from error


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise InvalidInput(
            f"structured output needs {error.name}, which is not installed on this worker; the "
            f"operator can add it with `{install_command('structured')}`"
        ) from error
