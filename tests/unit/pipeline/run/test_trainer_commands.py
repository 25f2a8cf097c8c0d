from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.errors import ConfigError
from tinkex.pipeline.config import PipelineConfig, read_config
from tinkex.pipeline.run.stage_specs import DPO, PRETRAIN, SFT, STAGES_BY_NAME, StageSpec
from tinkex.pipeline.run.trainer_commands import (
    describe_changes,
    result_config,
    settings_command,
    stage_settings,
    train_command,
)
from tinkex.pipeline.settings_options import STAGES
from tinkex.pipeline.settings_sources import (
    STAGE_DEFAULTS,
    from_flags,
    parse_extra_flags,
    to_flags,
)
from tinkex.pipeline.train_settings import TrainSettings

DATA, TOKENIZER, PARENT = Path("d.jsonl"), Path("tok"), Path("parent/hf")


def settings_of(stage: StageSpec, config: PipelineConfig, **changes: Path) -> TrainSettings:
    parent = changes.get("parent", None if stage is PRETRAIN else PARENT)
    return stage_settings(stage, config, changes.get("data", DATA), TOKENIZER, parent)


@pytest.mark.parametrize("name", STAGES)
def test_every_trainer_accepts_the_flags_of_a_run(name: str) -> None:
    environ = {"USE_MOE": "true", "OPTIMIZER": "muon", "BATCH_SIZE": "3", "ACCUM_STEPS": "2"}
    config = read_config(is_smoke=True, environ=environ)
    step = Path("out/x/checkpoints/step_00000002")
    settings = replace(
        settings_of(STAGES_BY_NAME[name], config), resume=str(step), ckpt_dir=step.parent
    )
    found = from_flags(name, to_flags(name, settings))
    assert found == settings
    assert found.out_dir == Path("out") / name
    assert found.tensorboard_dir == Path("tf_dir") / name
    assert (found.batch_size, found.accumulation_steps) == (3, 2)
    assert (found.save_interval, found.keep_last_checkpoints) == (200, 3)


def test_moe_options_reach_the_pretrain_trainer() -> None:
    config = read_config(environ={"USE_MOE": "true", "NUM_EXPERTS": "6"})
    found = settings_of(PRETRAIN, config)
    assert (found.use_moe, found.num_experts) == (True, 6)
    plain = settings_of(PRETRAIN, read_config(environ={"NUM_EXPERTS": "6"}))
    assert (plain.use_moe, plain.num_experts) == (False, 4)


def test_model_sizes_are_passed_only_without_a_model_folder() -> None:
    config = read_config(environ={"MODEL_HIDDEN_SIZE": "64", "USE_MOE": "1"})
    folder = settings_of(SFT, config)
    assert (folder.hidden_size, folder.num_layers, folder.use_moe) == (None, None, False)
    legacy = settings_of(SFT, config, parent=Path("pretrain_64.pth"))
    assert (legacy.hidden_size, legacy.num_layers, legacy.use_moe) == (64, 8, True)


def test_explicit_size_is_compared_with_the_model_folder() -> None:
    assert settings_of(SFT, PipelineConfig(sft_args="--hidden_size 64")).hidden_size == 64


@pytest.mark.parametrize(("rate", "pretrain", "dpo"), [("", 0.02, 0.0002), ("0.05", 0.05, 0.0005)])
def test_muon_rate_scales_down_like_the_adamw_rate(rate: str, pretrain: float, dpo: float) -> None:
    config = read_config(environ={"OPTIMIZER": "muon", "MUON_LR": rate})
    rates = {name: settings_of(STAGES_BY_NAME[name], config).muon_lr for name in STAGES}
    assert (rates["pretrain"], rates["dpo"]) == pytest.approx((pretrain, dpo))
    adamw = {name: defaults["learning_rate"] for name, defaults in STAGE_DEFAULTS.items()}
    for name in STAGES:
        share = rates[name] / rates["pretrain"]
        assert 0.8 < share / (adamw[name] / adamw["pretrain"]) < 1.25


def test_explicit_muon_rate_is_not_scaled() -> None:
    training = {"optimizer": "muon", "muon_lr": 0.05}
    config = PipelineConfig(training=training, dpo_args="--muon_lr 0.001")
    assert settings_of(DPO, config).muon_lr == 0.001
    own = PipelineConfig(training=training, stage_training={"dpo": {"muon_lr": 0.002}})
    assert settings_of(DPO, own).muon_lr == 0.002
    plain = PipelineConfig(training={"muon_lr": 0.05})
    assert settings_of(DPO, plain).muon_lr == STAGE_DEFAULTS["dpo"]["muon_lr"]


def test_extra_options_take_precedence() -> None:
    config = PipelineConfig(dpo_args="--seed=5 --beta 0.3 --allow-partial")
    found = settings_of(DPO, config)
    assert (found.seed, found.beta, found.allow_partial) == (5, 0.3, True)


