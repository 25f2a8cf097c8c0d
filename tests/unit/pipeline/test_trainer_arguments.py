"""The command line of the trainers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tinkex.pipeline.trainer_arguments import (
    STAGE_DESCRIPTIONS,
    TrainerArguments,
    make_parser,
    option_names,
    parse_arguments,
)

NEEDED = ("--out_dir", "out", "--data_path", "data.jsonl")


def parse(stage: str, *words: str) -> TrainerArguments:
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
    assert expected <= option_names(stage)
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
        found = own & option_names(other)
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
    assert all(f"--{name}" in text for name in option_names("r1"))
    assert "<think>,</think>" in text
    assert "None" not in text


def test_parsing_options_does_not_import_torch() -> None:
    probe = "import sys, tinkex.pipeline.trainer_arguments; print('torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "False"
