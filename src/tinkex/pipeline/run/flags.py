"""The flags of the run script."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from tinkex.pipeline.run.stages import PRETRAIN, STAGE_ORDER

_DESCRIPTION = """\
Train a language model from nothing: tokenizer, pretrain, SFT, DPO and, if asked, reasoning (R1).
Run it again after an interruption, and it goes on where it stopped; a stage that is done is
skipped. Settings are variables: OUT_DIR, PRETRAIN_JSON, MODEL_HIDDEN_SIZE, SAVE_INTERVAL,
KEEP_LAST, TB_AUTO and more, which docs/run_script_options.md explains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFlags:
    """What a run was asked to do."""

    smoke_test: bool = False
    """A small model, few steps, all stages: does everything work?"""
    skip_pretrain: bool = False
    """Start SFT from what there is."""
    run_r1: bool = False
    """Train the reasoning stage too."""
    restart_from: str | None = None
    """Throw away this stage and all later ones, and train them again."""


def parse_flags(argv: Sequence[str] | None = None) -> RunFlags:
    """Read a command line; ends the process with 2 if it makes no sense."""
    found = _parser().parse_args(argv)
    restart = found.restart_from or (PRETRAIN.name if found.force_pretrain else None)
    if found.skip_pretrain and restart == PRETRAIN.name:
        _parser().error("--skip-pretrain and training pretrain again contradict each other")
    return RunFlags(
        smoke_test=found.smoke_test,
        skip_pretrain=found.skip_pretrain,
        run_r1=found.run_r1,
        restart_from=restart,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="run.sh",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--smoke-test", action="store_true", help="a small model and few steps")
    parser.add_argument("--run-r1", action="store_true", help="train the reasoning stage too")
    parser.add_argument(
        "--skip-pretrain",
        action="store_true",
        help="start SFT from PRETRAINED_PATH, or from the pretrain that is in OUT_DIR",
    )
    parser.add_argument(
        "--force-pretrain",
        action="store_true",
        help="train pretrain again; the same as --restart-from pretrain",
    )
    parser.add_argument(
        "--restart-from",
        choices=[stage.name for stage in STAGE_ORDER],
        metavar="STAGE",
        help="throw away STAGE and all later ones, and train them again: "
        + ", ".join(stage.name for stage in STAGE_ORDER),
    )
    return parser
