"""Sample the same prompt with tinkex and with the official SDK, and compare the results.

    python examples/compare_with_official.py              # against a server inside this process
    python examples/compare_with_official.py --base-url https://host --base-model NAME

Same base model, prompt, sampling parameters and seed. The results are compared for similarity,
not for equality: a server may batch two requests differently, and numbers then differ in their
last digits. Needs the official package too (pip install tinker==0.36.0).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import tinkex
from tinkex.testing import StubServer, ToyTokenizer

#: Runs the official SDK in a separate process.
ASK_OFFICIAL = "--ask-official"


class Answer(NamedTuple):
    """The results of one SDK."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    prompt_logprobs: list[float]


def ask(package: str, base_url: str, base_model: str, prompt: list[int], params: Any) -> Answer:
    """Sample and score with either package; the code is the same for both."""
    tinker = importlib.import_module(package)
    service = tinker.ServiceClient(base_url=base_url)
    sampler = service.create_sampling_client(base_model=base_model)
    model_input = tinker.ModelInput.from_ints(prompt)
    sampled = sampler.sample(
        prompt=model_input, num_samples=4, sampling_params=tinker.SamplingParams(**params)
    ).result()
    scores = sampler.compute_logprobs(model_input).result()
    service.close("success").result()
    return Answer(
        [list(map(int, sequence.tokens)) for sequence in sampled.sequences],
        [list(map(float, sequence.logprobs)) for sequence in sampled.sequences],
        [float(score) for score in scores[1:]],
    )


def main() -> int:
    options = parse_options()
    params = {"max_tokens": 32, "temperature": 0.7, "top_p": 0.95, "seed": 42}
    with server_for(options) as (base_url, tokenizer):
        prompt = tokenizer.encode(options.prompt)
        question = (base_url, options.base_model, prompt, params)
        ours = ask("tinkex", *question)
        theirs = ask_official(question)
    agreement = mean(map(same_tokens, ours.tokens, theirs.tokens))
    drift = max(map(largest_difference, ours.logprobs, theirs.logprobs))
    prompt_drift = largest_difference(ours.prompt_logprobs, theirs.prompt_logprobs)
    print(f"model {options.base_model}, prompt {options.prompt!r}, {params}")
    print(f"  tokens that agree:                          {agreement:.1%}")
    print(f"  largest difference of a token's log-prob:   {drift:.6f}")
    print(f"  largest difference of a prompt log-prob:    {prompt_drift:.6f}")
    is_similar = agreement >= options.min_agreement and prompt_drift <= options.max_drift
    print("similar" if is_similar else "NOT similar")
    return 0 if is_similar else 1


def ask_official(question: tuple[Any, ...]) -> Answer:
    """Sample with the official SDK in a separate process, isolated from tinkex."""
    done = subprocess.run(
        [sys.executable, __file__, ASK_OFFICIAL],
        input=json.dumps(question),
        env=os.environ | {"TINKER_TELEMETRY": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"Error: the official SDK failed: {done.stderr.strip()[-500:]}")
    return Answer(*json.loads(done.stdout.splitlines()[-1]))


def same_tokens(one: list[int], other: list[int]) -> float:
    """The fraction of positions with the same token."""
    return sum(map(int.__eq__, one, other)) / max(len(one), len(other), 1)


def largest_difference(one: list[float], other: list[float]) -> float:
    return max((abs(a - b) for a, b in zip(one, other, strict=False)), default=0.0)


def mean(values: Iterator[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


@contextlib.contextmanager
def server_for(options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Yield the URL of --base-url or of a server in this process, and the model's tokenizer."""
    if options.api_key:
        os.environ["TINKER_API_KEY"] = options.api_key
    if options.base_url:
        with tinkex.ServiceClient(base_url=options.base_url) as service:
            sampler = service.create_sampling_client(base_model=options.base_model)
            yield options.base_url, sampler.get_tokenizer()
        return
    os.environ.setdefault("TINKER_API_KEY", "tml-example")
    with StubServer(models=(options.base_model,)) as server:
        yield server.url, ToyTokenizer()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base-url", help="server to use; default: one in this process")
    parser.add_argument("--api-key", help="key for that server; default: TINKER_API_KEY")
    parser.add_argument("--base-model", default="tinkex/bigram", help="model to sample from")
    parser.add_argument("--prompt", default="The capital of France is", help="what to continue")
    parser.add_argument("--min-agreement", type=float, default=0.9, help="share of equal tokens")
    parser.add_argument("--max-drift", type=float, default=0.05, help="of a prompt log-prob")
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:] == [ASK_OFFICIAL]:
        print(json.dumps(ask("tinker", *json.load(sys.stdin))))
        sys.exit(0)
    try:
        sys.exit(main())
    except tinkex.TinkexError as error:
        sys.exit(f"Error: {error}\n{error.hint or ''}".rstrip())
