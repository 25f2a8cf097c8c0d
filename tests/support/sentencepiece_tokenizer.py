"""A tokenizer in the manner of sentencepiece: spaces are marked, unknown characters are bytes."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<unk>", "<s>", "</s>", "[TOOL_CALLS]", "[ARGS]")
_WORDS = ("\u2581", "\u2581He", "llo", "\u2581wor", "ld", "a", "b", "c", "\u00e9")


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose decoder depends on the context, as that of Llama 2 and Mistral."""
    byte_tokens = [f"<0x{value:02X}>" for value in range(256)]
    words = [*SPECIAL, *byte_tokens, *_WORDS]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
