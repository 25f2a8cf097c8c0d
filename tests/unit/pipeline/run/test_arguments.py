from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.errors import ConfigError
from tinkex.pipeline.config import STAGES, PipelineConfig, read_config
from tinkex.pipeline.run.stage_specs import DPO, PRETRAIN, SFT, STAGES_BY_NAME
from tinkex.pipeline.run.trainer_commands import (
    check_options,
    describe_changes,
    parse_extra_options,
    result_config,
    to_argv,
    trainer_options,
    with_resume_options,
)
from tinkex.pipeline.trainer_arguments import STAGE_DEFAULTS, make_parser

DATA, TOKENIZER, PARENT = Path("d.jsonl"), Path("tok"), Path("parent/hf")


@pytest.mark.parametrize("name", STAGES)
def test_every_trainer_accepts_the_generated_options(name: str) -> None:
    environ = {"USE_MOE": "true", "OPTIMIZER": "muon", "BATCH_SIZE": "3", "ACCUM_STEPS": "2"}
    config = read_config(is_smoke=True, environ=environ)
    parent = None if name == "pretrain" else PARENT
    arguments = trainer_options(STAGES_BY_NAME[name], config, DATA, TOKENIZER, parent)
    check_options(STAGES_BY_NAME[name], arguments)
    words = to_argv(with_resume_options(arguments, Path("out/x/checkpoints/step_00000002")))
    found = make_parser(name).parse_args(words)
    assert found.out_dir == Path("out") / name
    assert found.resume == "out/x/checkpoints/step_00000002"
    assert found.ckpt_dir == Path("out/x/checkpoints")
    assert found.save_interval == 200
    assert found.keep_last_checkpoints == 3
    assert found.accumulation_steps == 2


def test_moe_options_reach_the_pretrain_trainer() -> None:
    config = read_config(environ={"USE_MOE": "true", "NUM_EXPERTS": "6"})
    words = to_argv(trainer_options(PRETRAIN, config, DATA, TOKENIZER, None))
    found = make_parser("pretrain").parse_args(words)
    assert (found.use_moe, found.num_experts) == (True, 6)
    plain = to_argv(trainer_options(PRETRAIN, PipelineConfig(), DATA, TOKENIZER, None))
    assert make_parser("pretrain").parse_args(plain).use_moe is False


def test_model_sizes_are_passed_only_without_a_model_folder() -> None:
    config = PipelineConfig(hidden_size=64)
    assert "hidden_size" not in trainer_options(SFT, config, DATA, TOKENIZER, PARENT)
    legacy = trainer_options(SFT, config, DATA, TOKENIZER, Path("pretrain_64.pth"))
    assert legacy["hidden_size"] == ("64",)


@pytest.mark.parametrize(("rate", "pretrain", "dpo"), [("", 0.02, 0.0002), ("0.05", 0.05, 0.0005)])
def test_muon_rate_scales_down_like_the_adamw_rate(rate: str, pretrain: float, dpo: float) -> None:
    config = read_config(environ={"OPTIMIZER": "muon", "MUON_LR": rate})
    rates = {}
    for name in STAGES:
        words = to_argv(trainer_options(STAGES_BY_NAME[name], config, DATA, TOKENIZER, PARENT))
        rates[name] = make_parser(name).parse_args(words).muon_lr
    assert (rates["pretrain"], rates["dpo"]) == pytest.approx((pretrain, dpo))
    adamw = {
        name: float(str(defaults["learning_rate"])) for name, defaults in STAGE_DEFAULTS.items()
    }
    for name in STAGES:
        share = rates[name] / rates["pretrain"]
        assert 0.8 < share / (adamw[name] / adamw["pretrain"]) < 1.25


def test_explicit_muon_rate_is_not_scaled() -> None:
    config = PipelineConfig(optimizer="muon", muon_lr="0.05", dpo_args="--muon_lr 0.001")
    assert trainer_options(DPO, config, DATA, TOKENIZER, PARENT)["muon_lr"] == ("0.001",)
    plain = PipelineConfig(muon_lr="0.05")
    assert "muon_lr" not in trainer_options(DPO, plain, DATA, TOKENIZER, PARENT)


