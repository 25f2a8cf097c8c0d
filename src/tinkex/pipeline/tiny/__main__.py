"""`python -m tinkex.pipeline.tiny`: train tinkex/tiny from scratch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tinkex.display import format_bytes
from tinkex.errors import TinkexError
from tinkex.logs import attach_logger
from tinkex.models import TINY_FOLDER
from tinkex.pipeline.run.report import RunOutput
from tinkex.pipeline.tiny.package import ModelCardMetrics, write_package
from tinkex.pipeline.tiny.recipe import FULL, QUICK, SEED, held_out_tasks, train


def main(argv: Sequence[str] | None = None) -> int:
    """Train and evaluate; returns 0, 1 (error), 2 (wrong option), 130 or 143 (signal)."""
    args = _parser().parse_args(argv)
    attach_logger("warning")
    amounts = QUICK if args.quick else FULL
    output = RunOutput(sys.stdout)
    try:
        trained = train(args.work, amounts, output)
        tasks = held_out_tasks(SEED, amounts.num_held_out)
        metrics = write_package(trained, args.out, tasks, sum(amounts.num_steps.values()))
    except TinkexError as error:
        sys.stdout.flush()
        sys.stderr.write(f"Error: {error.message}\n")
        if error.hint:
            sys.stderr.write(f"{error.hint}\n")
        return int(getattr(error, "exit_code", 1))
    except KeyboardInterrupt:
        return 130
    _print_metrics(metrics, args.out)
    return 0


def _print_metrics(metrics: ModelCardMetrics, out: Path) -> None:
    for family, share in metrics.shares.items():
        sys.stdout.write(f"{family:9} {100 * share:4.0f} % of {metrics.num_tasks[family]}\n")
    size = format_bytes(sum(path.stat().st_size for path in out.iterdir()))
    sys.stdout.write(f"{metrics.num_parameters:,} parameters, {size}, in {out}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make_tiny.sh",
        description="Generate the data of tinkex/tiny, train it and write its model card. Run it "
        "again after an interruption to resume.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--work", type=Path, default=Path("out/tiny"), help="directory for data and stages"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=TINY_FOLDER,
        help="output model folder (default: the one in the package)",
    )
    parser.add_argument("--quick", action="store_true", help="only a few steps, as a test")
    return parser


if __name__ == "__main__":
    sys.exit(main())
