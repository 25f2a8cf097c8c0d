"""Plans a conversion: the config.json of an architecture, RoPE included, and names of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tinkex.engine.models.gguf.reader import GgufFile, GgufTensor
from tinkex.engine.models.weight_files import UnusableModel

_MATRICES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
#: Holds the frequency factors of Llama 3; the file does not store the rule that produced them.
ROPE_FREQS_TENSOR = "rope_freqs.weight"
#: The constants of that rule; only the factor differs between models.
_LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR, _ORIGINAL_CONTEXT = 1.0, 4.0, 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """How an architecture is named in transformers, and how it differs from the others."""

    model_type: str
    class_name: str
    biased_parts: frozenset[str] = frozenset()
    """The modules of a layer that always have a bias."""
    has_head_norms: bool = False
    is_interleaved: bool = False
    """Whether query and key rows are stored in RoPE pairs, which transformers does not do."""
    fixed_config: Mapping[str, object] = field(default_factory=dict)
    """Fields of config.json besides sizes."""


_NO_WINDOW = {"use_sliding_window": False, "hidden_act": "silu"}
ARCHITECTURES = {
    "llama": GgufArchitecture(
        model_type="llama",
        class_name="LlamaForCausalLM",
        is_interleaved=True,
        fixed_config={"hidden_act": "silu", "pretraining_tp": 1},
    ),
    "qwen2": GgufArchitecture(
        model_type="qwen2",
        class_name="Qwen2ForCausalLM",
        biased_parts=frozenset({"attn_q", "attn_k", "attn_v"}),
        fixed_config=_NO_WINDOW,
    ),
    "qwen3": GgufArchitecture(
        model_type="qwen3",
        class_name="Qwen3ForCausalLM",
        has_head_norms=True,
        fixed_config=_NO_WINDOW | {"attention_bias": False},
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorConversion:
    """A tensor of the file, and how it is converted."""

    tensor: GgufTensor
    name: str
    num_heads: int = 0
    """Number of heads whose rows are de-interleaved; 0 keeps the order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionPlan:
    """The contents of the converted folder, except for its tokenizer."""

    config: Mapping[str, object]
    conversions: tuple[TensorConversion, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelSizes:
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    layers: int

    def shape_of(self, part: str) -> tuple[int, ...]:
        """The shape of a module's weight."""
        queries, keys = self.heads * self.head, self.kv_heads * self.head
        shapes: dict[str, tuple[int, ...]] = {
            "attn_q": (queries, self.hidden),
            "attn_k": (keys, self.hidden),
            "attn_v": (keys, self.hidden),
            "attn_output": (self.hidden, queries),
            "ffn_gate": (self.inner, self.hidden),
            "ffn_up": (self.inner, self.hidden),
            "ffn_down": (self.hidden, self.inner),
            "token_embd": (self.vocab, self.hidden),
            "output": (self.vocab, self.hidden),
        }
        is_head_norm = part in _HEAD_NORMS
        return shapes.get(part, (self.head if is_head_norm else self.hidden,))


def plan_conversion(file: GgufFile) -> ConversionPlan:
    """Plan a conversion; raises if a tensor is missing, unexpected or of the wrong shape."""
    arch = file.metadata.get("general.architecture")
    architecture = ARCHITECTURES.get(str(arch))
    if architecture is None:
        raise UnusableModel(
            f"{file.path} holds a {str(arch)!r:.60} model; supported GGUF architectures are "
            f"{', '.join(ARCHITECTURES)}",
            hint="Add the model's Hugging Face folder instead.",
        )
    metadata = _ArchitectureMetadata(file, str(arch))
    sizes = _read_sizes(file, metadata)
    biased = architecture.biased_parts | _optional_biases(file, architecture)
    conversions = tuple(_plan_tensors(file, architecture, sizes, biased))
    extra = (
        file.tensors.keys()
        - {conversion.tensor.name for conversion in conversions}
        - {ROPE_FREQS_TENSOR}
    )
    if extra:
        raise UnusableModel(
            f"{file.path} has {len(extra)} tensors that a {arch} model does not have, for example "
            f"{min(extra)!r}; mixture-of-experts models are not supported"
        )
    return ConversionPlan(
        config=_build_config(file, architecture, metadata, sizes, biased), conversions=conversions
    )


class _ArchitectureMetadata:
    """Type-checked access to the metadata of an architecture."""

    def __init__(self, file: GgufFile, arch: str) -> None:
        self._file = file
        self._arch = arch

    def count(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        found = self._file.metadata.get(f"{self._arch}.{name}", default)
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            raise self._invalid_value(name, found)
        return found

    def number(self, name: str, default: float) -> float:
        """A positive number, as the shortest decimal that rounds to the stored float32."""
        found = self._file.metadata.get(f"{self._arch}.{name}", default)
        if isinstance(found, bool) or not isinstance(found, int | float) or not found > 0:
            raise self._invalid_value(name, found)
        return float(str(np.float32(found)))

    def _invalid_value(self, name: str, found: object) -> UnusableModel:
        problem = "lacks" if found is None else f"has {found!r:.60} as"
        return UnusableModel(f"{self._file.path} {problem} {self._arch}.{name}, a positive number")


def _read_sizes(file: GgufFile, metadata: _ArchitectureMetadata) -> _ModelSizes:
    hidden, heads = metadata.count("embedding_length"), metadata.count("attention.head_count")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise UnusableModel(f"{file.path} lacks the tensor 'token_embd.weight'")
    head = metadata.count("attention.key_length", max(hidden // heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if metadata.count(name, head) != head:
            raise UnusableModel(
                f"{file.path} has a head size of {head} and a {name} of {metadata.count(name)}; "
                "such models are not supported"
            )
    return _ModelSizes(
        hidden=hidden,
        inner=metadata.count("feed_forward_length"),
        heads=heads,
        kv_heads=metadata.count("attention.head_count_kv", heads),
        head=head,
        vocab=embedding.shape[0],
        layers=metadata.count("block_count"),
    )


def _optional_biases(file: GgufFile, architecture: GgufArchitecture) -> frozenset[str]:
    """The modules of a Llama model with a bias; in transformers, all of a kind or none."""
    if not architecture.is_interleaved:
        return frozenset()
    attention = [part for part in _MATRICES if part.startswith("attn")]
    inner = [part for part in _MATRICES if part.startswith("ffn")]
    kinds = (kind for kind in (attention, inner) if f"blk.0.{kind[0]}.bias" in file.tensors)
    return frozenset(part for kind in kinds for part in kind)


def _plan_tensors(
    file: GgufFile, architecture: GgufArchitecture, sizes: _ModelSizes, biased: frozenset[str]
) -> Iterator[TensorConversion]:
    for part, name in _TOP_LEVEL.items():
        # Without an LM head, it is tied to the embedding.
        if part != "output" or "output.weight" in file.tensors:
            yield _plan_tensor(file, f"{part}.weight", f"{name}.weight", sizes.shape_of(part))
    norms = _NORMS | (_HEAD_NORMS if architecture.has_head_norms else {})
    heads = {"attn_q": sizes.heads, "attn_k": sizes.kv_heads} if architecture.is_interleaved else {}
    for layer in range(sizes.layers):
        for part, name in (_MATRICES | norms).items():
            shape, num_heads = sizes.shape_of(part), heads.get(part, 0)
            source, target = f"blk.{layer}.{part}", f"model.layers.{layer}.{name}"
            yield _plan_tensor(file, f"{source}.weight", f"{target}.weight", shape, num_heads)
            if part in biased:
                yield _plan_tensor(file, f"{source}.bias", f"{target}.bias", shape[:1], num_heads)


def _plan_tensor(
    file: GgufFile, source: str, target: str, shape: tuple[int, ...], num_heads: int = 0
) -> TensorConversion:
    stored = file.tensors.get(source)
    if stored is None:
        raise UnusableModel(f"{file.path} lacks the tensor {source!r}")
    if stored.shape != shape:
        raise UnusableModel(
            f"tensor {source!r} of {file.path} has the shape {stored.shape}, expected {shape}"
        )
    return TensorConversion(tensor=stored, name=target, num_heads=num_heads)


def _build_config(
    file: GgufFile,
    architecture: GgufArchitecture,
    metadata: _ArchitectureMetadata,
    sizes: _ModelSizes,
    biased: frozenset[str],
) -> dict[str, object]:
    biases = {}
    if architecture.is_interleaved:
        biases = {"attention_bias": "attn_output" in biased, "mlp_bias": "ffn_up" in biased}
    context = metadata.count("context_length")
    return {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head,
        "max_position_embeddings": context,
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon", 1e-6),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        **read_rope_config(file, metadata.number("rope.freq_base", 10000.0), sizes.head),
        **architecture.fixed_config,
        **biases,
    }


# --- RoPE settings -------------------------------------------------------------------------------


def read_rope_config(file: GgufFile, theta: float, head_size: int) -> dict[str, object]:
    """The fields `rope_theta` and, if the context was extended, `rope_scaling`."""
    config: dict[str, object] = {"rope_theta": theta}
    scaling = _read_rope_scaling(file, theta, head_size)
    return config | ({"rope_scaling": scaling} if scaling else {})


def _read_rope_scaling(file: GgufFile, theta: float, head_size: int) -> dict[str, object] | None:
    arch = file.metadata["general.architecture"]
    kind = file.metadata.get(f"{arch}.rope.scaling.type", "none")
    factor = file.metadata.get(f"{arch}.rope.scaling.factor", 0)
    scale = float(factor) if isinstance(factor, float | int) and factor > 0 else None
    if ROPE_FREQS_TENSOR in file.tensors:
        return _read_llama3_scaling(file, theta, head_size)
    if kind == "none":
        return None
    if kind == "linear" and scale is not None:
        return {"rope_type": "linear", "factor": scale}
    original = file.metadata.get(f"{arch}.rope.scaling.original_context_length")
    if kind == "yarn" and scale is not None and isinstance(original, int):
        return {
            "rope_type": "yarn",
            "factor": scale,
            "original_max_position_embeddings": original,
        }
    raise UnusableModel(
        f"{file.path} uses RoPE scaling {kind!r:.40} with factor {factor!r:.40}, which is not "
        "supported; supported are none, linear and yarn"
    )


def _read_llama3_scaling(file: GgufFile, theta: float, head_size: int) -> dict[str, object]:
    """Find the llama3 rule that gives exactly the factors of the file; raises if there is none."""
    stored = file.tensors[ROPE_FREQS_TENSOR]
    with file.path.open("rb") as content:
        content.seek(stored.offset)
        raw = np.frombuffer(content.read(stored.num_bytes), np.uint8)
    factors = stored.encoding.decode(raw.reshape(-1, stored.encoding.block_bytes)).ravel()
    factor = float(factors.max())
    expected = llama3_factors(factor, theta, head_size)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise UnusableModel(
            f"the tensor {ROPE_FREQS_TENSOR!r} of {file.path} is not a supported RoPE scaling; "
            "only that of Llama 3.1 and 3.2 is"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW_FREQ_FACTOR,
        "high_freq_factor": _HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": _ORIGINAL_CONTEXT,
    }


def llama3_factors(factor: float, theta: float, head_size: int) -> NDArray[np.float64]:
    """Divisor of each frequency: `factor` for low, 1 for high, interpolated between them."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_size, 2) / head_size)
    share = (_ORIGINAL_CONTEXT / wavelengths - _LOW_FREQ_FACTOR) / (
        _HIGH_FREQ_FACTOR - _LOW_FREQ_FACTOR
    )
    interpolated = 1 / ((1 - share) / factor + share)
    divisors = np.where(share < 0, factor, interpolated)
    return np.where(share > 1, 1.0, divisors)
