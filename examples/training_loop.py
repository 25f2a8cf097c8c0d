"""Train a LoRA adapter, print the loss, sample before and after, save and download it.

    python examples/training_loop.py                                  # a server inside this process
    python examples/training_loop.py --base-url https://host --api-key tml-... --base-model NAME

Everything goes through the public SDK, so the same script runs against any Tinker server.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import tinkex
from tinkex import AdamParams, Datum, ModelInput, SamplingParams
from tinkex.testing import StubServer, ToyTokenizer
from tinkex.text import Tokenizer

TokenizerLoader = Callable[[str], Tokenizer]
TEXT = (
    "the cat sat on the mat. the dog sat on the log. "
    "a small step every day takes you far. the loss falls and the model learns. "
)


def main() -> int:
    options = parse_options()
    with server_for(options) as (base_url, base_model, tokenizer_loader):
        config = tinkex.Config.new(
            base_url=base_url, api_key=options.api_key, tokenizer_loader=tokenizer_loader
        )
        with tinkex.ServiceClient(config=config, display_name="training loop") as service:
            run(service, base_model, options)
    return 0


def run(service: tinkex.ServiceClient, base_model: str, options: argparse.Namespace) -> None:
    step_title(f"Create a LoRA adapter on {base_model}")
    training = service.create_lora_training_client(base_model, rank=8, seed=1).result()
    print(f"  model {training.model_id}")
    tokenizer = training.get_tokenizer()
    data = make_data(tokenizer.encode(TEXT), window=32)

    step_title("Sample before training")
    show_sample(training, tokenizer)

    step_title(f"Train for {options.steps} steps on {len(data)} examples")
    train(training, data, options.steps, options.learning_rate)

    step_title("Sample after training")
    show_sample(training, tokenizer)

    step_title("Save, list and download")
    training.save_state("final").result()
    saved = training.save_weights_external("export").result()
    rest = service.rest_client()
    for checkpoint in rest.list_checkpoints(training.model_id).result().checkpoints:
        print(f"  {checkpoint.tinker_path}  {checkpoint.size_bytes or 0:,} bytes")
    with tempfile.TemporaryDirectory() as folder:
        where = rest.download_checkpoint(saved.path, Path(folder) / "adapter").result()
        for file in sorted(where.iterdir()):
            print(f"  downloaded {file.name}  {file.stat().st_size:,} bytes")

    step_title("Where the time went")
    for name, summary in service.metrics().operations.items():
        median, slow = 1000 * summary.p50_seconds, 1000 * summary.p99_seconds
        print(f"  {name:26} {summary.count:4} calls   p50 {median:7.1f} ms   p99 {slow:7.1f} ms")


def train(
    training: tinkex.TrainingClient, data: list[Datum], num_steps: int, learning_rate: float
) -> None:
    """Train; send both calls before waiting for either, so that the server is never idle."""
    num_tokens = sum(datum.model_input.length for datum in data)
    started = time.monotonic()
    for step in range(1, num_steps + 1):
        forward_backward = training.forward_backward(data, "cross_entropy")
        optim_step = training.optim_step(AdamParams(learning_rate=learning_rate))
        loss = forward_backward.result().metrics["loss:sum"] / num_tokens
        optim_step.result()
        if step == 1 or step % max(1, num_steps // 10) == 0:
            rate = step * num_tokens / (time.monotonic() - started)
            bar = "#" * round(8 * loss)
            print(f"  step {step:4}   loss {loss:6.3f}   {rate:9,.0f} tokens/s   {bar}")


def make_data(tokens: list[int], window: int) -> list[Datum]:
    """Build overlapping windows; position i of the input predicts target i."""
    starts = range(0, len(tokens) - window, window // 2)
    return [
        Datum(
            model_input=ModelInput.from_ints(tokens[start : start + window]),
            loss_fn_inputs={
                "target_tokens": tokens[start + 1 : start + window + 1],
                "weights": [1.0] * window,
            },
        )
        for start in starts
    ]


def show_sample(training: tinkex.TrainingClient, tokenizer: Tokenizer) -> None:
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = ModelInput.from_text("the ", tokenizer)
    params = SamplingParams(max_tokens=40, temperature=0.7, seed=7)
    response = sampler.sample(prompt, num_samples=2, sampling_params=params).result()
    for sequence in response.sequences:
        print(f"  {'the ' + tokenizer.decode(sequence.tokens)!r}")


@contextlib.contextmanager
def server_for(options: argparse.Namespace) -> Iterator[tuple[str, str, TokenizerLoader | None]]:
    """Yield the URL of --base-url, or of a server in this process."""
    if options.base_url:
        yield options.base_url, options.base_model, None
        return
    with StubServer(models=(options.base_model,)) as server:
        print(f"No --base-url given: using a server in this process at {server.url}")
        yield server.url, options.base_model, lambda name: ToyTokenizer()


def step_title(text: str) -> None:
    print(f"\n{text}", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base-url", help="server to use; default: one in this process")
    parser.add_argument("--api-key", help="key for that server; default: TINKER_API_KEY")
    parser.add_argument("--base-model", default="tinkex/bigram", help="model to train on")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except tinkex.TinkexError as error:
        print(f"Error: {error}", file=sys.stderr)
        if error.hint:
            print(f"  {error.hint}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
