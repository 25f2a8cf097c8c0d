"""Metrics on the eval split: perplexity, preference accuracy and exact match."""

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
_MAX_EXPONENT = 700.0


@torch.no_grad()
def perplexity(
    forward: PackedForward, source: PackedSource, device: torch.device
) -> dict[str, float]:
    """Compute the mean cross-entropy of the targets and its exponential."""
    total, num_targets = 0.0, 0
    for index in range(source.num_batches(0)):
        logprobs_P = target_token_logprobs(forward, source.batch(0, index), device)
        total -= float(logprobs_P.double().sum())
        num_targets += len(logprobs_P)
    loss = total / num_targets
    return {"loss": loss, "perplexity": math.exp(min(loss, _MAX_EXPONENT))}


@torch.no_grad()
def preference_metrics(
    policy: PackedForward, reference: PackedForward, source: PairSource, beta: float
) -> dict[str, float]:
    """Compute the preference accuracy relative to the reference, margin and DPO loss.

    Ties count half, so a model that equals its reference has 0.5. `likelier` is the fraction of
    pairs whose chosen answer has the higher log-probability.
    """
    device = policy.head_VD.device
    wins, likelier, margins, losses, num_pairs = 0.0, 0.0, 0.0, 0.0, 0
    for index in range(source.num_batches(0)):
        batch = source.batch(0, index)
        policy_N2 = pair_logprobs(policy, batch, device).double()
        log_ratio_N2 = policy_N2 - pair_logprobs(reference, batch, device).double()
        margin_N = beta * (log_ratio_N2[:, 0] - log_ratio_N2[:, 1])
        wins += float((margin_N.sign() + 1.0).sum()) / 2.0
        likelier += float((policy_N2[:, 0] > policy_N2[:, 1]).sum())
        margins += float(margin_N.sum())
        losses += float(torch.nn.functional.softplus(-margin_N).sum())
        num_pairs += len(margin_N)
    names = ("preference_accuracy", "likelier", "margin", "loss")
    sums = (wins, likelier, margins, losses)
    return {name: value / num_pairs for name, value in zip(names, sums, strict=True)}


def target_token_logprobs(
    forward: PackedForward, batch: TokenBatch, device: torch.device
) -> Tensor:
    """Return the log-probability of each target, in the order of the batch."""
    target_mask_T = batch.loss_mask_T.to(device)
    hidden = forward(batch.tokens_T.to(device), batch.lengths)
    targets_P = batch.targets_T.to(device)[target_mask_T]
    return target_logprobs(hidden.states_TD[target_mask_T], forward.head_VD, targets_P)


def pair_logprobs(forward: PackedForward, batch: PairBatch, device: torch.device) -> Tensor:
    """Return the summed log-probability of each answer, (pairs, 2)."""
    tokens = batch.token_batch
    logprobs_P = target_token_logprobs(forward, tokens, device)
    owner_T = torch.repeat_interleave(
        torch.arange(len(tokens.lengths)), torch.tensor(tokens.lengths)
    ).to(device)
    owner_P = owner_T[tokens.loss_mask_T.to(device)]
    sums = logprobs_P.new_zeros(len(tokens.lengths)).index_add(0, owner_P, logprobs_P)
    return sums.view(-1, 2)


# --- answers --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EvalPrompt:
    """A prompt and its reference answer."""

    prompt: tuple[int, ...]
    answer: str
    num_tokens: int
    """Number of tokens of the reference answer, including its reasoning."""


def eval_prompts(
    file: TokenFile, rows: Indices, tokenizer: TextTokenizer, max_length: int
) -> list[EvalPrompt]:
    """Return the last assistant turn of each conversation as a prompt and reference answer.

    Conversations that are too long or have no assistant turn are skipped.
    """
    prompts = [_eval_prompt(file.document(int(row)), tokenizer) for row in rows]
    return [
        prompt
        for prompt in prompts
        if prompt.num_tokens and len(prompt.prompt) + prompt.num_tokens <= max_length
    ]


def _eval_prompt(document: Document, tokenizer: TextTokenizer) -> EvalPrompt:
    """Return the last assistant turn; num_tokens is 0 if there is none."""
    end = len(document.ids)
    # The last turn may not be the assistant's.
    while end and not document.learned[end - 1]:
        end -= 1
    start = end
    while start and document.learned[start - 1]:
        start -= 1
    text = tokenizer.decode(document.ids[start : end - 1])
    return EvalPrompt(tuple(document.ids[:start]), extract_answer(text), end - start)


def extract_answer(text: str) -> str:
    """Extract the answer: the content of the last <answer> tag, else the text after </think>."""
    tagged = _ANSWER.findall(text)
    answer = tagged[-1] if tagged else text.rpartition("</think>")[2]
    return " ".join(answer.split())


def exact_match(
    model: PreTrainedModel, tokenizer: TextTokenizer, prompts: Sequence[EvalPrompt]
) -> float:
    """Return the fraction of greedy answers that equal the reference; NaN without prompts."""
    if not prompts:
        return math.nan
    num_correct = 0
    # Sort by length to minimize padding.
    ordered = sorted(prompts, key=lambda prompt: len(prompt.prompt))
    with _eval_mode(model):
        for start in range(0, len(ordered), _EVAL_BATCH_SIZE):
            batch = ordered[start : start + _EVAL_BATCH_SIZE]
            texts = _generate(model, tokenizer, batch)
            num_correct += sum(
                extract_answer(text) == prompt.answer
                for text, prompt in zip(texts, batch, strict=True)
            )
    return num_correct / len(prompts)


def _generate(model: Any, tokenizer: TextTokenizer, prompts: Sequence[EvalPrompt]) -> list[str]:
    longest = max(len(prompt.prompt) for prompt in prompts)
    pad, ends = tokenizer.end_of_text, (tokenizer.end_of_turn, tokenizer.end_of_text)
    num_pads = [longest - len(prompt.prompt) for prompt in prompts]
    ids = [[pad] * num + list(prompt.prompt) for num, prompt in zip(num_pads, prompts, strict=True)]
    mask = [[0] * num + [1] * (longest - num) for num in num_pads]
    # A correct answer may be longer than the reference.
    max_tokens = max(prompt.num_tokens for prompt in prompts) * 3 // 2 + 8
    out = model.generate(
        torch.tensor(ids, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        max_new_tokens=min(max_tokens, _MAX_ANSWER_TOKENS),
        do_sample=False,
        eos_token_id=list(ends),
        pad_token_id=pad,
    )
    return [tokenizer.decode(_truncate_at_end(row[longest:].tolist(), ends)) for row in out]


def _truncate_at_end(ids: list[int], ends: Sequence[int]) -> list[int]:
    stop = next((index for index, token in enumerate(ids) if token in ends), len(ids))
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
