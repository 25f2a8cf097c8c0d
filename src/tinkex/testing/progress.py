"""How a model of the stub server is trained: its passes and optimizer steps, and their metrics."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from tinkex import clock


class Progress:
    """The optimizer steps of one model, each with the passes before it."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self._passes: list[Mapping[str, float]] = []
        self._began_at = 0.0
        self._step_by_seq_id: dict[int, dict[str, Any]] = {}

    def add_pass(self, metrics: Mapping[str, float]) -> None:
        """Note a pass with gradients."""
        if not self._passes:
            self._began_at = clock.now()
        self._passes.append(metrics)

    def add_metrics(self, seq_id: int, metrics: Mapping[str, float]) -> bool:
        """Add what a client reports about an optimizer step; False if there is none."""
        step = self._step_by_seq_id.get(seq_id)
        if step is None:
            return False
        step["metrics"] |= metrics
        step["loss"] = metrics.get("loss", step["loss"])
        return True

    def add_step(self, metrics: Mapping[str, float], seq_id: int | None = None) -> None:
        """Note the optimizer step that applies the passes so far."""
        passes, now = self._passes, clock.now()
        self._passes = []
        num_tokens = int(sum(told["tokens:sum"] for told in passes))
        loss = sum(told["loss:sum"] for told in passes)
        place = len(self.steps) + 1
        self.steps.append(
            {
                "step": place,
                "cursor": place,
                "loss": loss / num_tokens if num_tokens else None,
                "num_tokens": num_tokens,
                "num_passes": len(passes),
                "seconds": now - self._began_at if passes else 0.0,
                "finished_at": datetime.fromtimestamp(now, UTC),
                "metrics": dict(metrics) | ({"loss:sum": loss} if passes else {}),
            }
        )
        if seq_id is not None:
            self._step_by_seq_id[seq_id] = self.steps[-1]

    def describe(self, after: int | None, limit: int) -> dict[str, Any]:
        """The newest steps, or the first ones after a cursor, and how it stands."""
        shown = self.steps[-limit:] if after is None else self.steps[after : after + limit]
        losses = [step["loss"] for step in self.steps if step["loss"] is not None]
        recent = self.steps[-20:]
        seconds = sum(step["seconds"] for step in recent)
        speed = sum(step["num_tokens"] for step in recent) / seconds if seconds > 0 else None
        return {
            "steps": shown,
            "num_steps": len(self.steps),
            "is_whole": True,
            "loss": losses[-1] if losses else None,
            "tokens_per_second": speed,
        }
