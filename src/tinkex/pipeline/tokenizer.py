"""Byte-level BPE tokenizer: train it on data files, save it as a Hugging Face folder, load it.

python -m tinkex.pipeline.tokenizer --data pretrain.jsonl sft.jsonl --out tokenizer
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tinkex.data.chatml import (
    CHAT_TEMPLATE,
    END_OF_TEXT,
    IM_END,
    IM_START,
    SPECIAL_TOKENS,
    TAG_TOKENS,
    render_spans,
)
from tinkex.data.jsonl import digest_file, parse_line, read_lines
from tinkex.data.rows import ChatRow, StageRow, TextRow, parse_any_row
from tinkex.errors import ConfigError
from tinkex.pipeline.entry import run_program
from tinkex.system.atomic import new_directory

TOKENIZER_FILE = "tokenizer.json"
#: Digest of the training data, to check that the tokenizer is up to date.
ORIGIN_FILE = "origin.json"
#: Every byte has a token, so that any text can be encoded.
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS) + len(TAG_TOKENS)
MAX_CONTEXT_TOKENS = 32768
#: Increase when the format changes; older folders are then rebuilt.
_VERSION = 1


class TextTokenizer:
    """The tokenizer interface of the pipeline: encode, decode and ids of special tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._inner = _load_file(folder / TOKENIZER_FILE)
        self.digest = digest_file(folder / TOKENIZER_FILE)
        """SHA-256 of tokenizer.json."""
        self.end_of_text = self.token_id(END_OF_TEXT)
        """Ends a document; also the padding token."""
        self.end_of_turn = self.token_id(IM_END)
        self.start_of_turn = self.token_id(IM_START)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self._inner.get_vocab_size(with_added_tokens=True))

    def token_id(self, token: str) -> int:
        """Return the id of a single token; raises ConfigError if the text is not one."""
        token_id = self._inner.token_to_id(token)
        if token_id is None:
            raise ConfigError(
                f"{token!r} is not a single token of the tokenizer in {self.folder}",
                hint="Use a tokenizer that the pipeline trained, or one for ChatML.",
            )
        return int(token_id)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts without adding special tokens."""
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids, including special tokens."""
        return str(self._inner.decode(list(ids), skip_special_tokens=False))


def load_tokenizer(folder: Path) -> TextTokenizer:
    """Load a tokenizer folder; raises ConfigError if it is incomplete."""
    return TextTokenizer(folder)


def _load_file(path: Path) -> Tokenizer:
    if not path.is_file():
        raise ConfigError(
            f"no tokenizer in {path.parent}: {path.name} is missing",
            hint="Train one: python -m tinkex.pipeline.tokenizer --data FILE --out FOLDER",
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ConfigError(
            f"{path} is not a valid tokenizer: {error}", hint="Train it again."
        ) from error


# --- training -------------------------------------------------------------------------------


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a tokenizer; with little text it may have fewer tokens than requested."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(
            f"vocab_size must be at least {MIN_VOCAB_SIZE} (bytes and tags), got {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    # Split digits, so that numbers of any length consist of the same ten tokens.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, *TAG_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train_tokenizer_folder(data: Sequence[Path], out: Path, vocab_size: int) -> bool:
    """Write a tokenizer folder atomically; returns False if it is up to date."""
    origin = {"digest": _digest_of(data, vocab_size), "vocab_size": vocab_size}
    if _read_origin(out) == origin:
        return False
    trained = train_tokenizer(_iter_texts(data), vocab_size)
    with new_directory(out) as scratch:
        write_tokenizer(trained, scratch)
        (scratch / ORIGIN_FILE).write_text(json.dumps(origin, indent=2) + "\n")
    return True


def write_tokenizer(trained: Tokenizer, folder: Path) -> None:
    """Write the files of a Hugging Face folder."""
    content = json.loads(trained.to_str())
    for token in content["added_tokens"]:
        # skip_special_tokens must drop the ChatML delimiters but keep tags such as <think>.
        token["special"] = token["content"] in SPECIAL_TOKENS
    (folder / TOKENIZER_FILE).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_CONTEXT_TOKENS,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _iter_texts(data: Sequence[Path]) -> Iterator[str]:
    for path in data:
        for line in read_lines(path):
            yield from _row_texts(parse_line(path, line, parse_any_row))


def _row_texts(row: StageRow) -> Iterator[str]:
    if isinstance(row, TextRow):
        if row.text:
            yield row.text
        return
    for chat in (row,) if isinstance(row, ChatRow) else (row.chosen, row.rejected):
        yield from (span.text for span in render_spans(chat.messages, chat.tools))


def _digest_of(data: Sequence[Path], vocab_size: int) -> str:
    digest = hashlib.sha256(
        f"{_VERSION} {vocab_size} {SPECIAL_TOKENS} {TAG_TOKENS} {CHAT_TEMPLATE}".encode()
    )
    for path in data:
        digest.update(digest_file(path).encode())
    return digest.hexdigest()


def _read_origin(folder: Path) -> object:
    try:
        origin = json.loads((folder / ORIGIN_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return origin if (folder / TOKENIZER_FILE).is_file() else None


# --- the command ----------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Train a tokenizer; returns the exit code: 0, 1 after an error, 130 or 143 after a signal."""
    parser = argparse.ArgumentParser(description="Train a tokenizer.", allow_abbrev=False)
    parser.add_argument("--data", nargs="+", type=Path, required=True, help="JSONL files.")
    parser.add_argument("--out", type=Path, required=True, help="Output folder.")
    parser.add_argument(
        "--vocab_size", type=int, default=6400, help="Maximum vocabulary size (default: 6400)."
    )
    args = parser.parse_args(argv)
    return run_program(lambda: _run_training(args.data, args.out, args.vocab_size))


def _run_training(data: Sequence[Path], out: Path, vocab_size: int) -> int:
    outcome = "trained" if train_tokenizer_folder(data, out, vocab_size) else "is up to date"
    sys.stderr.write(f"tokenizer {out} {outcome}: {load_tokenizer(out).vocab_size} tokens\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