@given(st.lists(st.text(min_size=1).filter(lambda word: not word.startswith("-")), max_size=3))
def test_quoted_words_stay_together(words: list[str]) -> None:
    text = shlex.join(["--metrics_file", *words])
    assert parse_extra_flags("sft", text) == ["--metrics_file", *words]


@given(st.text())
def test_any_text_is_parsed_or_rejected_with_a_message(text: str) -> None:
    try:
        parse_extra_flags("sft", text)
    except ConfigError as error:
        assert "SFT_ARGS" in error.message


@pytest.mark.parametrize("text", ["epochs 3", "--out_dir x", "--resume=y", "--epochs 'three"])
def test_invalid_extra_options_are_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="PRETRAIN_ARGS"):
        parse_extra_flags("pretrain", text)


@pytest.mark.parametrize("text", ["--epochs 1 2", "--epochs", "--allow_partial yes", "--seed -1"])
def test_wrong_number_of_values_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="invalid options for the sft trainer: "):
        settings_of(SFT, PipelineConfig(sft_args=text))


def test_value_that_starts_with_a_dash() -> None:
    assert parse_extra_flags("sft", "--seed -1 --allow_partial --metrics_file 'a b'") == [
        "--seed=-1",
        "--allow_partial",
        "--metrics_file",
        "a b",
    ]


def test_own_trainers_read_the_settings_file_and_others_flags(tmp_path: Path) -> None:
    config = PipelineConfig(nproc=2)
    command = settings_command(SFT, config)
    assert command[1:4] == ["-m", "tinkex.pipeline.run.ranks", "--nproc_per_node=2"]
    module = ["-m", "tinkex.pipeline.run.trainer", "sft"]
    assert command[4:] == [*module, "--settings", "out/sft/settings.json"]
    (tmp_path / SFT.trainer).touch()
    flags = train_command(SFT, settings_of(SFT, config), PipelineConfig(trainer_dir=tmp_path))
    assert flags[1] == str(tmp_path / SFT.trainer)
    assert from_flags("sft", flags[2:]) == settings_of(SFT, config)


def test_given_defaults_reach_scripts_with_other_defaults(tmp_path: Path) -> None:
    (tmp_path / SFT.trainer).touch()

    def flags(**environ: str) -> list[str]:
        config = read_config(environ={"TRAINER_DIR": str(tmp_path), **environ})
        return train_command(SFT, settings_of(SFT, config), config)

    given = " ".join(flags(BATCH_SIZE="8", SFT_ARGS="--epochs 1"))
    assert "--batch_size 8" in given and "--epochs 1" in given
    assert "--seed 1337" in given and "--save_interval 200" in given
    assert not {"--batch_size", "--epochs", "--muon_lr", "--use_moe"} & set(flags())
    assert "--muon_lr" in flags(OPTIMIZER="muon")


def test_incidental_options_are_not_compared() -> None:
    config = PipelineConfig()
    one = result_config(SFT, settings_of(SFT, config), config, "f00")
    other = PipelineConfig(
        out_dir=Path("elsewhere"),
        tf_dir=None,
        training={"save_interval": 7, "keep_last_checkpoints": 9, "device": "cpu"},
    )
    two = result_config(SFT, settings_of(SFT, other, data=Path("moved.jsonl")), other, "f00")
    assert one == two


def recipe(text: str) -> dict[str, str]:
    config = PipelineConfig(dpo_args=text)
    return result_config(DPO, settings_of(DPO, config), config, "f00")


@pytest.mark.parametrize(
    "text", ["--eval_samples 9", "--eval_data_path other.jsonl", "--ref_path other", "--beta 0.2"]
)
def test_options_that_affect_the_weights_are_compared(text: str) -> None:
    """The number of held-out rows matters, because they are not trained on."""
    assert describe_changes("dpo", recipe(""), recipe(text))


@pytest.mark.parametrize("text", ["--allow_partial", "--eval_interval 3", "--log_interval 7"])
def test_resume_and_logging_options_are_not_compared(text: str) -> None:
    assert not describe_changes("dpo", recipe(""), recipe(text))


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ({"learning_rate": "3e-3"}, {"learning_rate": "0.003"}),
        ({"epochs": "1", "use_moe": "false"}, {}),
        ({}, {"muon_lr": "0.0002"}),
    ],
)
def test_spelling_and_explicit_defaults_are_not_changes(
    then: dict[str, str], now: dict[str, str]
) -> None:
    assert describe_changes("dpo", then, now) == []


def test_describe_changes_lists_each_field() -> None:
    then = {"seed": "1", "data": "a" * 64, "gone": "x"}
    now = {"seed": "2", "data": "b" * 64, "new": "y"}
    assert describe_changes("sft", then, now) == [
        "seed: 1 -> 2",
        "data: aaaaaaaaaaaa... -> bbbbbbbbbbbb...",
        "gone: x -> (not given)",
        "new: (not given) -> y",
    ]
