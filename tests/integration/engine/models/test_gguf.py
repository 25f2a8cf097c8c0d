"""Models that are converted to GGUF and back give the same results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from tests.support.adapters import load_plain
from tests.support.gguf_files import TOKENS, write_gguf
from tests.support.sentencepiece_files import LINES, THEIRS, vocabulary
from tinkex.engine.models.gguf.architectures import llama3_factors
from tinkex.engine.models.gguf.convert import convert_gguf
from tinkex.engine.models.gguf.tokenizer import tokenizer_files

SIZES: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama with a head": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama with biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama 3": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False),
}
PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def make_model(name: str) -> PreTrainedModel:
    """A model in which every weight affects the result."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data.uniform_(0.2, 1.5)
    return model.eval()  # type: ignore[no-any-return]


def gguf_name(name: str) -> str:
    """The GGUF name of a transformers tensor."""
    path, _, kind = name.rpartition(".")
    if path in PARTS:
        return f"{PARTS[path]}.{kind}"
    layer, _, part = path.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{PARTS[part]}.{kind}"


def to_gguf(model: PreTrainedModel, path: Path, kind: gguf.GGMLQuantizationType) -> Path:
    """Write a model with the `gguf` package."""
    config: Any = model.config
    arch, tensors = config.model_type, {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
        if arch == "llama" and (which := name.partition("self_attn.")[2][:1]) in heads:
            halves = array.reshape(heads[which], 2, -1, *array.shape[1:])
            array = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
        tensors[gguf_name(name)] = array
    if config.rope_parameters["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(8.0, 1e4, 16).astype(np.float32)
    facts = {
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": getattr(config, "head_dim", None) or 16,
        f"{arch}.rope.freq_base": config.rope_parameters["rope_theta"],
    }
    kinds = {name: kind for name, array in tensors.items() if array.ndim == 2}
    return write_gguf(path, tensors, arch=arch, facts=facts, kinds=kinds, pre="qwen2")


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    tokens = torch.arange(60).reshape(2, 30) * 4 + 3
    found: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return found


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_float32_conversion_is_exact(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    source = to_gguf(model, tmp_path / "model.gguf", gguf.GGMLQuantizationType.F32)
    back = load_plain(convert_gguf(source, tmp_path / "model").path)
    assert torch.equal(logits(back), logits(model))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_quantized_weights_match_file(name: str, kind: str, tmp_path: Path) -> None:
    """Quantization loses precision; the conversion back is exact."""
    model, theirs = make_model(name), gguf.GGMLQuantizationType[kind]
    source = to_gguf(model, tmp_path / "model.gguf", theirs)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            packed = gguf.quants.quantize(parameter.detach().numpy(), theirs)
            parameter.data = torch.from_numpy(
                gguf.quants.dequantize(packed, theirs).astype(np.float32).copy()
            )
    folder = convert_gguf(source, tmp_path / "model").path
    back = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.testing.assert_close(logits(back), logits(model), rtol=0, atol=1e-5)


def test_transformers_loads_bpe_tokenizer(tmp_path: Path) -> None:
    """The same BOS, EOS and splitting of digits."""
    source = to_gguf(make_model("llama"), tmp_path / "m.gguf", gguf.GGMLQuantizationType.F32)
    tokenizer = AutoTokenizer.from_pretrained(convert_gguf(source, tmp_path / "model").path)
    assert tokenizer.encode("hello12") == [TOKENS.index(text) for text in ("hello", "1", "2")]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], return_dict=False)
    assert chat == [1, TOKENS.index("hello"), 2]


def test_transformers_loads_sentencepiece_tokenizer(tmp_path: Path) -> None:
    """transformers has a special class for such models, which must not rebuild the tokenizer."""
    for name, content in tokenizer_files(vocabulary(add_bos_token=None)).items():
        (tmp_path / name).write_bytes(content)
    CONFIGS["llama"].save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in (*LINES, " two  blanks", "new\nline 你🙂"):
        assert tokenizer.encode(text) == [1, *THEIRS.encode(text)]
        assert tokenizer.decode(THEIRS.encode(text)) == text
