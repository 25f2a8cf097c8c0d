"""The command `llm` with models of this server in its file of OpenAI-compatible models."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.compat.clients.conversations import (
    ANSWER,
    FIELDS,
    PLAIN,
    PLAIN_ANSWER,
    QUESTION,
    RESULT,
)
from tests.compat.clients.registry import Place, scenario

TIMEOUT_SECONDS = 60
FUNCTION = '''
def get_weather(city: str) -> str:
    """The weather in a city."""
    return {result!r}
'''
MODELS = """
- model_id: tiny
  model_name: {base}
  api_base: {url}
  api_key_name: tinkex
  supports_schema: true
- model_id: agent
  model_name: {agent}
  api_base: {url}
  api_key_name: tinkex
  supports_tools: true
- model_id: tiny-text
  model_name: {base}
  api_base: {url}
  api_key_name: tinkex
  completion: true
"""


def llm(place: Place, *words: str) -> str:
    """Run the command in a folder of its own."""
    program = Path(sys.executable).parent / "llm"
    folder = tempfile.mkdtemp()
    try:
        path = Path(folder)
        models = MODELS.format(base=place.base_model, agent=place.agent, url=place.openai_url)
        (path / "extra-openai-models.yaml").write_text(models)
        (path / "keys.json").write_text(f'{{"tinkex": "{place.key}"}}')
        done = subprocess.run(
            [sys.executable, str(program), *words],
            env=os.environ | {"LLM_USER_PATH": folder},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    finally:
        shutil.rmtree(folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


GREEDY = ("-o", "temperature", "0", "-o", "max_tokens", "80")


@scenario("`llm -m`, streamed and not, with usage")
def prompt(place: Place) -> None:
    for more in ((), ("--no-stream",)):
        assert llm(place, "-m", "tiny", *GREEDY, *more, place.prompt(PLAIN)) == PLAIN_ANSWER
    assert llm(place, "-m", "tiny", *GREEDY, "-s", "Be brief.", place.prompt(PLAIN))


@scenario("`--functions`: tools")
def tools(place: Place) -> None:
    code = FUNCTION.format(result=place.prompt(RESULT))
    said = llm(place, "-m", "agent", *GREEDY, "--functions", code, place.prompt(QUESTION))
    assert said.endswith(ANSWER), said


@scenario("`--schema`")
def schema(place: Place) -> None:
    words = ("--schema", "left int, right int")
    assert llm(place, "-m", "tiny", *GREEDY, *words, place.prompt(FIELDS)).startswith("{")


@scenario("`completion: true`: text")
def text(place: Place) -> None:
    llm(place, "-m", "tiny-text", *GREEDY, "A cat")


@scenario("`llm openai endpoint`: models, a prompt")
def endpoint(place: Place) -> None:
    words = ("openai", "endpoint", place.openai_url, "--key", place.key)
    names = llm(place, *words, "--models").split()
    assert place.base_model in names and place.agent in names, names
    said = llm(place, *words, "-m", place.base_model, *GREEDY, place.prompt(PLAIN))
    assert said == PLAIN_ANSWER, said
