"""lm-eval with `local-completions` and `local-chat-completions`, on tasks in local files."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_DATASETS_OFFLINE"] = "1"
# The progress bars of the client are not outcomes.
os.environ["TQDM_DISABLE"] = "1"

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from lm_eval.tasks import TaskManager

from tests.compat.clients.conversations import COUNT, PLAIN, PLAIN_ANSWER
from tests.compat.clients.registry import Place, scenario

#: The log-probability of a token differs from that of `forward()` by less than this.
TOLERANCE = 1e-4
CHOICES = """
task: tinkex_choices
dataset_path: json
dataset_kwargs: {data_files: FOLDER/choices.jsonl}
test_split: train
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ANSWERS = """
task: tinkex_answers
dataset_path: json
dataset_kwargs: {data_files: FOLDER/choices.jsonl}
test_split: train
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{target}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 16}
metric_list: [{metric: exact_match}]
"""
PERPLEXITY = """
task: tinkex_perplexity
dataset_path: json
dataset_kwargs: {data_files: FOLDER/choices.jsonl}
test_split: train
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""
#: How tinkex/tiny is asked without a chat template.
CHATML = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def completions(place: Place, model: str = "", **options: Any) -> LocalCompletionsAPI:
    os.environ["OPENAI_API_KEY"] = place.key
    arguments: dict[str, Any] = {"max_retries": 1, "max_length": 1024, "batch_size": 4}
    if place.tokenizer:
        arguments |= {"tokenizer_backend": "huggingface", "tokenizer": place.tokenizer}
    else:
        arguments |= {"tokenizer_backend": "remote", "auth_token": place.key}
    return LocalCompletionsAPI(
        model=model or place.base_model,
        base_url=f"{place.openai_url}/completions",
        **arguments | options,
    )


def write_tasks(place: Place, folder: Path) -> TaskManager:
    """Three tasks on one file of questions."""
    rows = [
        {
            "question": f"What is {left} plus {right}?",
            "choices": [" one", " seven", " a cat"],
            "answer": 1,
            "prompt": place.prompt(CHATML.format(PLAIN)),
            "target": PLAIN_ANSWER,
        }
        for left, right in ((3, 4), (2, 5), (1, 6))
    ]
    (folder / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in {"choices": CHOICES, "answers": ANSWERS, "perplexity": PERPLEXITY}.items():
        (folder / f"{name}.yaml").write_text(text.replace("FOLDER", str(folder)))
    return TaskManager(include_path=str(folder), include_defaults=False)


def scored(lm: LocalCompletionsAPI, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    requests = [
        Instance("loglikelihood", doc={}, arguments=pair, idx=index)
        for index, pair in enumerate(pairs)
    ]
    return lm.loglikelihood(requests)


def check_scores(place: Place, lm: LocalCompletionsAPI, model: str) -> None:
    """The scores of the endpoint are those of `forward()`."""
    rows = [row for row in json.loads(Path(place.scores).read_text()) if row["model"] == model]
    assert rows, model
    found = scored(lm, [(row["context"], row["continuation"]) for row in rows])
    for row, (logprob, is_greedy) in zip(rows, found, strict=True):
        # lm-eval returns sums.
        difference = abs(row["logprob"] - logprob) / row["num_tokens"]
        assert difference < TOLERANCE, (row, logprob, difference)
        assert row["is_greedy"] == is_greedy, (row, is_greedy)


@scenario("log-likelihoods of the base model are those of `forward()`")
def base_scores(place: Place) -> None:
    check_scores(place, completions(place), place.base_model)


@scenario("log-likelihoods of a checkpoint are those of `forward()`")
def agent_scores(place: Place) -> None:
    check_scores(place, completions(place, place.agent), place.agent)


@scenario("concurrent batches, and texts in place of tokens")
def concurrent(place: Place) -> None:
    pairs = [(f"A cat and {number}", " dogs") for number in range(12)]
    one = scored(completions(place, batch_size=1), pairs)
    many = scored(completions(place, num_concurrent=4, batch_size=2), pairs)
    texts = scored(completions(place, tokenized_requests=False), pairs)
    for first, second, third in zip(one, many, texts, strict=True):
        assert abs(first[0] - second[0]) < TOLERANCE, (first, second)
        assert abs(first[0] - third[0]) < TOLERANCE, (first, third)


@scenario("the remote tokenizer")
def tokenizer(place: Place) -> None:
    for base in ("/v1", "/oai/api/v1"):
        lm = LocalCompletionsAPI(
            model=place.base_model,
            base_url=f"{place.url}{base}/completions",
            auth_token=place.key,
            tokenizer_backend="auto",
        )
        assert lm.tokenizer_backend == "remote", base
        text = "A cat, naïve 🙂"
        assert lm.tokenizer.decode(lm.tok_encode(text)) == text
        assert lm.eos_string and lm.tokenizer.encode(lm.eos_string) == [lm.eot_token_id]
        assert lm.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])


@scenario("tasks: multiple choice, perplexity, generate_until")
def tasks(place: Place) -> None:
    with tempfile.TemporaryDirectory() as folder:
        manager = write_tasks(place, Path(folder))
        names = ["tinkex_choices", "tinkex_answers", "tinkex_perplexity"]
        found = lm_eval.simple_evaluate(
            completions(place), tasks=names, task_manager=manager, bootstrap_iters=0
        )["results"]
    assert found["tinkex_answers"]["exact_match,none"] == 1.0, found
    assert 0.0 <= found["tinkex_choices"]["acc,none"] <= 1.0, found
    assert found["tinkex_perplexity"]["bits_per_byte,none"] > 0.0, found


@scenario("`local-chat-completions`")
def chat(place: Place) -> None:
    os.environ["OPENAI_API_KEY"] = place.key
    lm = LocalChatCompletion(
        model=place.base_model, base_url=f"{place.openai_url}/chat/completions", max_retries=1
    )
    options = {"until": ["\n\n", "9"], "max_gen_toks": 40, "temperature": 0.0}
    requests = [
        Instance(
            "generate_until",
            doc={},
            arguments=(
                lm.apply_chat_template([{"role": "user", "content": place.prompt(text)}]),
                options,
            ),
            idx=index,
        )
        for index, text in enumerate((PLAIN, COUNT))
    ]
    plain, count = lm.generate_until(requests)
    assert plain == PLAIN_ANSWER and "3" in count, (plain, count)
