"""Training: one adapter on mixed lengths, and several adapters at once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain

from benchmarks.engine import workloads
from benchmarks.engine.baseline import Peft, collate
from benchmarks.engine.figures import Figure, Turns, agreement, take_turns
from benchmarks.engine.ours import Ours, make_pass
from benchmarks.engine.stage import Stage
from benchmarks.engine.workloads import Example

SFT_LIMIT, ADAPTERS_LIMIT = 1.7, 2.0
#: Turn index of the warm-up data, which no measured turn uses.
_WARM_TURN = 1000


def measure_sft(stage: Stage) -> Figure:
    """Measure one adapter on batches of 8 with mixed lengths and a step after each."""
    size, effort = stage.shape.vocab_size, stage.shape.effort
    name = "sft"
    stage.adapter(name, seed=1)
    make = partial(workloads.sft_batches, num_batches=effort.sft_batches, vocab_size=size)
    warm = [[workloads.sft_batches(_WARM_TURN, 1, size)[0][0]]]
    data = [make(turn) for turn in range(effort.training_repeats + 1)]
    ours, theirs = _our_passes(name, [warm, *data]), _their_batches([warm, *data])
    _our_steps(stage.ours, name, ours[0])
    _their_steps(stage.peft, name, theirs[0])
    turns = take_turns(
        lambda turn: _our_steps(stage.ours, name, ours[turn + 1]),
        lambda turn: _their_steps(stage.peft, name, theirs[turn + 1]),
        effort.training_repeats,
    )
    num_tokens = sum(len(each.tokens) for each in chain.from_iterable(data[0]))
    padding = sum(batch.padding_share for batch in theirs[1]) / len(theirs[1])
    return Figure(
        name="one adapter, SFT on mixed lengths",
        model=stage.shape.name,
        ours=num_tokens / turns.our_seconds,
        baseline=num_tokens / turns.baseline_seconds,
        unit="tok/s",
        limit=SFT_LIMIT,
        spread=turns.spread,
        proof=f"{_proof(turns)}; {padding:.0%} of the baseline's rows are padding",
    )


def measure_adapters(stage: Stage) -> Figure:
    """Measure several adapters with one short sequence and one step each."""
    names = [f"tenant-{index}" for index in range(workloads.NUM_ADAPTERS)]
    for seed, name in enumerate(names):
        stage.adapter(name, seed=10 + seed)
    size, num_repeats = stage.shape.vocab_size, stage.shape.effort.adapter_repeats
    data = [workloads.adapter_examples(turn, size) for turn in range(num_repeats + 2)]
    passes = [[make_pass(*pair) for pair in _paired(names, examples)] for examples in data]
    batches = [[collate([example]) for example in examples] for examples in data]

    def ours(turn: int) -> list[float]:
        losses = stage.ours.forward_backward(passes[turn + 1])
        for name in names:
            stage.ours.optim_step(name)
        return losses

    def theirs(turn: int) -> list[float]:
        losses = []
        for name, batch in zip(names, batches[turn + 1], strict=True):
            stage.peft.activate(name)
            losses.append(stage.peft.forward_backward(batch))
            stage.peft.optim_step(name)
        return losses

    ours(-1)
    theirs(-1)
    turns = take_turns(ours, theirs, num_repeats)
    num_tokens = workloads.NUM_ADAPTERS * workloads.ADAPTER_TOKENS
    return Figure(
        name=f"{workloads.NUM_ADAPTERS} adapters, {workloads.ADAPTER_TOKENS} tokens each",
        model=stage.shape.name,
        ours=num_tokens / turns.our_seconds,
        baseline=num_tokens / turns.baseline_seconds,
        unit="tok/s",
        limit=ADAPTERS_LIMIT,
        spread=turns.spread,
        proof=_proof(turns),
    )


def _paired(names: list[str], examples: list[Example]) -> Iterable[tuple[str, list[Example]]]:
    return ((name, [example]) for name, example in zip(names, examples, strict=True))


def _our_passes(name: str, turns: list[list[list[Example]]]) -> list[list]:
    return [[make_pass(name, batch) for batch in batches] for batches in turns]


def _their_batches(turns: list[list[list[Example]]]) -> list[list]:
    return [[collate(batch) for batch in batches] for batches in turns]


def _our_steps(ours: Ours, name: str, passes: list) -> list[float]:
    losses = []
    for each in passes:
        losses += ours.forward_backward([each])
        ours.optim_step(name)
    return losses


def _their_steps(peft: Peft, name: str, batches: list) -> list[float]:
    losses = []
    for batch in batches:
        losses.append(peft.forward_backward(batch))
        peft.optim_step(name)
    return losses


def _proof(turns: Turns) -> str:
    """Compare losses after the same steps; the baseline has one more turn."""
    ours = list(chain.from_iterable(turns.our_results))
    theirs = list(chain.from_iterable(turns.baseline_results))
    return agreement(ours, theirs[: len(ours)])
