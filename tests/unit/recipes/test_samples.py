from __future__ import annotations

from pathlib import Path

from tinkex.client.config import Config
from tinkex.data.rows import ChatRow, PreferenceRow, PromptCompletionRow, PromptRow
from tinkex.recipes.method import server_identity
from tinkex.recipes.report import choose_prompts, first_prompt, prompt_text
from tinkex.settings import HOSTED_BASE_URL

SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "hi"}
BOT = {"role": "assistant", "content": "yo"}


def test_first_prompt_precedes_the_first_answer() -> None:
    assert first_prompt(ChatRow((SYSTEM, USER, BOT, USER, BOT))) == (SYSTEM, USER)
    assert first_prompt(ChatRow((BOT, USER))) == (BOT,)
    assert first_prompt(PromptCompletionRow("a", "b")) == "a"
    assert first_prompt(PreferenceRow((USER,), "a", "b")) == (USER,)
    assert first_prompt(PromptRow("q", {})) == "q"


def test_given_prompts_match_the_format_of_the_data() -> None:
    assert choose_prompts(["hi"], PromptCompletionRow("a", "b")) == ["hi"]
    assert choose_prompts(["hi"], ChatRow((USER, BOT))) == [(USER,)]
    assert choose_prompts([], ChatRow((USER, BOT))) == [(USER,)]


def test_prompt_text_is_the_last_message() -> None:
    assert prompt_text("a") == "a"
    assert prompt_text((SYSTEM, USER)) == "hi"
    assert prompt_text(({"role": "tool", "content": None},)) == ""


def test_local_server_identity_is_independent_of_its_port() -> None:
    home = Path("home")
    first = Config(base_url="http://127.0.0.1:1111", local_home=home)
    second = Config(base_url="http://127.0.0.1:2222", local_home=home)
    assert server_identity(first) == server_identity(second) == "local home"
    assert server_identity(Config(base_url="http://a")) != server_identity(
        Config(base_url="http://b")
    )
    assert server_identity(Config(base_url=HOSTED_BASE_URL, local_home=home)) == HOSTED_BASE_URL
