"""Ask a finished model something, as whoever uses its folder would.

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
from tinkex.pipeline.stage_setup import choose_device


def generate(folder: Path, args: argparse.Namespace) -> None:
    """Write the answer to stdout, word by word."""
    if not folder.is_dir():
        raise ConfigError("there is no such folder")
    transformers_log.disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model.to(choose_device(args.device))
    told = [{"role": "user", "content": args.prompt}]
    asked = tokenizer.apply_chat_template(
        told, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    torch.manual_seed(args.seed)
    choice: dict[str, Any] = {"do_sample": args.temperature > 0}
    if choice["do_sample"]:
        choice |= {"temperature": args.temperature, "top_p": args.top_p}
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    model.generate(
        **asked.to(model.device),
        **choice,
        max_new_tokens=args.max_new_tokens,
        streamer=streamer,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Ask; the exit code is 0, 1 with a sentence, 130 or 143 after a signal."""
    known = _parser().parse_args(argv)
    return run_program(lambda: _run(known))


def _run(args: argparse.Namespace) -> int:
    try:
        generate(args.folder, args)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{args.folder} cannot be asked: {reason}") from error
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Ask a model something.", allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="a Hugging Face folder")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max_new_tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy")
    parser.add_argument("--top_p", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--device", default="auto")
    return parser


if __name__ == "__main__":
    sys.exit(main())
