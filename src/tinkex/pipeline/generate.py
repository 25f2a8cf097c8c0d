"""Generate text with a trained model folder through transformers.

python -m tinkex.pipeline.generate out/r1/hf --prompt "What is 7 plus 5?"
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
from transformers.utils import logging as transformers_log

from tinkex.errors import ConfigError
from tinkex.pipeline.entry import run_program
from tinkex.pipeline.model import choose_device


def generate(folder: Path, args: argparse.Namespace) -> None:
    """Stream the answer to stdout."""
    if not folder.is_dir():
        raise ConfigError("the folder does not exist")
    transformers_log.disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model.to(choose_device(args.device))
    messages = [{"role": "user", "content": args.prompt}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    torch.manual_seed(args.seed)
    sampling: dict[str, Any] = {"do_sample": args.temperature > 0}
    if sampling["do_sample"]:
        sampling |= {"temperature": args.temperature, "top_p": args.top_p}
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    model.generate(
        **inputs.to(model.device),
        **sampling,
        max_new_tokens=args.max_new_tokens,
        streamer=streamer,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Generate; returns the exit code: 0, 1 after an error, 130 or 143 after a signal."""
    args = _parser().parse_args(argv)
    return run_program(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    try:
        generate(args.folder, args)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"cannot generate with {args.folder}: {reason}") from error
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Generate text with a model.", allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="Hugging Face folder")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max_new_tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.7, help="0: greedy")
    parser.add_argument("--top_p", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--device", default="auto")
    return parser


if __name__ == "__main__":
    sys.exit(main())
