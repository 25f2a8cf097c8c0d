"""Train an adapter, then talk to it with the client of OpenAI.

    python examples/openai_client.py [--base-model NAME] [--steps 20]

It uses the server of this machine, or one named by --base-url and --api-key, and needs
`pip install openai`. Any other client of this API works the same way: it needs the base URL, the
key and the path of the checkpoint.
"""

from __future__ import annotations

import openai
from connection import answered, close, connect, make_parser, moved, new_adapter, start
from lessons import make_batch, read_rows
from sft import train


def main() -> int:
    options = make_parser(__doc__, steps=20, learning_rate=1e-3).parse_args()
    talks = [row["messages"] for row in read_rows("sft.jsonl")]
    pairs = [(user["content"], assistant["content"]) for user, assistant in talks]
    with connect(options) as (service, base_model):
        training = new_adapter(service, base_model)
        data = make_batch(training.get_tokenizer(), pairs)
        losses = train(training, data, options.steps, options.learning_rate)
        saved = training.save_weights_for_sampler("openai").result().path
        config = service.config
        client = openai.OpenAI(base_url=f"{config.base_url}/v1", api_key=config.api_key)
        answers = [ask(client, saved, question) for question, _ in pairs]
    for (question, _), answer in zip(pairs, answers, strict=True):
        answered(question, {"answer": answer})
    moved("loss", losses[0], losses[-1])
    num_learned = sum(answer == taught for answer, (_, taught) in zip(answers, pairs, strict=True))
    close(options, f"says {num_learned} of {len(pairs)} answers as taught", "chat", saved)
    return 0


def ask(client: openai.OpenAI, model: str, question: str) -> str:
    """The streamed answer of a model."""
    parts = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=24,
        temperature=0.0,
        stream=True,
    )
    return "".join(part.choices[0].delta.content or "" for part in parts if part.choices)


if __name__ == "__main__":
    start(main)
