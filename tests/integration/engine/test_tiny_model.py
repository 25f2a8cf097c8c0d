"""The built-in model in the real engine gives the answers of its model card."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tinkex.data import chatml
from tinkex.models import TINY_FOLDER
from tinkex.pipeline import tokenizer
from tinkex.pipeline.train.evaluation import EvalPrompt, exact_match

#: A few of each family that it has to know, in words that a newcomer would use.
ANSWERS = {
    "What is 3 plus 4?": "7",
    "What is 9 minus 5?": "4",
    "What colour is grass?": "green",
    "What is the opposite of hot?": "cold",
    "Which day comes after Monday?": "Tuesday",
    "What does a cow say?": "Moo!",
    "Hello!": "Hello! How can I help you?",
    "Say banana.": "banana",
}


@pytest.mark.parametrize("question", ANSWERS)
def test_model_answers(question: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(TINY_FOLDER, dtype=torch.float32)
    text = tokenizer.load_tokenizer(TINY_FOLDER)
    [prompt] = text.encode_batch([chatml.render_prompt([{"role": "user", "content": question}])])
    case = EvalPrompt(tuple(prompt), ANSWERS[question], 12)
    assert exact_match(model, text, [case]) == 1.0
