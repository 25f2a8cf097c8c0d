from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from tinkex.pipeline.run.stage_records import StageAction, StageRecord, StageStatus, hash_config
from tinkex.pipeline.run.stage_runner import RequestedInputs, StageOnDisk, decide

CONFIG = {"seed": "1", "data": "d"}
STEP = Path("checkpoints/step_00000002")
RECORD = StageRecord(
    stage="sft",
    status=StageStatus.COMPLETE,
    config=CONFIG,
    config_hash=hash_config(CONFIG),
    parent="pretrain",
    parent_digest="p1",
)
WANTED = RequestedInputs(config=CONFIG, parent="pretrain", parent_digest="p1")


def found(
    record: StageRecord | None = RECORD, step: Path | None = STEP, digest: str | None = "r"
) -> StageOnDisk:
    return StageOnDisk(record=record, step_dir=step, digest=digest)


def test_missing_stage_is_started() -> None:
    assert decide(found(None, None, None), WANTED).action is StageAction.START


def test_complete_unchanged_stage_is_skipped() -> None:
    assert decide(found(), WANTED).action is StageAction.SKIP


@pytest.mark.parametrize(
    "status", [StageStatus.RUNNING, StageStatus.FAILED, StageStatus.INTERRUPTED]
)
def test_partial_stage_is_resumed(status: StageStatus) -> None:
    record = replace(RECORD, status=status)
    assert decide(found(record, digest=None), WANTED).action is StageAction.RESUME


def test_failed_stage_without_checkpoint_is_started() -> None:
    record = replace(RECORD, status=StageStatus.FAILED, config={"seed": "9"})
    assert decide(found(record, None, None), WANTED).action is StageAction.START


def test_complete_stage_without_result_is_resumed() -> None:
    assert decide(found(digest=None), WANTED).action is StageAction.RESUME


def test_checkpoints_without_a_record_are_resumed() -> None:
    assert decide(found(None, digest=None), WANTED).action is StageAction.RESUME


@pytest.mark.parametrize("status", list(StageStatus))
def test_changed_configuration_stops_the_run(status: StageStatus) -> None:
    record = replace(RECORD, status=status, config={"seed": "0", "data": "d"})
    decision = decide(found(record), WANTED)
    assert decision.action is StageAction.STOP
    assert decision.changes == ("seed: 0 -> 1",)


def test_retrained_parent_stops_the_run() -> None:
    decision = decide(
        found(), RequestedInputs(config=CONFIG, parent="pretrain", parent_digest="p2")
    )
    assert decision.action is StageAction.STOP
    assert decision.changes == ("parent: pretrain was retrained (p1 -> p2)",)


def test_different_parent_stops_the_run() -> None:
    decision = decide(found(), RequestedInputs(config=CONFIG, parent="base", parent_digest="p2"))
    assert decision.changes == ("parent: pretrain -> base",)


def test_config_hash_is_independent_of_field_order() -> None:
    assert hash_config({"a": "1", "b": "2"}) == hash_config({"b": "2", "a": "1"})
    assert hash_config({"a": "1"}) != hash_config({"a": "2"})
