"""The baseline: PEFT + transformers, as a careful user writes it.

Padded batches with attention masks, labels of -100 for prompts, fused AdamW, SDPA attention, no
gradient of the base model, inference mode and a KV cache for sampling.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.engine.shapes import LEARNING_RATE
from benchmarks.engine.workloads import Example, Prompt

IGNORED = -100


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded examples; collated ahead of time, as a data loader does."""

    input_ids: Tensor
    attention_mask: Tensor | None
    targets: Tensor

    @property
    def padding_share(self) -> float:
        """Fraction of the batch that is padding."""
        if self.attention_mask is None:
            return 0.0
        return 1.0 - self.attention_mask.float().mean().item()


def collate(examples: Sequence[Example]) -> Batch:
    """Pad examples on the right to the longest."""
    width = max(len(each.tokens) for each in examples)
    input_ids = torch.zeros(len(examples), width, dtype=torch.int64)
    targets = torch.full_like(input_ids, IGNORED)
    mask = torch.zeros_like(input_ids)
    for row, each in enumerate(examples):
        length = len(each.tokens)
        input_ids[row, :length] = torch.tensor(each.tokens)
        targets[row, each.num_prompt : length] = torch.tensor(each.targets[each.num_prompt :])
        mask[row, :length] = 1
    return Batch(input_ids, None if bool(mask.all()) else mask, targets)


class Peft:
    """One base model with several adapters, of which one is active."""

    def __init__(self, folder: Path) -> None:
        self._base = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )
        self._model: PeftModel | None = None
        self._optimizers: dict[str, torch.optim.AdamW] = {}

    def load(self, name: str, directory: Path) -> None:
        """Load an adapter saved by the engine, and make its optimizer."""
        with warnings.catch_warnings():
            # PEFT warns about adapting a tied head, which matters only for merging.
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
            if self._model is None:
                self._model = PeftModel.from_pretrained(
                    self._base, directory, adapter_name=name, is_trainable=True
                )
            else:
                self._model.load_adapter(directory, name, is_trainable=True)
        self.activate(name)
        parameters = [each for each in self._loaded.parameters() if each.requires_grad]
        self._optimizers[name] = torch.optim.AdamW(
            parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0, fused=True
        )

    @property
    def _loaded(self) -> PeftModel:
        assert self._model is not None, "load an adapter first"
        return self._model

    @property
    def num_trained(self) -> int:
        """Number of trained parameters of the active adapter."""
        return sum(each.numel() for each in self._loaded.parameters() if each.requires_grad)

    def activate(self, name: str) -> None:
        """Use this adapter in the next calls."""
        if self._loaded.active_adapter != name:
            self._loaded.set_adapter(name)

    # --- training ---------------------------------------------------------------------------
    def forward_backward(self, batch: Batch) -> float:
        """Add the gradient of a batch's summed loss; returns the loss."""
        self._loaded.train()
        loss = self._loaded(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            labels=batch.targets,
            # Targets are shifted already; a divisor of 1 makes the loss a sum.
            shift_labels=batch.targets,
            num_items_in_batch=1,
            use_cache=False,
        ).loss
        loss.backward()
        return float(loss.item())

    def optim_step(self, name: str) -> None:
        """Apply and clear the gradient."""
        self._optimizers[name].step()
        self.clear(name)

    def clear(self, name: str) -> None:
        """Clear the gradient."""
        self._optimizers[name].zero_grad(set_to_none=True)

    # --- sampling ---------------------------------------------------------------------------
    def generate(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Greedy tokens after each prompt, as one batch padded on the left."""
        width = max(len(prompt.tokens) for prompt in prompts)
        input_ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):
            input_ids[row, width - len(prompt.tokens) :] = torch.tensor(prompt.tokens)
            mask[row, width - len(prompt.tokens) :] = 1
        num_new = max(prompt.num_new for prompt in prompts)
        return self._generate(input_ids, mask, max_new_tokens=num_new, do_sample=False)

    def draw(self, prompt: Prompt, num_samples: int) -> list[list[int]]:
        """Draw samples at temperature 1 from the whole vocabulary."""
        input_ids = torch.tensor([prompt.tokens])
        return self._generate(
            input_ids,
            torch.ones_like(input_ids),
            max_new_tokens=prompt.num_new,
            num_return_sequences=num_samples,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )

    def _generate(self, input_ids: Tensor, mask: Tensor, **options: Any) -> list[list[int]]:
        self._loaded.eval()
        with torch.inference_mode():
            out = self._loaded.generate(
                input_ids=input_ids, attention_mask=mask, use_cache=True, **options
            )
        new: list[list[int]] = out[:, input_ids.shape[1] :].tolist()
        return new

    def logprobs(self, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        """Log-probabilities of given answer tokens."""
        self._loaded.eval()
        with torch.inference_mode():
            tokens = torch.tensor([[*prompt, *answer]])
            logits = self._loaded(input_ids=tokens[:, :-1], use_cache=False).logits[0]
            rows = logits[len(prompt) - 1 :].log_softmax(-1)
            return rows.gather(1, tokens[0, len(prompt) :, None])[:, 0]
