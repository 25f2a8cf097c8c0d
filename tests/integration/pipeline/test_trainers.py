"""The trainers from the command line: four stages in a row, and error messages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration.pipeline.stage_inputs import (
    SIZE_WORDS,
    make_tokenizer,
    write_rows,
    write_samples,
)
from tinkex.pipeline.checkpoints.model_digest import digest_weights
from tinkex.pipeline.entry import main
from tinkex.pipeline.model import choose_dtype, has_bfloat16, make_config, model_sizes
from tinkex.pipeline.settings_sources import parse_arguments

ROOT = Path(__file__).parents[3]
LEGACY = {"pretrain": "pretrain_32", "sft": "full_sft_32", "dpo": "rlhf_32", "r1": "reason_32"}
PARENTS = {"sft": "pretrain", "dpo": "sft", "r1": "dpo"}
SHORT = ("--max_steps", "3", "--batch_size", "2", "--save_interval", "2", "--eval_samples", "4")
OWN = {"pretrain": "loss", "sft": "loss", "dpo": "preference_accuracy", "r1": "exact_match"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scene")
    files = write_samples(folder)
    make_tokenizer(folder / "tokenizer", list(files.values()))
    return folder


def words_of(project: Path, stage: str, out: Path, *more: str) -> list[str]:
    parent = PARENTS.get(stage)
    start = ("--init_from", str(project / "out" / parent / "hf")) if parent else ()
    return [
        *("--out_dir", str(out), "--data_path", str(project / f"{stage}.jsonl")),
        *("--tokenizer_dir", str(project / "tokenizer"), "--learning_rate", "3e-3"),
        *(*SIZE_WORDS, *SHORT, *start, *more),
    ]


@pytest.mark.parametrize("stage", LEGACY)
def test_stage_trains_from_its_parent_and_writes_all_files(
    project: Path, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = project / "out" / stage
    assert main(stage, words_of(project, stage, out)) == 0
    steps = sorted(path.name for path in (out / "checkpoints").glob("step_*"))
    assert steps == ["step_00000002", "step_00000003"]
    weights = torch.load(out / f"{LEGACY[stage]}.pth", weights_only=True)
    model = AutoModelForCausalLM.from_pretrained(out / "hf", dtype=torch.float32)
    for name, weight in model.state_dict().items():
        assert torch.equal(weights[name], weight.half())
    result = json.loads((out / "result.json").read_bytes())
    assert (result["stage"], result["steps"]) == (stage, 3)
    assert result["digest"] == digest_weights(out / "hf")
    assert next(iter(result["metrics"])) == OWN[stage]
    assert all(set(both) == {"before", "after"} for both in result["metrics"].values())
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith(f"{stage}: {OWN[stage]} ")
    assert " -> " in last
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 3


def test_interrupted_run_resumes_to_the_same_weights(project: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    words = ("--schedule", "constant", "--warmup_steps", "0")
    assert main("pretrain", words_of(project, "pretrain", whole, *words)) == 0
    first = words_of(project, "pretrain", parts, *words, "--max_steps", "1")
    assert main("pretrain", first) == 0
    again = words_of(project, "pretrain", parts, *words, "--resume", "auto")
    assert main("pretrain", again) == 0
    assert digest_weights(whole / "hf") == digest_weights(parts / "hf")


def test_moe_training_and_file_names(project: Path, tmp_path: Path) -> None:
    words = words_of(project, "pretrain", tmp_path, "--use_moe", "true", "--num_experts", "3")
    assert main("pretrain", words) == 0
    assert (tmp_path / "pretrain_32_moe.pth").is_file()
    config = json.loads((tmp_path / "hf/config.json").read_bytes())
    assert (config["model_type"], config["num_experts_per_tok"]) == ("qwen3_moe", 2)
    # The next stage uses the sizes of its parent.
    options = ("--init_from", str(tmp_path / "hf"), "--out_dir", str(tmp_path / "next"))
    assert main("sft", [*words_of(project, "sft", tmp_path), *options]) == 0
    assert (tmp_path / "next/full_sft_32_moe.pth").is_file()


def test_tokenizer_is_trained_if_none_is_given(project: Path, tmp_path: Path) -> None:
    words = ("--vocab_size", "300", "--data_path", str(project / "pretrain.jsonl"))
    assert main("pretrain", ["--out_dir", str(tmp_path), *words, *SIZE_WORDS, *SHORT]) == 0
    assert (tmp_path / "hf/tokenizer.json").is_file()


def test_eval_data_path(project: Path, tmp_path: Path) -> None:
    other = write_rows(tmp_path / "other.jsonl", [{"text": "12 plus 3 is 15."}])
    words = words_of(project, "pretrain", tmp_path / "out", "--eval_data_path", str(other))
    assert main("pretrain", words) == 0
    assert json.loads((tmp_path / "out/result.json").read_bytes())["metrics"]["loss"]["after"] > 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
        ("", "has no rows"),
        ('{"messages": []}\n', "line 1: no field 'text'"),
        ('{"text": "a b c"}\n', "none is left for training"),
    ],
)
def test_invalid_data_is_reported_with_file_and_line(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(content)
    words = words_of(project, "pretrain", tmp_path / "out", "--data_path", str(bad))
    assert main("pretrain", words) == 1
    stderr = capsys.readouterr().err
    assert stderr.startswith("Error: ")
    assert str(bad) in stderr
    assert message in stderr
    assert "Traceback" not in stderr
    assert not list((tmp_path / "out").rglob("*.pth"))
    assert not list((tmp_path / "out").rglob("*.partial*"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--tokenizer_dir", "absent"), "no tokenizer in absent"),
        (("--init_from", "absent"), "no model at absent"),
        (("--device", "cuda:77"), "device 'cuda:77' is not available"),
        (("--resume", "absent"), "absent"),
    ],
)
def test_missing_inputs_exit_with_code_1(
    project: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
    message: str,
) -> None:
    assert main("pretrain", words_of(project, "pretrain", tmp_path, *more)) == 1
    stderr = capsys.readouterr().err
    assert "Error: " in stderr
    assert message in stderr


@pytest.mark.parametrize("more", [(), ("--resume", "auto")])
@pytest.mark.parametrize(("stage", "parent"), [("sft", "pretrain"), ("dpo", "sft"), ("r1", "dpo")])
def test_later_stages_require_initial_weights(
    project: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    stage: str,
    parent: str,
    more: tuple[str, ...],
) -> None:
    data = str(project / f"{stage}.jsonl")
    with pytest.raises(SystemExit) as ended:
        main(stage, ["--out_dir", str(tmp_path), "--data_path", data, *SIZE_WORDS, *more])
    assert ended.value.code == 2
    stderr = capsys.readouterr().err
    assert f"--init_from is missing: pass a model, such as the folder out/{parent}/hf" in stderr
    assert not list(tmp_path.rglob("*.json"))


def test_missing_parent_is_reported_before_its_tokenizer(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(project / "sft.jsonl")
    words = ["--out_dir", str(tmp_path), "--data_path", data, "--init_from", "nowhere"]
    assert main("sft", words) == 1
    assert "no model at nowhere" in capsys.readouterr().err


def test_sizes_that_differ_from_the_parent_are_rejected(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("pretrain", words_of(project, "pretrain", tmp_path / "parent")) == 0
    options = ("--init_from", str(tmp_path / "parent/hf"), "--hidden_size", "64")
    assert main("sft", [*words_of(project, "sft", tmp_path / "sft"), *options]) == 1
    assert "hidden_size is 64, but the model in" in capsys.readouterr().err


def test_bfloat16_requires_hardware_support() -> None:
    cpu = torch.device("cpu")
    assert choose_dtype("auto", cpu) is torch.float32
    dtype = choose_dtype("bfloat16", cpu)
    assert dtype is (torch.bfloat16 if has_bfloat16(cpu) else torch.float32)


@pytest.mark.parametrize(
    "script", ["train_pretrain", "train_full_sft", "train_dpo", "train_distill_reason"]
)
def test_scripts_show_the_help_of_their_trainer(script: str) -> None:
    found = run_script(script, "--help")
    assert found.returncode == 0
    assert "--keep_last_checkpoints" in found.stdout
    found = run_script(script, "--epochs", "none")
    assert found.returncode == 2
    assert "expected a whole number, got 'none'" in found.stderr


def test_option_errors_do_not_import_torch() -> None:
    probe = "import sys, tinkex.pipeline.entry; print('torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "False"


def run_script(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    command: list[Any] = [sys.executable, ROOT / "trainer" / f"{script}.py", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_default_model_sizes() -> None:
    known = parse_arguments("pretrain", ["--out_dir", "o", "--data_path", "d", "--num_layers", "3"])
    config = make_config(model_sizes(known), 6400, 2, 0)
    assert (config.hidden_size, config.num_hidden_layers) == (512, 3)
    assert (config.num_attention_heads, config.num_key_value_heads) == (8, 2)
    assert config.intermediate_size == 1408
    assert config.tie_word_embeddings
