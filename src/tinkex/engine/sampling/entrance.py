"""How requests come in: what is read for them, and when their samples begin."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from torch import Tensor

from tinkex.engine.sampling.asks import Tokens
from tinkex.engine.sampling.cache import Cache
from tinkex.engine.sampling.case import Case, Fill, Sequence
from tinkex.engine.sampling.prefixes import MIN_TOKENS, common_length
from tinkex.engine.sampling.prompts import PromptScores
from tinkex.engine.sampling.scheduler import (
    MAX_LIGHT_SEQUENCES,
    Line,
    fair_order,
    num_places,
    num_to_begin,
)
from tinkex.nn.kept import PromptKV

#: A prompt waits for another that is being read if they have so much of it in common.
_WORTH_WAITING = 0.5
#: Samples that had to make room come back when at most so much of the memory is in use.
_CALM = 0.75


class Begun(NamedTuple):
    """Samples of one request that go on from the same token."""

    case: Case
    sequences: list[Sequence]
    hidden_1D: Tensor


class Refused(NamedTuple):
    """A request that could not be read for, and why."""

    case: Case
    reason: str


class Entrance:
    """Lets requests in, first come, first served, as memory and places allow."""

    def __init__(
        self, line: Line[Case], cache: Cache, *, max_sequences: int, is_one_by_one: bool
    ) -> None:
        self._line = line
        self._cache = cache
        self._shelf = cache.shelf
        self._max_sequences = max_sequences
        self._is_one_by_one = is_one_by_one
        self._served_at: dict[str, int] = {}
        """When each tenant's last request began, as a count of those before it."""
        self._num_started = 0

    @property
    def fills(self) -> list[Fill]:
        """What is being read, in the order in which tenants take turns."""
        return [case.fill for case in self._in_turn() if case.fill is not None]

    @property
    def has_both(self) -> bool:
        """Whether tenants with few sequences and others with many are being served."""
        active = [case for case in self._line.values() if case.is_active]
        bulk = {case.scope for case in active if case.is_bulk}
        return bool(bulk) and any(not case.is_bulk and case.scope not in bulk for case in active)

    def _in_turn(self) -> list[Case]:
        """The requests in the order in which they are served."""
        cases = list(self._line.values())
        if not self._is_one_by_one:
            return fair_order(cases)
        waiting = sorted(cases, key=lambda case: (self._served_at.get(case.scope, 0), case.number))
        return [case for case in cases if case.is_active][:1] or waiting[:1]

    # --- reading ---------------------------------------------------------------------------------
    def admit(self) -> Refused | None:
        """Begin to read for those whose turn it is; says which one is to blame if that fails."""
        num_held, held = self._num_held()
        blocked: set[str] = set()
        for case in self._in_turn():
            if case.scope in blocked:
                continue
            tokens = case.next_tokens() if case.fill is None and case.stored is None else None
            if tokens is None or self._is_read_soon(case, tokens):
                continue
            num_free = num_places(self._max_sequences, num_held, held[case.scope])
            if num_free < 1 or not self._is_calm(case):
                # None of a tenant's requests goes before an earlier one.
                blocked.add(case.scope)
                continue
            try:
                if not self._start(case, tokens):
                    return None
            except (MemoryError, RuntimeError) as error:
                return Refused(case, str(error))
            num_held += 1
            held[case.scope] += 1
        return None

    def finish(self, fill: Fill, hidden_1D: Tensor) -> None:
        """Note that all is read; `hidden_1D` is the last token's."""
        fill.stored.last_hidden_1D = hidden_1D
        fill.case.fill, fill.case.stored = None, fill.stored
        self._shelf.keep(fill.case.prefix_key, fill.tokens, fill.stored)

    def _start(self, case: Case, tokens: Tokens) -> bool:
        if case.fresh and not case.running:
            of_scope = (one for one in self._line.values() if one.scope == case.scope)
            self._note_start(case)
            case.is_bulk = sum(one.num_open for one in of_scope) > MAX_LIGHT_SEQUENCES
        about = case.ask.about_prompt if case.fresh else None
        if about is not None and case.scores is None:
            # First of all, for it may fail, and nothing is held yet.
            case.scores = PromptScores(case.ask, about)
        num_usable = len(tokens) if about is None else about.first_row
        match = self._shelf.find(case.prefix_key, tokens)
        num_common = min(match.num_tokens, num_usable) if match is not None else 0
        if match is not None and num_common == len(tokens) == match.kept.num_tokens:
            self._shelf.hold(match.kept)
            case.stored = match.kept
        else:
            num_common = min(num_common, len(tokens) - 1)
            stored = self._store(tokens, match.kept if match is not None else None, num_common)
            if stored is None:
                return False
            case.fill = Fill(case, tokens, stored, num_common)
        if case.fresh:
            case.num_cached = num_common
        return True

    def _note_start(self, case: Case) -> None:
        self._num_started += 1
        present = {one.scope for one in self._line.values()}
        self._served_at = {
            scope: at for scope, at in self._served_at.items() if scope in present
        } | {case.scope: self._num_started}

    def _store(self, tokens: Tokens, source: PromptKV | None, num_common: int) -> PromptKV | None:
        """Memory for tokens, the first of which are known from another prompt."""
        if source is None:
            return self._cache.store(len(tokens))
        # Held, for making room may else take it away.
        self._shelf.hold(source)
        try:
            stored = self._cache.store(len(tokens))
        finally:
            self._shelf.release(source)
        if stored is not None:
            stored.copy_prefix(source, num_common)
        return stored

    def _is_read_soon(self, case: Case, tokens: Tokens) -> bool:
        """Whether most of it is being read for another request."""
        if case.ask.about_prompt is not None or self._is_one_by_one:
            return False
        enough = max(MIN_TOKENS, int(len(tokens) * _WORTH_WAITING))
        return any(
            fill.case.prefix_key == case.prefix_key and common_length(fill.tokens, tokens) >= enough
            for fill in (one.fill for one in self._line.values())
            if fill is not None
        )

    def _is_calm(self, case: Case) -> bool:
        """Whether a sample that had to make room would not have to at once again."""
        if case.fresh or not len(self._cache):
            return True
        return self._cache.busy_bytes <= _CALM * self._cache.max_bytes

    # --- beginning -------------------------------------------------------------------------------
    def begin(self, *, is_light: bool = False) -> list[Begun]:
        """Let samples run whose context is read; only those of tenants with few if `is_light`."""
        begun, blocked = [], set()
        for case in self._in_turn():
            stored = case.stored
            if stored is None or (is_light and case.is_bulk) or case.scope in blocked:
                continue
            hidden_1D = stored.last_hidden_1D
            assert hidden_1D is not None
            sequences = self._place(case, stored)
            if not sequences:
                blocked.add(case.scope)
                continue
            if not case.fresh:
                case.stored = None
                self._shelf.release(stored)
            begun.append(Begun(case, sequences, hidden_1D))
        return begun

    def _place(self, case: Case, stored: PromptKV) -> list[Sequence]:
        waiting = case.waiting
        num_free = self._num_free(case)
        num = num_to_begin(len(waiting), num_free, stored.num_tokens, self._max_sequences)
        has_one_left = case.ask.max_length - stored.num_tokens == 1
        if num and not has_one_left:
            num = self._cache.place(waiting[:num], stored)
        return case.take_waiting(num)

    def _num_free(self, case: Case) -> int:
        own = [len(one.running) for one in self._line.values() if one.scope == case.scope]
        num_held = sum(len(one.running) for one in self._line.values())
        return num_places(self._max_sequences, num_held, sum(own))

    def _num_held(self) -> tuple[int, Counter[str]]:
        """The places of sequences that run or are about to, of all and by tenant."""
        held: Counter[str] = Counter()
        for case in self._line.values():
            held[case.scope] += len(case.running) + (case.fill is not None)
        return held.total(), held

    # --- leaving ---------------------------------------------------------------------------------
    def give_up(self, case: Case) -> bool:
        """Let go of what was read for a request, which is read again later; False if nothing."""
        held = case.fill.stored if case.fill is not None else case.stored
        if held is None:
            return False
        case.fill = case.stored = None
        self._shelf.release(held)
        return True

    def remove(self, case: Case) -> None:
        """Let a request go with all it has."""
        del self._line[case.ticket]
        for sequence in case.running:
            self._cache.leave(sequence)
        self.give_up(case)
