from __future__ import annotations

import os
from pathlib import Path

import pytest

from tinkex.errors import CheckpointError, ConfigError
from tinkex.pipeline.checkpoints.model_digest import digest_weights
from tinkex.pipeline.output_locks import find_holder, lock_directory, lock_output_dir
from tinkex.pipeline.run.report import plain_table, stage_failed
from tinkex.pipeline.run.stage_files import link_legacy, remove_stages
from tinkex.pipeline.run.stage_records import (
    combine_digests,
    fingerprint_file,
    read_record,
    read_result,
)
from tinkex.pipeline.run.stage_specs import PRETRAIN, STAGE_ORDER, select_stages, stages_from


def test_unchanged_data_file_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("one")
    first = fingerprint_file(path)
    times = path.stat()
    path.write_text("two")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    # With the same size and time, the file is not read again.
    assert fingerprint_file(path, [first]) == first
    os.utime(path, ns=(1, 1))
    assert fingerprint_file(path, [first]).sha256 != first.sha256


def test_combined_digest_depends_on_file_order(tmp_path: Path) -> None:
    files = []
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
        files.append(fingerprint_file(tmp_path / name))
    assert combine_digests(files) != combine_digests(files[::-1])
    assert combine_digests(files[:1]) == files[0].sha256


def test_folder_digest_depends_on_weights_and_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a model"):
        digest_weights(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("w1")
    first = digest_weights(tmp_path)
    (tmp_path / "README.md").write_text("words")
    assert digest_weights(tmp_path) == first
    (tmp_path / "model.safetensors").write_text("w2")
    assert digest_weights(tmp_path) != first


def test_link_replaces_an_existing_file(tmp_path: Path) -> None:
    (tmp_path / "pretrain").mkdir()
    (tmp_path / "pretrain" / "pretrain_64.pth").write_text("new")
    (tmp_path / "pretrain_64.pth").symlink_to("out/pretrain/pretrain_64.pth")
    assert link_legacy(PRETRAIN, tmp_path) == [tmp_path / "pretrain_64.pth"]
    assert (tmp_path / "pretrain_64.pth").read_text() == "new"
    assert str((tmp_path / "pretrain_64.pth").readlink()) == "pretrain/pretrain_64.pth"


def test_output_dir_has_one_lock_holder(tmp_path: Path) -> None:
    assert find_holder(tmp_path) is None
    with lock_output_dir(tmp_path) as lock:
        lock.write_holder("sft", None)
        holder = find_holder(tmp_path)
        assert holder is not None
        assert (holder.pid, holder.stage) == (os.getpid(), "sft")
        with pytest.raises(ConfigError, match="training sft"), lock_output_dir(tmp_path):
            pass
    assert find_holder(tmp_path) is None
    with lock_output_dir(tmp_path):
        pass


@pytest.mark.parametrize("read", [read_record, read_result])
def test_unreadable_record_is_reported(tmp_path: Path, read: object) -> None:
    assert callable(read)
    assert read(tmp_path) is None
    for name in ("stage.json", "result.json"):
        (tmp_path / name).write_text('{"stage": ')
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        read(tmp_path)


def test_remove_stages_leaves_other_files(tmp_path: Path) -> None:
    for stage in STAGE_ORDER:
        (tmp_path / stage.name).mkdir()
    (tmp_path / ".partial-left").mkdir()
    (tmp_path / "notes.txt").touch()
    assert remove_stages(stages_from("sft"), tmp_path) == ["sft", "dpo", "r1"]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"notes.txt", "pretrain", "tokenizer"}


def test_locked_stage_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "sft").mkdir()
    with (
        lock_directory(tmp_path / "sft"),
        pytest.raises(ConfigError, match="in use by another trainer"),
    ):
        remove_stages(stages_from("sft"), tmp_path)
    assert (tmp_path / "sft").is_dir()
    assert remove_stages(stages_from("sft"), tmp_path) == ["sft"]


def test_select_stages() -> None:
    def names(**flags: bool) -> list[str]:
        defaults = {"run_r1": False, "skip_pretrain": False}
        return [stage.name for stage in select_stages(**(defaults | flags))]

    assert names() == ["tokenizer", "pretrain", "sft", "dpo"]
    assert names(run_r1=True)[-1] == "r1"
    assert names(skip_pretrain=True, skip_tokenizer=True) == ["sft", "dpo"]
    with pytest.raises(ConfigError, match="unknown stage 'rl'"):
        stages_from("rl")


def test_table_numbers_are_aligned() -> None:
    rows = [("a", "", "", "1", "2", "", "", ""), ("bbb", "", "", "100", "2", "", "", "")]
    first, second = (line.split() for line in plain_table(rows).splitlines())
    assert (first, second) == (["a", "1", "2"], ["bbb", "100", "2"])
    ends = [line.rindex("  ") for line in plain_table(rows).splitlines()]
    assert ends[0] == ends[1]


@pytest.mark.parametrize(("code", "signal_name"), [(137, "SIGKILL"), (139, "SIGSEGV")])
def test_killed_trainer_is_reported_by_signal(code: int, signal_name: str) -> None:
    found = stage_failed("sft", 40, code)
    assert f"sft failed: its trainer was killed by {signal_name}" in found.message
    assert "lower BATCH_SIZE" in str(found.hint)
    assert "resumes from step 40" in str(found.hint)
    assert found.exit_code == 1
    message = stage_failed("sft", 40, 255).message
    assert "exited with code 255; its output is above" in message
