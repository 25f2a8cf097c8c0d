"""Sample, chat, watch and plot against a real server with its own model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from transformers import AutoTokenizer

import tinkex
from tests.acceptance.processes.conftest import Serve
from tests.support.serve_process import TIMEOUT_SECONDS
from tests.support.tiny_model_folders import save_tiny

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
#: The official SDK reads sampler responses, including fields that it does not know.
OFFICIAL = """
import sys, tinker

service = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])
sampler = service.create_sampling_client(base_model="mine")
print(sampler.get_base_model())
"""


def save_chatty(folder: Path) -> Path:
    """A tiny model whose tokenizer has a chat template."""
    save_tiny(folder, vocab_size=259)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def run_python(*words: str, stdin: str = "") -> str:
    done = subprocess.run(
        [sys.executable, *words],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sample_and_chat_with_models_of_local_server(
    serve: Serve, home: Path, tmp_path: Path
) -> None:
    folder = save_chatty(tmp_path / "model")
    serve_process = serve(home, "--engine", "local", "--model", f"mine={folder}")
    where = ("--base-url", serve_process.ready(), "--api-key", serve_process.key)

    with tinkex.ServiceClient(base_url=where[1], api_key=serve_process.key) as service:
        sampler = service.create_sampling_client(base_model="mine")
        tokens = sampler.get_tokenizer().encode("hello")
        training = service.create_lora_training_client("mine", rank=2)
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
        datum = tinkex.Datum(
            model_input=tinkex.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs
        )
        for _ in range(2):
            training.forward_backward([datum], "cross_entropy").result(TIMEOUT_SECONDS)
            training.optim_step(tinkex.AdamParams(learning_rate=0.01)).result(TIMEOUT_SECONDS)

    short = ("--max-tokens", "6", "--seed", "1", "--json")
    words = ("sample", "--base-model", "mine", "--prompt", "hello", *short)
    sampled = json.loads(run_python("-m", "tinkex", *words, *where))
    assert sampled["prompt_tokens"] == tokens
    assert isinstance(sampled["sequences"][0]["text"], str)

    chatted = run_python("-m", "tinkex", "chat", "mine", *short, *where, stdin="hi\nagain\n")
    rows = [json.loads(line) for line in chatted.splitlines()]
    assert [row["message"] for row in rows] == ["hi", "again"]

    for command in (("watch", "--once"), ("plot",)):
        output = run_python("-m", "tinkex", "run", *command, training.model_id, "--json", *where)
        run = json.loads(output)
        assert run["training_run_id"] == training.model_id
        steps = [point["step"] for point in run.get("points", [])] or run["step"]
        assert steps in ([1, 2], 2)

    assert run_python("-c", OFFICIAL, where[1], serve_process.key).strip() == "mine"
