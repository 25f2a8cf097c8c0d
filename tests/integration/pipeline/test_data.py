"""Token files and batches."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.integration.pipeline.stage_inputs import (
    make_tokenizer,
    parse_args,
    write_rows,
    write_samples,
)
from tinkex.errors import InvalidInput
from tinkex.pipeline.batches import (
    PackedSource,
    PairSource,
    TokenBatch,
    _has_targets,
    find_trainable_rows,
)
from tinkex.pipeline.token_file import DocumentPieces, TokenFile, open_token_file
from tinkex.pipeline.tokenizer import TextTokenizer
from tinkex.pipeline.train_stage import open_splits

ASK = {"role": "user", "content": "ab"}
SAY = {"role": "assistant", "content": "cd"}
BAD = {"role": "assistant", "content": "e"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    return make_tokenizer(folder / "made", list(write_samples(folder).values()))


def packed(file: TokenFile, *, max_length: int = 64, is_cut: bool = False) -> PackedSource:
    rows = np.arange(file.num_rows)
    return PackedSource(file, rows, max_length=max_length, batch_size=3, seed=1, split_long=is_cut)


def shown(batch: TokenBatch, tokenizer: TextTokenizer) -> list[tuple[str, str, bool]]:
    """Return each prediction: token, target, loss mask."""
    return [
        (tokenizer.decode([seen]), tokenizer.decode([target]), counts)
        for seen, target, counts in zip(
            batch.tokens_T.tolist(),
            batch.targets_T.tolist(),
            batch.loss_mask_T.tolist(),
            strict=True,
        )
    ]


def test_loss_mask_of_a_conversation(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    row = {"conversations": [{**ASK, "content": "1"}, {**SAY, "content": "23"}]}
    data = write_rows(tmp_path / "a.jsonl", [row])
    (batch,) = [packed(open_token_file(data, tokenizer, "sft", tmp_path)).batch(0, 0)]
    pairs = shown(batch, tokenizer)
    counted = [pair[:2] for pair in pairs if pair[2]]
    # The line after "assistant" predicts the first word, the last word predicts the end.
    assert counted == [("\n", "2"), ("2", "3"), ("3", "<|im_end|>")]
    assert pairs[0][0] == "<|im_start|>"
    # The end of the last turn is a target but never an input.
    assert pairs[-1] == ("3", "<|im_end|>", True)
    assert ("1", "<|im_end|>", False) in pairs


def test_every_assistant_turn_is_a_target(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    talk = [{**ASK, "content": "1"}, {**SAY, "content": "2"}, ASK, {**SAY, "content": "3"}]
    data = write_rows(tmp_path / "a.jsonl", [{"messages": talk}])
    batch = packed(open_token_file(data, tokenizer, "sft", tmp_path)).batch(0, 0)
    counted = [pair[:2] for pair in shown(batch, tokenizer) if pair[2]]
    assert counted == [("\n", "2"), ("2", "<|im_end|>"), ("\n", "3"), ("3", "<|im_end|>")]


def test_text_ends_with_eos_and_all_but_the_first_token_are_targets(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    data = write_rows(tmp_path / "a.jsonl", [{"text": "123"}, {"ids": [5, 6]}])
    file = open_token_file(data, tokenizer, "pretrain", tmp_path)
    batch = packed(file, is_cut=True).batch(0, 0)
    one, two = batch.lengths
    assert (one, two) == (3, 2)
    assert shown(batch, tokenizer)[:3] == [
        ("1", "2", True),
        ("2", "3", True),
        ("3", "<|endoftext|>", True),
    ]
    assert batch.tokens_T.tolist()[3:] == [5, 6]
    assert batch.targets_T.tolist()[3:] == [6, 0]


def test_long_text_continues_in_the_next_sequence(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    ids = list(range(20, 45))
    data = write_rows(tmp_path / "a.jsonl", [{"ids": ids}])
    source = packed(
        open_token_file(data, tokenizer, "pretrain", tmp_path), max_length=8, is_cut=True
    )
    batches = [source.batch(0, index) for index in range(source.num_batches(0))]
    pairs = [
        pair
        for batch in batches
        for pair in zip(batch.tokens_T.tolist(), batch.targets_T.tolist(), strict=True)
    ]
    assert sorted(pairs) == list(zip(ids, [*ids[1:], 0], strict=True))
    assert max(length for batch in batches for length in batch.lengths) == 8


def test_every_epoch_has_all_documents_in_its_own_order(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    data = write_samples(tmp_path)["sft"]
    file = open_token_file(data, tokenizer, "sft", tmp_path)
    source = packed(file)
    seen = []
    for epoch in (0, 1):
        batches = [source.batch(epoch, index) for index in range(source.num_batches(epoch))]
        found = [
            tuple(part.tolist())
            for batch in batches
            for part in batch.tokens_T.split(batch.lengths)
        ]
        expected = [tuple(file.document(row).ids[:-1]) for row in range(file.num_rows)]
        assert Counter(found) == Counter(tokens[:64] for tokens in expected)
        assert sum(batch.num_tokens for batch in batches) == source.num_tokens
        seen.append(found)
    assert seen[0] != seen[1]


def test_batches_are_independent_of_access_order(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    file = open_token_file(write_samples(tmp_path)["sft"], tokenizer, "sft", tmp_path)
    one, two = packed(file), packed(file)
    for index in range(one.num_batches(0)):
        one.batch(0, index)
    for epoch, index in ((1, 2), (0, 1), (1, 0)):
        a, b = one.batch(epoch, index), two.batch(epoch, index)
        assert a.tokens_T.tolist() == b.tokens_T.tolist()
        assert a.lengths == b.lengths


def test_token_file_is_rebuilt_only_after_a_change(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    data, cache = write_rows(tmp_path / "a.jsonl", [{"text": "one two"}]), tmp_path / "cache"
    file = open_token_file(data, tokenizer, "pretrain", cache)
    assert isinstance(file.tokens, np.memmap)
    assert file.tokens.dtype == np.uint16
    (folder,) = cache.iterdir()
    before = (folder / "tokens.bin").stat().st_ino
    open_token_file(data, tokenizer, "pretrain", cache)
    assert (folder / "tokens.bin").stat().st_ino == before
    write_rows(data, [{"text": "one three"}])
    changed = open_token_file(data, tokenizer, "pretrain", cache)
    (other,) = cache.iterdir()
    assert other != folder
    assert changed.digest != file.digest
    # A process that has the old file mapped can still read it.
    assert tokenizer.decode(file.tokens.tolist()) == "one two<|endoftext|>"


def test_token_file_depends_on_the_tokenizer(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    data = write_rows(tmp_path / "a.jsonl", [{"text": "one two one two"}])
    other = make_tokenizer(tmp_path / "other", [data])
    first = open_token_file(data, tokenizer, "pretrain", tmp_path / "cache")
    second = open_token_file(data, other, "pretrain", tmp_path / "cache")
    assert first.digest != second.digest
    assert other.decode(second.document(0).ids) == "one two one two<|endoftext|>"


def test_invalid_line_is_reported_and_leaves_no_file(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text('{"text": "a"}\n' * 700 + '{"text": \n')
    with pytest.raises(InvalidInput, match=r"a\.jsonl, line 701 is not JSON"):
        open_token_file(data, tokenizer, "pretrain", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_token_outside_the_vocabulary_is_reported(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    data = write_rows(tmp_path / "a.jsonl", [{"ids": [1]}, {"ids": [tokenizer.vocab_size]}])
    with pytest.raises(InvalidInput, match="line 2: token"):
        open_token_file(data, tokenizer, "pretrain", tmp_path / "cache")


def test_answer_beyond_max_length_is_dropped_and_counted(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    late = {"messages": [{**ASK, "content": "1" * 100}, SAY]}
    data = write_rows(tmp_path / "a.jsonl", [late, {"messages": [ASK, SAY]}])
    source = packed(open_token_file(data, tokenizer, "sft", tmp_path))
    assert source.num_dropped == 1
    assert source.batch(0, 0).num_samples == 1


def test_eval_split_contains_only_usable_rows(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    talk = [{"messages": [{**ASK, "content": str(n)}, SAY]} for n in range(4)]
    late = [{"messages": [{**ASK, "content": f"{n}" * 100}, SAY]} for n in range(20)]
    data = write_rows(tmp_path / "a.jsonl", [*late[:10], *talk, *late[10:]])
    for seed in range(6):
        args = parse_args("sft", tmp_path, data, "--max_seq_len", "64", "--seed", str(seed))
        train, held = open_splits("sft", args, tokenizer)
        assert 10 <= held.rows[0] < 14
        assert len(held.rows) == 1
        assert len(train.rows) == 23


@pytest.mark.parametrize("name", ["data_path", "eval_data_path"])
def test_file_without_targets_is_reported(
    tmp_path: Path, tokenizer: TextTokenizer, name: str
) -> None:
    late = {"messages": [{**ASK, "content": "1" * 100}, SAY]}
    good = write_rows(tmp_path / "a.jsonl", [{"messages": [ASK, SAY]}])
    empty = write_rows(tmp_path / "b.jsonl", [late, late])
    words = ("--max_seq_len", "64", "--eval_data_path", str(good), f"--{name}", str(empty))
    with pytest.raises(InvalidInput, match=r"b\.jsonl: no row .* within its first 64 tokens"):
        open_splits("sft", parse_args("sft", tmp_path, good, *words), tokenizer)


def test_pairs_need_targets_in_both_answers(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    late = {**ASK, "content": "1" * 100}
    pairs = [
        {"chosen": [ASK, SAY], "rejected": [ASK, BAD]},
        {"chosen": [ASK, SAY], "rejected": [late, BAD]},
    ]
    file = open_token_file(write_rows(tmp_path / "a.jsonl", pairs), tokenizer, "dpo", tmp_path)
    assert find_trainable_rows(file, 64).tolist() == [True, False]
    texts = write_rows(tmp_path / "b.jsonl", [{"text": "1 " * 100}, {"text": "1"}])
    file = open_token_file(texts, tokenizer, "pretrain", tmp_path)
    assert find_trainable_rows(file, 64).all()


def test_pairs_stay_together_chosen_first(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    rows = [
        {"chosen": [{**ASK, "content": str(n)}, SAY], "rejected": [{**ASK, "content": str(n)}, BAD]}
        for n in range(5)
    ]
    file = open_token_file(write_rows(tmp_path / "a.jsonl", rows), tokenizer, "dpo", tmp_path)
    source = PairSource(file, np.arange(5), max_length=64, batch_size=2, seed=1)
    assert source.num_batches(0) == 3
    chosen_texts = []
    for index in range(3):
        batch = source.batch(0, index)
        texts = [
            tokenizer.decode(part.tolist())
            for part in batch.token_batch.tokens_T.split(batch.token_batch.lengths)
        ]
        for better, other in zip(texts[::2], texts[1::2], strict=True):
            assert better.endswith("assistant\ncd")
            assert other.endswith("assistant\ne")
            assert better.split("assistant")[0] == other.split("assistant")[0]
            chosen_texts.append(better)
    assert len(set(chosen_texts)) == 5


@given(st.data())
def test_piece_has_targets_if_any_prediction_is_a_target(data: st.DataObject) -> None:
    learned = data.draw(st.lists(st.booleans(), min_size=2, max_size=30))
    last = len(learned) - 1
    starts = data.draw(st.lists(st.integers(0, last - 1), max_size=6))
    lengths = [data.draw(st.integers(0, last - start)) for start in starts]
    file = cast(TokenFile, SimpleNamespace(learned=np.array(learned, np.uint8)))
    found = _has_targets(
        file, DocumentPieces(np.array(starts, np.int64), np.array(lengths, np.int64))
    )
    assert found.tolist() == [
        any(learned[start + 1 : start + 1 + length])
        for start, length in zip(starts, lengths, strict=True)
    ]
