"""The server that clients run against: tinkex/tiny with a trained adapter, or a scripted model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tinkex
from tests.compat.clients.agent import train_agent
from tests.compat.clients.conversations import ANSWERS, PLAIN, QUESTION
from tests.compat.clients.registry import Place
from tests.support.real_server import RealServer, start_server
from tinkex.models import TINY_FOLDER
from tinkex.text import encode, load_tokenizer

BASE_MODEL = "tinkex/tiny"
#: Contexts and continuations whose log-probabilities are compared.
PAIRS = (
    ("A cat and a", " dog"),
    ("What is 3 plus 4?", " It is seven, I think; is it not?"),
    (f"<|im_start|>user\n{PLAIN}<|im_end|>\n<|im_start|>assistant\n", "7<|im_end|>"),
    (f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n", ANSWERS[QUESTION]),
    ("", "Naïve — 🙂 and so on"),
)


@contextmanager
def serving_tiny(home: Path) -> Iterator[Place]:
    """A server with the PyTorch engine, whose adapter was trained for the scenarios."""
    server = start_server(home, engine="local")
    try:
        with tinkex.ServiceClient(base_url=server.url, api_key=server.key) as service:
            yield train_place(server, service, home / "scores.json")
    finally:
        server.stop()


def train_place(server: RealServer, service: tinkex.ServiceClient, scores: Path) -> Place:
    """Train the adapter, and score the texts with it and with its base model."""
    tokenizer = load_tokenizer(str(TINY_FOLDER))
    untrained = service.create_lora_training_client(BASE_MODEL, rank=8)
    trained = train_agent(service, BASE_MODEL, tokenizer)
    agent = trained.save_weights_for_sampler("agent").result().path
    write_scores(scores, tokenizer, {BASE_MODEL: untrained, agent: trained})
    return Place(
        url=server.url,
        key=server.key,
        other_key=server.new_key("other"),
        base_model=BASE_MODEL,
        agent=agent,
        scores=str(scores),
    )


def write_scores(path: Path, tokenizer: Any, models: dict[str, Any]) -> None:
    """Score the texts with the training clients of models."""
    rows = [
        {"model": model, "context": context, "continuation": continuation}
        | score(training, tokenizer, context, continuation)
        for model, training in models.items()
        for context, continuation in PAIRS
    ]
    path.write_text(json.dumps(rows))


def score(training: Any, tokenizer: Any, context: str, continuation: str) -> dict[str, Any]:
    """The log-probability of a continuation by `forward()`, and whether each token is likeliest.

    As in lm-eval, an empty context is the first or the end token, and spaces at the end of a
    context belong to the continuation.
    """
    whole = encode(tokenizer, context + continuation, add_special_tokens=False)
    num_context = len(encode(tokenizer, context.rstrip(), add_special_tokens=False))
    if not num_context:
        start = getattr(tokenizer, "bos_token_id", None)
        whole = [tokenizer.eos_token_id if start is None else start, *whole]
        num_context = 1
    datum = tinkex.Datum(
        model_input=tinkex.ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={"target_tokens": whole[1:], "weights": [1.0] * (len(whole) - 1)},
    )
    [output] = training.forward([datum], "cross_entropy").result().loss_fn_outputs
    logprobs = output["logprobs"].tolist()[num_context - 1 :]
    sampled = (
        training.save_weights_and_get_sampling_client()
        .sample(
            tinkex.ModelInput.from_ints(whole),
            1,
            tinkex.SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=1,
        )
        .result()
    )
    likeliest = [row[0][0] for row in sampled.topk_prompt_logprobs[num_context:]]
    is_greedy = likeliest == whole[num_context:]
    return {"logprob": sum(logprobs), "num_tokens": len(logprobs), "is_greedy": is_greedy}


@contextmanager
def serving_scripted(home: Path) -> Iterator[Place]:
    """A server with the fake engine, whose models say what the prompt says."""
    name = "tinkex/scripted"
    server = start_server(home, {"models": [f"{name}={TINY_FOLDER}"]})
    try:
        with tinkex.ServiceClient(base_url=server.url, api_key=server.key) as service:
            training = service.create_lora_training_client(name, rank=8)
            agent = training.save_weights_for_sampler("agent").result().path
        yield Place(
            url=server.url,
            key=server.key,
            other_key=server.new_key("other"),
            base_model=name,
            agent=agent,
            is_scripted=True,
        )
    finally:
        server.stop()
