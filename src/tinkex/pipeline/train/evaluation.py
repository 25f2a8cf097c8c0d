"""Figures on held-out data: perplexity, preferences, and answers that are exactly right."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tinkex.nn.ops.cross_entropy import target_logprobs
from tinkex.pipeline.batches import PackedSource, PairBatch, PairSource, TokenBatch
from tinkex.pipeline.forward import PackedForward
from tinkex.pipeline.token_file import Document, Indices, TokenFile
from tinkex.pipeline.tokenizer import TextTokenizer

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_MAX_ANSWER_TOKENS = 512
_EVAL_BATCH_SIZE = 32
_LARGEST_EXPONENT = 700.0


@torch.no_grad()
def perplexity(
    forward: PackedForward, source: PackedSource, device: torch.device
) -> dict[str, float]:
    """Mean negative log-probability of counted tokens, and its exponential."""
    total, num_counted = 0.0, 0
    for index in range(source.num_batches(0)):
        found_P = target_token_logprobs(forward, source.batch(0, index), device)
        total -= float(found_P.double().sum())
        num_counted += len(found_P)
    loss = total / num_counted
    return {"loss": loss, "perplexity": math.exp(min(loss, _LARGEST_EXPONENT))}


@torch.no_grad()
def preference_metrics(
    policy: PackedForward, reference: PackedForward, source: PairSource, beta: float
) -> dict[str, float]:
    """How often the better answer is the one that became likelier against the reference.

    A pair that did not move counts half, so a model that is its own reference has 0.5.
    `likelier` is the share of pairs whose better answer is the likelier one as such.
    """
    device = policy.head_VD.device
    wins, likelier, margins, losses, num_pairs = 0.0, 0.0, 0.0, 0.0, 0
    for index in range(source.num_batches(0)):
        batch = source.batch(0, index)
        own_N2 = pair_logprobs(policy, batch, device).double()
        margin_N2 = own_N2 - pair_logprobs(reference, batch, device).double()
        margin_N = beta * (margin_N2[:, 0] - margin_N2[:, 1])
        wins += float((margin_N.sign() + 1.0).sum()) / 2.0
        likelier += float((own_N2[:, 0] > own_N2[:, 1]).sum())
        margins += float(margin_N.sum())
        losses += float(torch.nn.functional.softplus(-margin_N).sum())
        num_pairs += len(margin_N)
    names = ("preference_accuracy", "likelier", "margin", "loss")
    sums = (wins, likelier, margins, losses)
    return {name: value / num_pairs for name, value in zip(names, sums, strict=True)}


def target_token_logprobs(
    forward: PackedForward, batch: TokenBatch, device: torch.device
) -> Tensor:
    """The log-probability of each counted target, in the order of the batch."""
    counted_T = batch.loss_mask_T.to(device)
    hidden = forward(batch.tokens_T.to(device), batch.lengths)
    targets_P = batch.targets_T.to(device)[counted_T]
    return target_logprobs(hidden.states_TD[counted_T], forward.head_VD, targets_P)


def pair_logprobs(forward: PackedForward, batch: PairBatch, device: torch.device) -> Tensor:
    """The log-probability of each whole answer, (pairs, 2): a sum, not a mean."""
    both = batch.token_batch
    found_P = target_token_logprobs(forward, both, device)
    owner_T = torch.repeat_interleave(
        torch.arange(len(both.lengths)), torch.tensor(both.lengths)
    ).to(device)
    owner_P = owner_T[both.loss_mask_T.to(device)]
    sums = found_P.new_zeros(len(both.lengths)).index_add(0, owner_P, found_P)
    return sums.view(-1, 2)


# --- answers --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EvalPrompt:
    """A prompt whose answer is known."""

    prompt: tuple[int, ...]
    answer: str
    num_tokens: int
    """How long the known answer is, with all that is thought before it."""


def eval_prompts(
    file: TokenFile, rows: Indices, tokenizer: TextTokenizer, max_length: int
) -> list[EvalPrompt]:
    """What the assistant says last in each conversation, to be asked for.

    What is too long is left out, and so is a conversation in which it says nothing.
    """
    found = [_eval_prompt(file.document(int(row)), tokenizer) for row in rows]
    return [
        case
        for case in found
        if case.num_tokens and len(case.prompt) + case.num_tokens <= max_length
    ]


def _eval_prompt(document: Document, tokenizer: TextTokenizer) -> EvalPrompt:
    """The last stretch that is learned; it has no tokens if there is none."""
    end = len(document.ids)
    # Somebody else may have had the last word.
    while end and not document.learned[end - 1]:
        end -= 1
    start = end
    while start and document.learned[start - 1]:
        start -= 1
    said = tokenizer.decode(document.ids[start : end - 1])
    return EvalPrompt(tuple(document.ids[:start]), extract_answer(said), end - start)


def extract_answer(text: str) -> str:
    """What a text gives as its answer: inside of the tags, else all that follows the thought."""
    tagged = _ANSWER.findall(text)
    rest = tagged[-1] if tagged else text.rpartition("</think>")[2]
    return " ".join(rest.split())


def exact_match(
    model: PreTrainedModel, tokenizer: TextTokenizer, prompts: Sequence[EvalPrompt]
) -> float:
    """The share of cases whose answer is the known one to the letter, each written greedily.

    Without a case it is no number: nothing was asked.
    """
    if not prompts:
        return math.nan
    num_right = 0
    # Those of similar length together, so that little is filled up.
    ordered = sorted(prompts, key=lambda case: len(case.prompt))
    with _eval_mode(model):
        for start in range(0, len(ordered), _EVAL_BATCH_SIZE):
            some = ordered[start : start + _EVAL_BATCH_SIZE]
            written = _generate(model, tokenizer, some)
            num_right += sum(
                extract_answer(text) == case.answer
                for text, case in zip(written, some, strict=True)
            )
    return num_right / len(prompts)


def _generate(model: Any, tokenizer: TextTokenizer, prompts: Sequence[EvalPrompt]) -> list[str]:
    longest = max(len(case.prompt) for case in prompts)
    pad, ends = tokenizer.end_of_text, (tokenizer.end_of_turn, tokenizer.end_of_text)
    ids = [[pad] * (longest - len(case.prompt)) + list(case.prompt) for case in prompts]
    seen = [[0] * (longest - len(case.prompt)) + [1] * len(case.prompt) for case in prompts]
    # An answer may be longer than the known one and still be right.
    wanted = max(case.num_tokens for case in prompts) * 3 // 2 + 8
    out = model.generate(
        torch.tensor(ids, device=model.device),
        attention_mask=torch.tensor(seen, device=model.device),
        max_new_tokens=min(wanted, _MAX_ANSWER_TOKENS),
        do_sample=False,
        eos_token_id=list(ends),
        pad_token_id=pad,
    )
    return [tokenizer.decode(_truncate_at_end(row[longest:].tolist(), ends)) for row in out]


def _truncate_at_end(ids: list[int], ends: Sequence[int]) -> list[int]:
    stop = next((at for at, token in enumerate(ids) if token in ends), len(ids))
    return ids[:stop]


@contextmanager
def _eval_mode(model: PreTrainedModel) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
