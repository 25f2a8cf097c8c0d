from __future__ import annotations

from pathlib import Path

import pytest

from tinkex.errors import ConfigError
from tinkex.pipeline.config import (
    IGNORED_VARIABLES,
    PipelineConfig,
    list_ignored_variables,
    read_config,
    variable_names,
)
from tinkex.pipeline.settings_options import STAGES

DOCS = Path(__file__).parents[4] / "docs" / "run_script_options.md"


def test_defaults_without_variables() -> None:
    config = read_config(environ={})
    assert config == PipelineConfig()
    settings = config.settings()
    assert (config.out_dir, settings.save_interval) == (Path("out"), 200)
    assert (settings.keep_last_checkpoints, settings.hidden_size) == (3, 512)
    assert (config.tb_auto, config.tb_host, config.tb_port) == (True, "127.0.0.1", 6006)


def test_every_variable_sets_its_field() -> None:
    environ = {
        "OUT_DIR": "o",
        "TF_DIR": "",
        "USE_MOE": "true",
        "MODEL_HIDDEN_SIZE": "64",
        "OPTIMIZER": "muon",
        "MUON_LR": "0.05",
        "TB_AUTO": "0",
        "MINILLM_PRETRAINED_PATH": "base",
    }
    config = read_config(environ=environ)
    assert config.out_dir == Path("o")
    assert config.tf_dir is None
    settings = config.settings()
    assert settings.use_moe is True
    assert settings.hidden_size == 64
    assert (settings.optimizer, settings.muon_lr) == ("muon", 0.05)
    assert config.tb_auto is False
    assert config.pretrained_path == Path("base")


def test_empty_variable_is_unset_except_for_optional_paths() -> None:
    config = read_config(environ={"OUT_DIR": "", "SAVE_INTERVAL": "", "TF_DIR": ""})
    assert (config.out_dir, config.tf_dir) == (Path("out"), None)
    assert config.settings().save_interval == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SAVE_INTERVAL", "0"),
        ("SAVE_INTERVAL", "-1"),
        ("KEEP_LAST", "two"),
        ("USE_MOE", "maybe"),
        ("OPTIMIZER", "sgd"),
        ("MUON_LR", "fast"),
        ("MODEL_HIDDEN_SIZE", "5e2"),
    ],
)
def test_invalid_value_is_reported_with_its_variable(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be .* got '{value}'"):
        read_config(environ={name: value})


def test_smoke_test_defaults_and_overrides() -> None:
    config = read_config(is_smoke=True, environ={})
    small, usual = config.settings("r1"), PipelineConfig().settings("r1")
    assert (small.num_layers, small.hidden_size, config.vocab_size) == (3, 128, 1024)
    assert (usual.num_layers, usual.hidden_size, usual.max_steps) == (8, 512, 0)
    assert (small.epochs, small.learning_rate, small.max_steps) == (100, 3e-3, 250)
    assert (small.batch_size, small.eval_samples) == (8, 32)
    environ = {"MODEL_NUM_LAYERS": "6", "SMOKE_DPO_STEPS": "3", "SMOKE_R1_LIMIT": "5"}
    other = read_config(is_smoke=True, environ=environ)
    assert other.settings().num_layers == 6
    assert other.settings("dpo").max_steps == 3
    assert other.settings("r1").limit == 5
    assert read_config(environ=environ).settings("dpo").max_steps == 0


def test_batch_size_applies_to_smoke_tests() -> None:
    environ = {"BATCH_SIZE": "3", "SMOKE_SFT_BATCH": "5", "SMOKE_DPO_BATCH": "0"}
    config = read_config(is_smoke=True, environ=environ)
    sizes = {stage: config.settings(stage).batch_size for stage in STAGES}
    assert sizes == {"pretrain": 3, "sft": 5, "dpo": 3, "r1": 3}


def test_zero_means_the_default_of_the_trainer() -> None:
    environ = {"BATCH_SIZE": "0", "ACCUM_STEPS": "0"}
    assert read_config(environ=environ).settings() == PipelineConfig().settings()
    environ = {"SMOKE_DPO_BATCH": "0", "SMOKE_DPO_STEPS": "0", "SMOKE_DPO_EVAL_SAMPLES": "0"}
    dpo = read_config(is_smoke=True, environ=environ).settings("dpo")
    assert (dpo.batch_size, dpo.max_steps, dpo.eval_samples) == (4, 0, 64)


def test_results_path_defaults() -> None:
    assert read_config(environ={}).results_path == Path("tf_dir/eval_results.jsonl")
    assert read_config(environ={"TF_DIR": ""}).results_path == Path("out/eval_results.jsonl")
    assert read_config(environ={"RESULTS_FILE": "r.jsonl"}).results_path == Path("r.jsonl")


def test_ignored_variables_are_reported() -> None:
    assert list_ignored_variables({"QK_NORM": "1", "OUT_DIR": "o"}) == [
        f"QK_NORM has no effect: {IGNORED_VARIABLES['QK_NORM']}"
    ]


def test_every_variable_is_documented() -> None:
    page = DOCS.read_text()
    assert len(variable_names()) == len(set(variable_names())) > 4 * 4 + 30
    named = [name for name in variable_names() if not name.startswith("SMOKE_")]
    missing = [name for name in [*named, *IGNORED_VARIABLES] if f"`{name}`" not in page]
    assert missing == []
