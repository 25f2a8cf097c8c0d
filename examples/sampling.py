"""Sample from a base model: greedy and random, many prompts at once, with log-probabilities.

    python examples/sampling.py                                       # a server inside this process
    python examples/sampling.py --base-url https://host --api-key tml-... --base-model NAME

No training: the result depends on the prompt and the parameters only.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import tinkex
from tinkex import ModelInput, SamplingParams
from tinkex.testing import StubServer, ToyTokenizer


def main() -> int:
    options = parse_options()
    with connect(options) as service:
        sampler = service.create_sampling_client(base_model=options.base_model).result()
        tokenizer = sampler.get_tokenizer()
        prompt = ModelInput.from_text(options.prompt, tokenizer)
        show_kinds(sampler, tokenizer, prompt)
        show_scores(sampler, tokenizer, prompt)
        sample_many(sampler, tokenizer, options.num_prompts)
    return 0


def show_kinds(sampler: tinkex.SamplingClient, tokenizer: Any, prompt: ModelInput) -> None:
    """Sample one prompt with different parameters, concurrently."""
    kinds = {
        "greedy": SamplingParams(max_tokens=24, temperature=0.0),
        "random": SamplingParams(max_tokens=24, temperature=1.0, seed=1),
        "careful": SamplingParams(max_tokens=24, temperature=0.7, top_p=0.9, top_k=40, seed=1),
        "stop string": SamplingParams(max_tokens=24, stop=["\n", "."], seed=1),
    }
    futures = {name: sampler.sample(prompt, 1, params) for name, params in kinds.items()}
    for name, future in futures.items():
        sequence = future.result().sequences[0]
        text = tokenizer.decode(sequence.tokens)
        print(f"{name:14} {len(sequence.tokens):3} tokens, {sequence.stop_reason:6}  {text!r}")


def show_scores(sampler: tinkex.SamplingClient, tokenizer: Any, prompt: ModelInput) -> None:
    """Print the log-probability of each prompt token; the first has none."""
    scores = sampler.compute_logprobs(prompt).result()
    print("\nThe prompt, token by token:")
    for token, score in zip(prompt.to_ints(), scores, strict=True):
        print(f"  {tokenizer.decode([token])!r:8} {'' if score is None else f'{score:8.3f}'}")


def sample_many(sampler: tinkex.SamplingClient, tokenizer: Any, num_prompts: int) -> None:
    """Start all requests, then collect the results; the client obeys the server's limits."""
    params = SamplingParams(max_tokens=16)
    prompts = [ModelInput.from_text(f"question {i}: ", tokenizer) for i in range(num_prompts)]
    started = time.monotonic()
    futures = [sampler.sample(prompt, 1, params) for prompt in prompts]
    num_tokens = sum(len(future.result().sequences[0].tokens) for future in futures)
    seconds = time.monotonic() - started
    print(f"\n{num_prompts} prompts, {num_tokens} tokens in {seconds:.2f} s")
    summary = sampler.metrics().operations["sample"]
    median, slow = 1000 * summary.p50_seconds, 1000 * summary.p99_seconds
    print(f"one sample: p50 {median:.0f} ms, p99 {slow:.0f} ms")


@contextlib.contextmanager
def connect(options: argparse.Namespace) -> Iterator[tinkex.ServiceClient]:
    """Connect to the server of --base-url, or to one in this process."""
    if options.base_url:
        with tinkex.ServiceClient(base_url=options.base_url, api_key=options.api_key) as service:
            yield service
        return
    with (
        StubServer(models=(options.base_model,)) as server,
        tinkex.ServiceClient(
            base_url=server.url,
            api_key="tml-example",
            tokenizer_loader=lambda name: ToyTokenizer(),
        ) as service,
    ):
        yield service


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base-url", help="server to use; default: one in this process")
    parser.add_argument("--api-key", help="key for that server; default: TINKER_API_KEY")
    parser.add_argument("--base-model", default="tinkex/bigram", help="model to sample from")
    parser.add_argument("--prompt", default="the cat ", help="what to continue")
    parser.add_argument("--num-prompts", type=int, default=200, help="number of concurrent samples")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except tinkex.TinkexError as error:
        sys.exit(f"Error: {error}\n{error.hint or ''}".rstrip())
