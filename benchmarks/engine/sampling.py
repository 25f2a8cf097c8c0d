"""Sampling: one prompt, a batch, arriving requests, and many samples of one prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine import workloads
from benchmarks.engine.figures import Figure, Turns, take_turns
from benchmarks.engine.stage import Stage
from benchmarks.engine.workloads import Prompt
from tinkex.types import SampledSequence

SINGLE_LIMIT, BATCH_LIMIT, ARRIVALS_LIMIT, GROUP_LIMIT = 2.0, 1.5, 5.0, 2.0
_WARM_TURN = 1000
_WARM_NEW = 4


def measure_single(stage: Stage) -> Figure:
    """Measure one prompt."""
    name = f"1 prompt x {workloads.NEW_TOKENS} new tokens"
    return _measure_together(stage, name, workloads.single_prompt, SINGLE_LIMIT)


def measure_batch(stage: Stage) -> Figure:
    """Measure several prompts at once."""
    name = f"{workloads.NUM_PROMPTS} prompts x {workloads.NEW_TOKENS} new tokens"
    return _measure_together(stage, name, workloads.prompt_batch, BATCH_LIMIT)


def _measure_together(
    stage: Stage, name: str, make: Callable[[int, int], list[Prompt]], limit: float
) -> Figure:
    directories, size = stage.samplers(1), stage.shape.vocab_size
    _warm_up(stage, make(_WARM_TURN, size), directories)
    turns = take_turns(
        lambda turn: stage.ours.sample(make(turn, size), directories),
        lambda turn: stage.peft.generate(make(turn, size)),
        stage.shape.effort.sampling_repeats,
    )
    prompts = make(0, size)
    proof = _greedy_proof(stage, prompts, turns.our_results[0], turns.baseline_results[0])
    return _figure(stage, name, turns, sum(each.num_new for each in prompts), limit, proof)


def measure_arrivals(stage: Stage) -> Figure:
    """Measure arriving requests of several adapters; the baseline answers one at a time."""
    directories, size = stage.samplers(workloads.NUM_SAMPLERS), stage.shape.vocab_size
    _warm_up(stage, workloads.arrivals(_WARM_TURN, size), directories)
    is_split = stage.shape.effort.is_arrival_split

    def theirs(turn: int) -> list[list[int]]:
        if not is_split:
            return _answer_all(stage, workloads.arrivals(turn, size))
        return _answer_all(stage, workloads.arrivals(0, size)[turn::2])

    turns = take_turns(
        lambda turn: stage.ours.sample(workloads.arrivals(turn, size), directories), theirs, 1
    )
    if is_split:
        turns = _combine_turns(turns)
    prompts = workloads.arrivals(0, size)
    proof = _greedy_proof(stage, prompts, turns.our_results[0], turns.baseline_results[0])
    name = f"{len(prompts)} requests in turn, {workloads.NUM_SAMPLERS} adapters"
    num_new = sum(each.num_new for each in prompts)
    return _figure(stage, name, turns, num_new, ARRIVALS_LIMIT, proof)


def _combine_turns(turns: Turns) -> Turns:
    """Combine the baseline's two turns, which did half of the work each."""
    even, odd = turns.baseline_results
    answers = [answer for pair in zip(even, odd, strict=True) for answer in pair]
    return Turns(turns.ours, [sum(turns.baseline)], turns.our_results, [answers])


def _answer_all(stage: Stage, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Answer one request after the other, in arrival order."""
    started = time.perf_counter()
    answers = []
    for prompt in prompts:
        # Usually late already; waits only if all earlier requests are answered.
        time.sleep(max(0.0, prompt.arrives_at - (time.perf_counter() - started)))
        stage.peft.activate(f"sampler-{prompt.sampler}")
        answers += stage.peft.generate([prompt])
    return answers


def measure_group(stage: Stage) -> Figure:
    """Measure many samples of one long prompt."""
    directories, size = stage.samplers(1), stage.shape.vocab_size
    _warm_up(stage, [workloads.group_prompt(_WARM_TURN, size)], directories)
    num = workloads.NUM_PROMPTS
    turns = take_turns(
        lambda turn: stage.ours.draw(workloads.group_prompt(turn, size), num, directories[0]),
        lambda turn: stage.peft.draw(workloads.group_prompt(turn, size), num),
        stage.shape.effort.sampling_repeats,
    )
    prompt = workloads.group_prompt(0, size)
    samples: list[SampledSequence] = turns.our_results[0]
    _check_lengths([prompt] * num, samples, turns.baseline_results[0])
    num_distinct = len({tuple(each.tokens) for each in samples})
    proof = f"{num_distinct} distinct samples; {_logprob_proof(stage, prompt, samples[0])}"
    name = f"{num} samples of a {len(prompt.tokens)}-token prompt x {prompt.num_new} new tokens"
    return _figure(stage, name, turns, num * prompt.num_new, GROUP_LIMIT, proof)


# --- helpers -------------------------------------------------------------------------------------
def _warm_up(stage: Stage, prompts: list[Prompt], directories: list[Path]) -> None:
    """Warm up with the same shapes but other tokens, because prompts are cached."""
    short = [
        Prompt(prompt.tokens, _WARM_NEW, sampler=prompt.sampler, arrives_at=0.0)
        for prompt in prompts
    ]
    stage.ours.sample(short, directories)
    stage.peft.generate(short[:1])


def _figure(
    stage: Stage, name: str, turns: Turns, num_tokens: int, limit: float, proof: str
) -> Figure:
    return Figure(
        name=name,
        model=stage.shape.name,
        ours=num_tokens / turns.our_seconds,
        baseline=num_tokens / turns.baseline_seconds,
        unit="tok/s",
        limit=limit,
        spread=turns.spread,
        proof=proof,
    )


def _check_lengths(prompts: list[Prompt], ours: list[SampledSequence], theirs: list[Any]) -> None:
    for prompt, mine, other in zip(prompts, ours, theirs, strict=True):
        if not len(mine.tokens) == len(other) == prompt.num_new:
            raise RuntimeError(
                f"expected {prompt.num_new} tokens from both sides, got {len(mine.tokens)} and "
                f"{len(other)}"
            )


def _greedy_proof(
    stage: Stage, prompts: list[Prompt], ours: list[SampledSequence], theirs: list[list[int]]
) -> str:
    """Count equal sequences, and compare the log-probabilities of one of ours."""
    _check_lengths(prompts, ours, theirs)
    num_same = sum(mine.tokens == other for mine, other in zip(ours, theirs, strict=True))
    stage.peft.activate(f"sampler-{prompts[0].sampler}")
    proof = _logprob_proof(stage, prompts[0], ours[0])
    return f"{num_same} of {len(prompts)} answers are the same; {proof}"


def _logprob_proof(stage: Stage, prompt: Prompt, sequence: SampledSequence) -> str:
    expected = stage.peft.logprobs(prompt.tokens, sequence.tokens)
    worst = max(
        abs(mine - other)
        for mine, other in zip(sequence.logprobs or [], expected.tolist(), strict=True)
    )
    verdict = "" if worst <= 1e-3 else "; THEY DISAGREE"
    return f"log-probabilities apart by {worst:.1e} at most{verdict}"
