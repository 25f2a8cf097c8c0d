"""Model and data of the benchmarks: blocks of text, and conversations of mixed lengths.

The text consists of random words, because its content does not affect the speed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from tinkex.nn.ranks import DistributedContext
from tinkex.pipeline import tokenizer as tokenizers
from tinkex.pipeline.checkpoints.export import export_folder
from tinkex.pipeline.settings_sources import make_settings
from tinkex.pipeline.tokenizer import TextTokenizer
from tinkex.pipeline.train_settings import TrainSettings
from tinkex.pipeline.train_stage import build_stage

SEQ_LEN = 512
VOCAB_SIZE = 6400
SIZES = {"hidden_size": 512, "num_layers": 8, "num_heads": 8, "num_kv_heads": 2}
LEARNING_RATE = 6e-4
WEIGHT_DECAY = 0.01
MIN_LENGTH, MAX_LENGTH = 32, 512
PROMPT_SHARE = 0.6
SEED = 1337

_SYLLABLES = [one + two for one in "bdfgklmnprstvz" for two in ("a", "e", "i", "o", "u", "an")]
_NUM_WORDS = 12_000


class Workload:
    """Data, tokenizer and stages in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._rng = random.Random(SEED)
        self._words = ["".join(self._rng.choices(_SYLLABLES, k=3)) for _ in range(_NUM_WORDS)]

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """A tokenizer with exactly VOCAB_SIZE tokens."""
        texts = self._write("words", ({"text": self._text(50)} for _ in range(1500)))
        tokenizers.train_tokenizer_folder([texts], self.folder / "tokenizer", VOCAB_SIZE)
        tokenizer = tokenizers.load_tokenizer(self.folder / "tokenizer")
        assert tokenizer.vocab_size == VOCAB_SIZE, tokenizer.vocab_size
        return tokenizer

    def pretrain(self, *, num_blocks: int, batch_size: int) -> Any:
        """Build a stage whose rows each fill a sequence."""
        lowest = self.tokenizer.vocab_size // 10
        rows = (
            {"ids": self._rng.choices(range(lowest, VOCAB_SIZE), k=SEQ_LEN)}
            # One additional row for the eval split.
            for _ in range(num_blocks + 1)
        )
        return self._stage("pretrain", rows, batch_size)

    def chats(self, *, num_chats: int, batch_size: int) -> Any:
        """Build an SFT stage on conversations of mixed lengths."""
        sample = self._text(400)
        per_word = len(self.tokenizer.encode_batch([sample])[0]) / 400
        rows = (self._chat(per_word) for _ in range(num_chats + 1))
        base = self.folder / "base"
        export_folder(self.pretrain(num_blocks=1, batch_size=1).model, self.tokenizer, base)
        return self._stage("sft", rows, batch_size, init_from=base)

    def _chat(self, tokens_per_word: float) -> dict[str, Any]:
        # Roles, delimiters and newlines take about twelve tokens.
        num_words = (self._rng.uniform(MIN_LENGTH, MAX_LENGTH) - 12) / tokens_per_word
        lengths = (("user", PROMPT_SHARE), ("assistant", 1 - PROMPT_SHARE))
        turns = [
            {"role": role, "content": self._text(round(share * num_words) or 1)}
            for role, share in lengths
        ]
        return {"conversations": turns}

    def _text(self, num_words: int) -> str:
        return " ".join(self._rng.choices(self._words, k=num_words))

    def _write(self, name: str, rows: Iterable[Any]) -> Path:
        path = self.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def _stage(self, name: str, rows: Iterable[Any], batch_size: int, **more: object) -> Any:
        data = self._write(f"{name}-{batch_size}", rows)
        return build_stage(name, self._settings(name, data, batch_size, more), DistributedContext())

    def _settings(
        self, name: str, data: Path, batch_size: int, more: Mapping[str, object]
    ) -> TrainSettings:
        values: dict[str, object] = {
            **SIZES,
            **more,
            "out_dir": self.folder / data.stem,
            "data_path": data,
            "tokenizer_dir": self.tokenizer.folder,
            "max_seq_len": SEQ_LEN,
            "batch_size": batch_size,
            "accumulation_steps": 1,
            "learning_rate": LEARNING_RATE,
            "schedule": "constant",
            "warmup_steps": 0,
            "weight_decay": WEIGHT_DECAY,
            "save_interval": 0,
            "eval_samples": 1,
            "log_interval": 1,
            "seed": SEED,
        }
        return make_settings(name, values)


def flops_per_token(model: Any, length: int) -> float:
    """Return the training FLOPs per token: weights, LM head and causal attention."""
    config = model.config
    matrices = [weight for name, weight in _matrices(model) if "embed_tokens" not in name]
    num_weights = sum(weight.numel() for weight in matrices) + VOCAB_SIZE * config.hidden_size
    # QK and AV: 2 FLOPs each per pair and element, half of the pairs, times 3 for the backward.
    width = config.num_attention_heads * config.head_dim
    return 6.0 * num_weights + 6.0 * config.num_hidden_layers * length * width


def _matrices(model: Any) -> Iterator[tuple[str, Tensor]]:
    return (item for item in model.named_parameters() if item[1].dim() > 1)
