"""GGUF files of tiny models, written with the `gguf` package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

#: Tokens of the tiny models: control tokens, bytes and merges.
SIGNS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", "Ġ w")
TOKENS = (
    *SIGNS,
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    *(merge.replace(" ", "") for merge in MERGES),
)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
#: Sizes for all quantizations: rows of 256 elements.
HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 256, 512, 4, 2, 2


def llama_tensors(seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """The tensors of a tiny Llama, by GGUF name."""
    rng = np.random.default_rng(seed)
    keys = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(TOKENS), HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        parts = {
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (keys, HIDDEN),
            "attn_v": (keys, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
        }
        shapes |= {f"blk.{layer}.{part}.weight": shape for part, shape in parts.items()}
    return {name: rng.normal(0.0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    tensors: Mapping[str, NDArray[Any]] | None = None,
    *,
    arch: str = "llama",
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    facts: Mapping[str, Any] | None = None,
    pre: str | None = "smollm",
) -> Path:
    """Write a tiny model; `kinds` has encodings of single tensors, `facts` overrides metadata."""
    writer = gguf.GGUFWriter(path, arch)
    for name, value in (_facts(arch) | dict(facts or {})).items():
        _add_fact(writer, name, value)
    if pre is not None:
        _add_tokenizer(writer, pre)
    for name, tensor in (llama_tensors() if tensors is None else tensors).items():
        kind = (kinds or {}).get(name, gguf.GGMLQuantizationType.F32)
        content = gguf.quants.quantize(tensor, kind)
        plain = kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
        writer.add_tensor(name, content, raw_dtype=None if plain else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _facts(arch: str) -> dict[str, Any]:
    return {
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": INNER,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 100000.0,
    }


def _add_fact(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif value is not None:
        writer.add_uint32(name, value)


def _add_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(list(TOKENS))
    kinds = [gguf.TokenType.CONTROL] * len(SIGNS)
    writer.add_token_types([*kinds, *[gguf.TokenType.NORMAL] * (len(TOKENS) - len(SIGNS))])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
