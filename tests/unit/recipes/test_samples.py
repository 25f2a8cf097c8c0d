from __future__ import annotations

from pathlib import Path

from tinkex.client.config import Config
from tinkex.recipes.opening import server_of
from tinkex.recipes.rows import ChatRow, PreferenceRow, PromptRow, TextRow
from tinkex.recipes.samples import choose_prompts, prompt_of, shown
from tinkex.settings import HOSTED_BASE_URL

SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "hi"}
BOT = {"role": "assistant", "content": "yo"}


def test_the_prompt_of_a_row_is_what_stands_before_its_first_answer() -> None:
    assert prompt_of(ChatRow((SYSTEM, USER, BOT, USER, BOT))) == (SYSTEM, USER)
    assert prompt_of(ChatRow((BOT, USER))) == (BOT,)
    assert prompt_of(TextRow("a", "b")) == "a"
    assert prompt_of(PreferenceRow((USER,), "a", "b")) == (USER,)
    assert prompt_of(PromptRow("q", {})) == "q"


def test_given_prompts_take_the_form_of_the_data() -> None:
    assert choose_prompts(["hi"], TextRow("a", "b")) == ["hi"]
    assert choose_prompts(["hi"], ChatRow((USER, BOT))) == [(USER,)]
    assert choose_prompts([], ChatRow((USER, BOT))) == [(USER,)]


def test_a_conversation_is_shown_by_its_last_message() -> None:
    assert shown("a") == "a"
    assert shown((SYSTEM, USER)) == "hi"
    assert shown(({"role": "tool", "content": None},)) == ""


def test_this_machines_own_server_keeps_its_name_whatever_its_port() -> None:
    home = Path("home")
    first = Config(base_url="http://127.0.0.1:1111", local_home=home)
    second = Config(base_url="http://127.0.0.1:2222", local_home=home)
    assert server_of(first) == server_of(second) == "local home"
    assert server_of(Config(base_url="http://a")) != server_of(Config(base_url="http://b"))
    assert server_of(Config(base_url=HOSTED_BASE_URL, local_home=home)) == HOSTED_BASE_URL
