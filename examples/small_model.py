"""Train a small language model from scratch: a Hugging Face folder that any server can serve.

    python examples/small_model.py FOLDER            # half a minute on two cores

A byte-level Qwen3 with a million parameters, trained on the documentation of this project. It
writes words that look like English, which is enough for a demonstration.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END = "<|end|>"
WINDOW, BATCH = 96, 8
#: Called after every step with its number, the number of all steps, and the loss.
Report = Callable[[int, int, float], None]


def make_model(folder: Path, *, num_steps: int = 200, report: Report | None = None) -> None:
    """Train a small model on this project's documentation and save it with its tokenizer."""
    tokenizer = byte_tokenizer()
    text = "\n".join(path.read_text() for path in documentation())
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=1024,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20) * rate_at(step / num_steps)
    )
    for step in range(1, num_steps + 1):
        starts = torch.randint(0, len(tokens) - WINDOW - 1, (BATCH,))
        batch = torch.stack([tokens[start : start + WINDOW] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if report is not None:
            report(step, num_steps, loss.item())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def rate_at(done: float) -> float:
    """Cosine decay from 1 to 0.1."""
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * done))


def documentation() -> list[Path]:
    """Return the files to train on."""
    root = Path(__file__).resolve().parent.parent
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with 256 byte tokens and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: index for index, word in enumerate([END, *alphabet])}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where to save it")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    options = parser.parse_args()

    def report(step: int, num_steps: int, loss: float) -> None:
        if step == 1 or step % 20 == 0:
            print(f"step {step:4} of {num_steps}   loss {loss:.3f}", file=sys.stderr)

    make_model(options.folder, num_steps=options.steps, report=report)
    print(options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
