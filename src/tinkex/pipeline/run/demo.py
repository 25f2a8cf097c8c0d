"""The last word of a run: the model that has learned to reason is asked something."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tinkex.pipeline.config import PipelineConfig
from tinkex.pipeline.run import ended
from tinkex.pipeline.run.child import run_child
from tinkex.pipeline.run.decisions import StageAction
from tinkex.pipeline.run.one_stage import StageContext
from tinkex.pipeline.run.report import StageOutcome
from tinkex.pipeline.run.stages import R1


def run_demo(outcomes: Sequence[StageOutcome], context: StageContext) -> None:
    """Ask what R1 has just made; that it cannot be asked is told, and is no failure of the run."""
    config, voice = context.plan.config, context.output
    is_new = any(one.stage == R1.name and one.action is not StageAction.SKIP for one in outcomes)
    if not (is_new and config.r1_demo):
        return
    voice.write_line(f"asked: {config.r1_demo_prompt}", R1.name)
    code = run_child(_demo_command(config), context.signals, context.lock, voice, stage=R1.name)
    if context.signals.received is not None:
        raise ended.interrupted_after_training(context.signals.received)
    if code:
        voice.write_line("the model could not be asked; its training is complete", R1.name)


def _demo_command(config: PipelineConfig) -> list[str]:
    told = {
        "--prompt": config.r1_demo_prompt,
        "--max_new_tokens": config.r1_demo_max_new_tokens,
        "--temperature": config.r1_demo_temperature,
        "--top_p": config.r1_demo_top_p,
        "--seed": config.r1_demo_seed,
        "--device": config.r1_demo_device or config.device,
    }
    # One word each: a prompt may begin with a dash.
    options = [f"{name}={value}" for name, value in told.items()]
    folder = str(R1.model_dir(config.out_dir))
    return [sys.executable, "-m", "tinkex.pipeline.speaking", folder, *options]