def test_extra_options_take_precedence() -> None:
    config = PipelineConfig(dpo_args="--seed=5 --beta 0.3 --allow_partial")
    arguments = trainer_options(DPO, config, DATA, TOKENIZER, PARENT)
    found = make_parser("dpo").parse_args(to_argv(arguments))
    assert (found.seed, found.beta, found.allow_partial) == (5, 0.3, True)
    assert to_argv(arguments).count("--seed") == 1


@given(st.lists(st.text(min_size=1).filter(lambda word: not word.startswith("--")), max_size=3))
def test_quoted_words_stay_together(words: list[str]) -> None:
    assert parse_extra_options("SFT_ARGS", shlex.join(["--name", *words])) == {"name": tuple(words)}


@given(st.text())
def test_any_text_is_parsed_or_rejected_with_a_message(text: str) -> None:
    try:
        parse_extra_options("SFT_ARGS", text)
    except ConfigError as error:
        assert "SFT_ARGS" in error.message


@pytest.mark.parametrize("text", ["epochs 3", "--out_dir x", "--resume=y", "--epochs 'three"])
def test_invalid_extra_options_are_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="PRETRAIN_ARGS"):
        parse_extra_options("PRETRAIN_ARGS", text)


def test_value_that_starts_with_a_dash() -> None:
    assert to_argv({"seed": ("-1",), "allow_partial": (), "out_dir": ("a b",)}) == [
        "--seed=-1",
        "--allow_partial",
        "--out_dir",
        "a b",
    ]


def test_incidental_options_are_not_compared() -> None:
    config = PipelineConfig()
    one = result_config(trainer_options(SFT, config, DATA, TOKENIZER, PARENT), "f00")
    other = PipelineConfig(
        out_dir=Path("elsewhere"), save_interval=7, keep_last=9, device="cpu", tf_dir=None
    )
    two = result_config(trainer_options(SFT, other, Path("moved.jsonl"), TOKENIZER, PARENT), "f00")
    assert describe_changes(one, two) == []


def recipe(text: str) -> dict[str, str]:
    config = PipelineConfig(dpo_args=text)
    return result_config(trainer_options(DPO, config, DATA, TOKENIZER, PARENT), "f00")


@pytest.mark.parametrize(
    "text", ["--eval_samples 9", "--eval_data_path other.jsonl", "--ref_path other", "--beta 0.2"]
)
def test_options_that_affect_the_weights_are_compared(text: str) -> None:
    """The number of held-out rows matters, because they are not trained on."""
    assert describe_changes(recipe(""), recipe(text))


@pytest.mark.parametrize("text", ["--allow_partial", "--eval_interval 3", "--log_interval 7"])
def test_resume_and_logging_options_are_not_compared(text: str) -> None:
    assert not describe_changes(recipe(""), recipe(text))


def test_describe_changes_lists_each_field() -> None:
    then = {"seed": "1", "data": "a" * 64, "gone": "x"}
    now = {"seed": "2", "data": "b" * 64, "new": "y"}
    assert describe_changes(then, now) == [
        "seed: 1 -> 2",
        "data: aaaaaaaaaaaa... -> bbbbbbbbbbbb...",
        "gone: x -> (not given)",
        "new: (not given) -> y",
    ]


PATHS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).map(Path)


@given(
    out_dir=PATHS,
    data=PATHS,
    numbers=st.tuples(*[st.integers(1, 10**6)] * 5),
    decay=st.floats(0.0, 1.0),
    is_moe=st.booleans(),
)
def test_trainer_options_survive_the_command_line(
    out_dir: Path, data: Path, numbers: tuple[int, ...], decay: float, is_moe: bool
) -> None:
    hidden, layers, seed, interval, keep = numbers
    config = PipelineConfig(
        out_dir=out_dir,
        hidden_size=hidden,
        num_layers=layers,
        seed=seed,
        save_interval=interval,
        keep_last=keep,
        weight_decay=repr(decay),
        use_moe=is_moe,
    )
    words = to_argv(trainer_options(PRETRAIN, config, data, TOKENIZER, None))
    assert shlex.split(shlex.join(words)) == words
    args = make_parser("pretrain").parse_args(words)
    assert (args.out_dir, args.data_path) == (out_dir / "pretrain", data)
    sizes = (args.hidden_size, args.num_layers, args.seed)
    assert sizes == (hidden, layers, seed)
    assert (args.save_interval, args.keep_last_checkpoints) == (interval, keep)
    assert (args.weight_decay, args.use_moe) == (decay, is_moe)
