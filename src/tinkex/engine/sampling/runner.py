"""Continuous batching: samples enter, take steps together, and leave, each in its own time.

admit what can be read -> give larger places to those that need them -> one pass over the next token
of every sample and some tokens of prompts -> choose a token for each -> hand out what is over
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.config import EngineConfig
from tinkex.engine.protocol import Failure, Finished
from tinkex.engine.sampling.adapter import SamplerAdapter
from tinkex.engine.sampling.asks import Ask, Limits, read_ask
from tinkex.engine.sampling.cache import Cache
from tinkex.engine.sampling.case import Case, Sequence
from tinkex.engine.sampling.entrance import Begun, Entrance
from tinkex.engine.sampling.passes import Chunk, Crew, Passes
from tinkex.engine.sampling.sampler import Chosen, Settings, choose
from tinkex.engine.sampling.scheduler import LightTurns, Line, max_kept_tokens, share_tokens
from tinkex.engine.sampling.slots import capacity_for
from tinkex.engine.sampling.stops import Texts
from tinkex.engine.trainer import is_out_of_memory
from tinkex.errors import InvalidInput, RequestErrorCategory
from tinkex.logs import get_logger
from tinkex.nn.host import HostedModel
from tinkex.types import SampleRequest

LOG = get_logger(__name__)

__all__ = ["SampleRunner", "SamplerAdapter", "Texts"]

#: How long one step goes on before the caller has its turn, if nothing is over sooner.
STEP_SECONDS = 0.01

_SERVER = RequestErrorCategory.Server
_NOT_A_NUMBER = Failure(
    "the model's output is not a number: the weights have become too large or are not finite"
)
_NO_MEMORY = Failure(
    "there is no memory left to go on with this sample; try again later, or ask for fewer tokens",
    _SERVER,
)
_BROKEN = Failure(
    "the sample could not be computed; the server's log says why, and it may be tried again",
    _SERVER,
)


@dataclass(slots=True)
class _Prepared:
    """Sequences that take a step together, as of a version of the cache."""

    version: int
    crew: Crew
    settings: Settings | None = None


class SampleRunner:
    """All samples of one base model and its adapters."""

    def __init__(
        self,
        host: HostedModel,
        *,
        texts: Texts | None,
        eos_tokens: frozenset[int],
        max_context_tokens: int,
        config: EngineConfig,
    ) -> None:
        self._host = host
        self._texts = texts
        self._config = config
        self._limits = Limits(
            vocab_size=host.vocab_size,
            max_context_tokens=max_context_tokens,
            eos_tokens=eos_tokens,
            has_texts=texts is not None,
        )
        self._passes = Passes(host)
        self._kind = self._passes.kind()
        self._line: Line[Case] = Line()
        self._over: list[Finished] = []
        self._num_added = 0
        self._light = LightTurns()
        self._begin_empty()

    @property
    def max_requests(self) -> int:
        """How many requests can run at once."""
        return 1 if self._config.is_deterministic else self._config.max_sequences

    @property
    def used_bytes(self) -> int:
        """How much memory keys and values take, those kept for later included."""
        return self._cache.used_bytes

    def __len__(self) -> int:
        return len(self._line) + len(self._over)

    def add(
        self,
        ticket: str,
        adapter: SamplerAdapter | None,
        request: SampleRequest,
        *,
        scope: str = "",
    ) -> None:
        """Let a request in; a bad one is reported by `step`, and a ticket that runs starts anew."""
        self.cancel(ticket)
        try:
            ask = read_ask(request, self._limits)
            self._check_size(ask)
        except InvalidInput as error:
            self._over.append(Finished(ticket, Failure(error.message, error.category)))
            return
        self._num_added += 1
        case = self._line[ticket] = Case(ticket, self._num_added, adapter, ask, scope=scope)
        case.open(self._texts)

    @torch.inference_mode()
    def cancel(self, ticket: str) -> None:
        """Free a request's memory at once; one that is not there is no error."""
        case = self._line.get(ticket)
        if case is not None:
            self._entrance.remove(case)
        self._over = [over for over in self._over if over.ticket != ticket]

    @torch.inference_mode()
    def clear(self) -> None:
        """Forget all requests, and all that is kept for later ones."""
        for ticket in list(self._line):
            self.cancel(ticket)
        self._over.clear()
        self._cache.clear()
        self._crews.clear()

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Go a short way with all requests, and hand out those that are over."""
        deadline = time.monotonic() + STEP_SECONDS
        while self._line and not self._over:
            self._try_turn()
            if time.monotonic() >= deadline:
                break
        over, self._over = self._over, []
        return over

    # --- trouble ---------------------------------------------------------------------------------
    def _try_turn(self) -> None:
        """One turn; if it fails, those who may be to blame fail, and the others start over."""
        try:
            self._turn()
        except Exception as error:  # one bad pass must not end the worker
            is_full = is_out_of_memory(error)
            if not is_full:
                LOG.exception("a pass of samples failed")
        else:
            return
        # Out of the handler: its traceback holds the tensors that were in the way.
        cases = list(self._line.values())
        active = [case for case in cases if case.is_active] or cases
        self._begin_empty()
        for case in cases:
            case.start_over()
        for case in active[-1:] if is_full else active:
            self._fail(case, _NO_MEMORY if is_full else _BROKEN)

    def _begin_empty(self) -> None:
        """Have nothing in memory; what was there may be in disorder, so it is not asked to go."""
        config = self._config
        self._cache = Cache(
            self._kind, config.cache_bytes, has_prefixes=not config.is_deterministic
        )
        self._entrance = Entrance(
            self._line,
            self._cache,
            max_sequences=config.max_sequences,
            is_one_by_one=config.is_deterministic,
        )
        self._crews: dict[bool, _Prepared] = {}
        """The sequences of the next step: of all tenants, and of those with few alone."""

    # --- one turn --------------------------------------------------------------------------------
    def _turn(self) -> None:
        self._admit()
        self._make_places()
        has_both = self._entrance.has_both
        is_light = has_both and self._light.is_due
        started = time.monotonic()
        self._advance(is_light=is_light)
        self._light.note(time.monotonic() - started, is_light=is_light, has_both=has_both)

    def _advance(self, *, is_light: bool) -> None:
        prepared = self._prepared(is_light=is_light)
        crew = prepared.crew
        chunks = self._chunks(has_samples=len(crew) > 0, is_light=is_light)
        hidden_TD = None
        if len(crew) or chunks:
            hidden_TD = self._passes.run(crew, chunks)
            for room in crew.rooms:
                room.advance()
            self._read(chunks, hidden_TD[len(crew) :])
        begun = self._entrance.begin(is_light=is_light)
        if len(crew) or begun:
            self._go_on(prepared, hidden_TD, begun)
        elif self._line and not chunks and not is_light:
            self._break_tie()

    def _prepared(self, *, is_light: bool) -> _Prepared:
        """The sequences that take a step; the same while none comes or goes."""
        found = self._crews.get(is_light)
        if found is None or found.version != self._cache.version:
            rooms = [room for room in self._cache.rooms if not (is_light and room.is_bulk)]
            found = _Prepared(self._cache.version, Crew(rooms, self._host.device))
            self._crews[is_light] = found
        return found

    def _admit(self) -> None:
        while (refused := self._entrance.admit()) is not None:
            message = f"no memory to read the prompt: {refused.reason}"
            self._fail(refused.case, Failure(message, _SERVER))

    def _chunks(self, *, has_samples: bool, is_light: bool) -> list[Chunk]:
        fills = [fill for fill in self._entrance.fills if not (is_light and fill.case.is_bulk)]
        shares = share_tokens(
            [fill.num_left for fill in fills],
            has_samples=has_samples,
            pass_tokens=self._config.pass_tokens,
        )
        return [Chunk(fill, num) for fill, num in zip(fills, shares, strict=True) if num]

    def _read(self, chunks: Many[Chunk], hidden_TD: Tensor) -> None:
        """Take in what a pass found out about prompts."""
        start = 0
        for fill, num in chunks:
            hidden_MD = hidden_TD[start : start + num]
            start += num
            case = fill.case
            if case.scores is not None and case.fresh:
                logits_of = partial(self._passes.logits_of, case.adapter)
                case.scores.read(fill.num_done, hidden_MD, logits_of, self._limits.vocab_size)
            fill.num_done += num
            if not fill.num_left:
                self._entrance.finish(fill, hidden_MD[-1:].clone())

    # --- choosing --------------------------------------------------------------------------------
    def _go_on(self, prepared: _Prepared, hidden_TD: Tensor | None, begun: Many[Begun]) -> None:
        """Give every sample its next token."""
        crew = prepared.crew
        logits_MV = self._logits(crew, hidden_TD, begun)
        runs = crew.sequences + [one for start in begun for one in start.sequences]
        numbers = np.array([run.dice.throw() for run in runs])
        settings = self._settings_of(runs, None if begun else prepared)
        self._take(runs, choose(logits_MV, settings, numbers))

    def _logits(self, crew: Crew, hidden_TD: Tensor | None, begun: Many[Begun]) -> Tensor:
        parts = [hidden_TD[: len(crew)]] if hidden_TD is not None else []
        hidden_MD = torch.cat([*parts, *(start.hidden_1D for start in begun)])
        adapters = crew.adapters + [start.case.adapter for start in begun]
        logits_MV = self._passes.logits(hidden_MD, adapters)
        repeats = [1] * len(crew) + [len(start.sequences) for start in begun]
        if max(repeats) == 1:
            return logits_MV
        return logits_MV.repeat_interleave(torch.tensor(repeats, device=logits_MV.device), dim=0)

    def _settings_of(self, runs: Many[Sequence], prepared: _Prepared | None) -> Settings:
        known = prepared.settings if prepared is not None else None
        if known is not None:
            return known
        settings = Settings([run.ask for run in runs], self._host.device)
        if prepared is not None:
            prepared.settings = settings
        return settings

    def _take(self, runs: Many[Sequence], chosen: Chosen) -> None:
        for row, run in enumerate(runs):
            case = run.case
            if run not in case.running:
                continue  # its request has failed
            if not math.isfinite(chosen.logprobs[row]):
                self._fail(case, _NOT_A_NUMBER)
            elif self._is_over(run, row, chosen):
                self._finish(run)

    def _is_over(self, run: Sequence, row: int, chosen: Chosen) -> bool:
        """Give a sample its token; a tokenizer that cannot read it fails this request alone."""
        token, topk = chosen.tokens[row], chosen.topk_of(row, run.ask.num_topk)
        try:
            return run.take(token, chosen.logprobs[row], topk)
        except Exception as error:  # noqa: BLE001 - a tokenizer may raise anything
            reason = f"the tokenizer cannot turn the token {token} into text: {error!r:.200}"
        self._fail(run.case, Failure(f"{reason}; give stop as token ids", _SERVER))
        return False

    def _finish(self, run: Sequence) -> None:
        self._cache.leave(run)
        if run.case.finish(run):
            self._entrance.remove(run.case)
            self._over.append(Finished(run.case.ticket, run.case.response()))

    # --- memory ----------------------------------------------------------------------------------
    def _make_places(self) -> None:
        """Give larger places to samples that need one; those that came last make room."""
        while not self._cache.grow():
            self._let_youngest_wait()

    def _let_youngest_wait(self) -> None:
        for case in self._line.youngest_first():
            if self._entrance.give_up(case):
                return
            placed = [one for one in case.running if one in self._cache]
            if placed:
                last = max(placed, key=lambda one: one.index)
                self._cache.leave(last)
                case.pause(last)
                return

    def _break_tie(self) -> None:
        """Nobody could go on: those that came last give up what they hold for the first one."""
        first, *others = self._line.values()
        if any(self._entrance.give_up(case) for case in reversed(others)):
            return
        if self._entrance.give_up(first):
            return
        self._fail(first, Failure("there is no memory for this request", _SERVER))

    def _check_size(self, ask: Ask) -> None:
        num_tokens = max_kept_tokens(ask.max_length, capacity_for(ask.max_length), ask.max_tokens)
        num_bytes = num_tokens * self._kind.token_bytes
        if num_bytes > self._config.cache_bytes:
            raise InvalidInput(
                f"the prompt has {len(ask.prompt)} tokens and max_tokens is {ask.max_tokens}: that "
                f"may take {num_bytes} bytes of memory, and there are {self._config.cache_bytes}; "
                "ask for fewer tokens, or let the server have more cache_bytes"
            )

    def _fail(self, case: Case, failure: Failure) -> None:
        self._entrance.remove(case)
        case.running.clear()
        self._over.append(Finished(case.ticket, failure))
