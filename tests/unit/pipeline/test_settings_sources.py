"""The command line of the trainers, and settings.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.errors import ConfigError
from tinkex.pipeline.settings_options import STAGES
from tinkex.pipeline.settings_sources import (
    STAGE_DESCRIPTIONS,
    default_value,
    from_flags,
    from_json,
    make_parser,
    make_settings,
    parse_arguments,
    stage_options,
    to_flags,
    to_json,
)
from tinkex.pipeline.train_settings import OPTIONS, TrainSettings

NEEDED = ("--out_dir", "out", "--data_path", "data.jsonl")


def parse(stage: str, *words: str) -> TrainSettings:
    parent = ("--init_from", "parent") if stage != "pretrain" else ()
    return parse_arguments(stage, [*NEEDED, *parent, *words])


@pytest.mark.parametrize(
    ("word", "meant"),
    [("true", True), ("True", True), ("1", True), ("false", False), ("False", False), ("0", False)],
)
def test_use_moe_parses_booleans(word: str, meant: bool) -> None:
    assert parse("pretrain", "--use_moe", word).use_moe is meant


@pytest.mark.parametrize("stage", STAGE_DESCRIPTIONS)
def test_every_stage_accepts_the_options_of_the_pipeline(stage: str) -> None:
    expected = {
        *("out_dir", "data_path", "eval_data_path", "tokenizer_dir", "init_from", "hidden_size"),
        *("num_layers", "num_heads", "num_kv_heads", "intermediate_size", "max_seq_len"),
        *("use_moe", "num_experts", "vocab_size", "epochs", "max_steps", "batch_size"),
        *("accumulation_steps", "learning_rate", "min_learning_rate", "warmup_steps", "schedule"),
        *("optimizer", "muon_lr", "weight_decay", "grad_clip", "seed", "save_interval"),
        *("save_interval_seconds", "keep_last_checkpoints", "keep_every", "ckpt_dir", "resume"),
        *("allow_partial", "eval_interval", "eval_samples", "log_interval", "device", "dtype"),
        *("tensorboard_dir", "metrics_file", "limit"),
    }
    assert expected <= set(stage_options(stage))
    assert parse(stage).keep_last_checkpoints == 3


@pytest.mark.parametrize(
    ("stage", "own"),
    [
        ("dpo", {"beta", "ref_path"}),
        ("r1", {"teacher", "r1_token_weight", "r1_tokens", "distill_alpha", "distill_temperature"}),
    ],
)
def test_stage_specific_options_are_rejected_by_other_stages(stage: str, own: set[str]) -> None:
    for other in STAGE_DESCRIPTIONS:
        found = own & set(stage_options(other))
        assert found == (own if other == stage else set())


@pytest.mark.parametrize(
    "words",
    [
        ("--epochs", "0"),
        ("--epochs", "1.5"),
        ("--batch_size", "-1"),
        ("--learning_rate", "nan"),
        ("--learning_rate", "inf"),
        ("--learning_rate", "0"),
        ("--use_moe", "maybe"),
        ("--schedule", "linear"),
        ("--hidden_size", "100"),
        ("--num_heads", "8", "--num_kv_heads", "3"),
        ("--min_learning_rate", "1"),
        ("--out", "x"),
    ],
)
def test_invalid_options_exit_with_code_2(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("pretrain", *words)
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_dpo_requires_initial_weights() -> None:
    with pytest.raises(SystemExit):
        parse_arguments("dpo", list(NEEDED))


def test_defaults_depend_on_other_options() -> None:
    known = parse("sft", "--learning_rate", "0.01")
    assert known.final_learning_rate == pytest.approx(0.001)
    assert parse("r1", "--r1_tokens", "<a>, <b>").r1_tokens == ("<a>", "<b>")


def test_help_shows_every_option_and_default() -> None:
    text = make_parser("r1").format_help()
    assert all(f"--{name}" in text for name in stage_options("r1"))
    assert "<think>,</think>" in text
    assert "None" not in text


PATHS = st.text(st.characters(exclude_characters="\0"), min_size=1).map(Path)
TOKENS = st.text(st.characters(categories=["L", "N", "P"], exclude_characters=","), min_size=1)
FLOATS = st.floats(1e-6, 1.0)
VALUES: dict[str, st.SearchStrategy[object]] = {
    "allow_partial": st.booleans(),
    "use_moe": st.booleans(),
    "schedule": st.sampled_from(["cosine", "constant"]),
    "optimizer": st.sampled_from(["adamw", "muon"]),
    "dtype": st.sampled_from(["auto", "float32", "bfloat16"]),
    "device": st.sampled_from(["auto", "cpu", "cuda:1"]),
    "resume": st.text(),
    "r1_tokens": st.lists(TOKENS, min_size=1).map(tuple),
    # Any number of heads must divide these.
    "hidden_size": st.integers(1, 99).map(lambda size: 64 * size),
    "num_heads": st.sampled_from([2, 4, 8]),
    "num_kv_heads": st.sampled_from([1, 2]),
    # Not above any learning rate.
    "min_learning_rate": st.just(1e-6),
}


def value_of(stage: str, name: str) -> st.SearchStrategy[object]:
    """Return the values of an option, by the type of its default unless it is listed."""
    default = default_value(stage, name)
    if name in VALUES:
        return VALUES[name]
    if isinstance(default, float):
        return FLOATS
    is_path = "dir" in name or "path" in name or name in {"init_from", "teacher", "metrics_file"}
    return PATHS if is_path else st.integers(1, 10**9)


@st.composite
def stage_settings(draw: st.DrawFn) -> tuple[str, TrainSettings]:
    stage = draw(st.sampled_from(STAGES))
    names = draw(st.sets(st.sampled_from(sorted(stage_options(stage)))))
    needed = {"out_dir", "data_path"} | ({"init_from"} if stage != "pretrain" else set())
    values = {name: draw(value_of(stage, name)) for name in sorted(names | needed)}
    return stage, make_settings(stage, values)


@given(stage_settings(), st.sets(st.sampled_from(sorted(OPTIONS))))
def test_settings_survive_flags_and_json(
    case: tuple[str, TrainSettings], spelled: set[str]
) -> None:
    stage, settings = case
    assert from_flags(stage, to_flags(stage, settings)) == settings
    assert from_flags(stage, to_flags(stage, settings, spelled)) == settings
    assert from_json(stage, to_json(stage, settings)) == settings


def write_file(folder: Path, **changes: object) -> Path:
    settings = parse("sft", "--epochs", "3", "--seed", "5")
    content = json.loads(to_json("sft", settings))
    path = folder / "settings.json"
    path.write_text(json.dumps(content | changes))
    return path


def test_flags_take_precedence_over_the_settings_file(tmp_path: Path) -> None:
    path = str(write_file(tmp_path))
    assert parse_arguments("sft", ["--settings", path]) == parse("sft", "--epochs", "3", "--seed=5")
    for words in (["--settings", path, "--seed", "6"], ["--seed", "6", "--settings", path]):
        found = parse_arguments("sft", words)
        assert (found.epochs, found.seed) == (3, 6)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 2}, "its version is 2, expected 1"),
        ({"stage": "dpo"}, "it is for the stage 'dpo', not sft"),
        ({"settings": [1]}, "it has no settings"),
        ({"settings": {"out_dir": "o", "data_path": "d", "speed": 1}}, "unknown setting 'speed'"),
        ({"settings": {"out_dir": "o", "data_path": "d", "beta": 0.1}}, "unknown setting 'beta'"),
        ({"settings": {"out_dir": "o", "data_path": "d", "seed": "x"}}, "Expected `int`"),
        ({"settings": {"out_dir": "o", "data_path": "d", "epochs": 0}}, "epochs must be a whole"),
        ({"settings": {"out_dir": "o", "data_path": 3}}, "expected a path, got 3"),
        ({"settings": {"out_dir": "o"}}, "missing required field `data_path`"),
    ],
)
def test_invalid_settings_file_is_refused_in_one_sentence(
    tmp_path: Path, changes: dict[str, object], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_file(tmp_path, **changes)
    with pytest.raises(SystemExit) as ended:
        parse_arguments("sft", ["--settings", str(path)])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"error: --settings {path} cannot be used: " in line
    assert reason in line


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"version": NaN}'])
def test_damaged_settings_file_is_refused(content: bytes) -> None:
    with pytest.raises(ConfigError):
        from_json("sft", content)


@given(st.binary() | st.text())
def test_any_content_is_parsed_or_refused(content: str | bytes) -> None:
    with pytest.raises(ConfigError):
        from_json("sft", content)


def test_options_of_one_stage_have_their_default_elsewhere() -> None:
    settings = parse("sft")
    for name in set(OPTIONS) - set(stage_options("sft")):
        assert getattr(settings, name) == default_value("sft", name)
