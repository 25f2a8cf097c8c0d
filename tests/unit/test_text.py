"""Tokenizers: resolution, caching, encoding and chat rendering."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers

from tests.support.fake_tokenizer import FakeTokenizer
from tinkex.errors import InvalidInput
from tinkex.text import (
    PINNED_REVISIONS,
    Tokenizer,
    encode,
    load_tokenizer,
    render_chat,
    resolve_tokenizer_id,
)

VOCABULARY = {"[UNK]": 0, "[BOS]": 1, "hello": 2, "world": 3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tiny word-level tokenizer that begins every text with [BOS]."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="[BOS] $A", special_tokens=[("[BOS]", 1)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize(
    ("model_name", "server_id", "expected"),
    [
        ("Qwen/Qwen3-8B", None, "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B:v2", None, "Qwen/Qwen3-8B"),
        ("gpt2", None, "gpt2"),
        ("Qwen/Qwen3-8B", "other/tokenizer:abc:def", "other/tokenizer"),
        ("Qwen/Qwen3-8B", "", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B", ":abc", "Qwen/Qwen3-8B"),
        ("meta-llama/Llama-3.1-8B", None, "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"),
        (
            "meta-llama/Llama-3/x:1",
            None,
            "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer",
        ),
        ("meta-llama/Llama-2-7b", None, "meta-llama/Llama-2-7b"),
        ("meta-llama/Llama-3.1-8B", "mine/llama", "mine/llama"),
        ("org/model/variant", None, "org/model"),
        ("org/model/variant:rev", None, "org/model"),
        ("a/b/c/d", None, "a/b/c/d"),
        ("moonshotai/Kimi-K2.5-Text-Only", None, "moonshotai/Kimi-K2.5"),
        ("x", "moonshotai/Kimi-K2.5-Text-Only:r", "moonshotai/Kimi-K2.5"),
        ("/models/a:b/c", None, "/models/a:b/c"),
        ("./models/mine", None, "./models/mine"),
        ("../mine:1/x", None, "../mine:1/x"),
        ("~/models/mine:1", None, "~/models/mine:1"),
        ("C:/models/mine", None, "C:/models/mine"),
        ("x", "/srv/tokenizers/a:b", "/srv/tokenizers/a:b"),
    ],
)
def test_tokenizer_id_is_resolved(model_name: str, server_id: str | None, expected: str) -> None:
    assert resolve_tokenizer_id(model_name, server_id) == expected


def test_existing_relative_folder_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model" / "step:1").mkdir(parents=True)
    assert resolve_tokenizer_id("org/model/step:1") == "org/model/step:1"
    assert resolve_tokenizer_id("org/model/step:2") == "org/model"


def test_mirrors_can_be_passed_in() -> None:
    assert resolve_tokenizer_id("meta-llama/Llama-3-8B", mirrors={}) == "meta-llama/Llama-3-8B"
    assert resolve_tokenizer_id("google/gemma-9", mirrors={"google/": "free/gemma"}) == "free/gemma"


@pytest.mark.parametrize("name", ["", ":rev", None, 3])
def test_empty_model_name_is_refused(name: Any) -> None:
    with pytest.raises(InvalidInput, match=repr(name)):
        resolve_tokenizer_id(name)


def test_missing_folder_fails_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"Failed to load tokenizer '.*gone': .*no such folder"):
        load_tokenizer(str(tmp_path / "gone"))


def test_pinned_id_is_loaded_at_its_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    class AutoTokenizer:
        @staticmethod
        def from_pretrained(name: str, **options: Any) -> FakeTokenizer:
            asked.append((name, options))
            return FakeTokenizer()

    module = type(sys)("transformers")
    module.AutoTokenizer = AutoTokenizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", module)
    kimi = "moonshotai/Kimi-K3"
    load_tokenizer(kimi)
    load_tokenizer(kimi, revision="other")
    load_tokenizer("tests/unpinned")
    cached = {"local_files_only": True}
    assert asked == [
        (kimi, cached | {"revision": PINNED_REVISIONS[kimi], "trust_remote_code": True}),
        (kimi, cached | {"revision": "other", "trust_remote_code": False}),
        ("tests/unpinned", cached),
    ]


@pytest.mark.parametrize("is_there", [True, False])
def test_unreachable_hub_is_contacted_once(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    class AutoTokenizer:
        @staticmethod
        def from_pretrained(name: str, **options: Any) -> FakeTokenizer:
            asked.append(options)
            if options.get("local_files_only"):
                raise OSError("not cached")
            return FakeTokenizer()

    class Session:
        @staticmethod
        def head(url: str, timeout: float) -> None:
            if not is_there:
                raise RuntimeError("no route")

    hub = type(sys)("huggingface_hub")
    hub.constants = SimpleNamespace(is_offline_mode=lambda: False, ENDPOINT="https://hub")  # type: ignore[attr-defined]
    hub.get_session = Session  # type: ignore[attr-defined]
    module = type(sys)("transformers")
    module.AutoTokenizer = AutoTokenizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "transformers", module)
    if is_there:
        assert isinstance(load_tokenizer("tests/there"), FakeTokenizer)
        assert asked == [{"local_files_only": True}, {}]
        return
    with pytest.raises(InvalidInput, match="https://hub cannot be reached"):
        load_tokenizer("tests/not-there")
    assert asked == [{"local_files_only": True}]


def test_concurrent_loads_run_once() -> None:
    calls: list[str] = []
    barrier = Barrier(8)

    def loader(name: str) -> FakeTokenizer:
        calls.append(name)
        time.sleep(0.05)  # long enough for the others to come and find it half loaded
        return FakeTokenizer()

    def ask(_: int) -> Tokenizer:
        barrier.wait(10)
        return load_tokenizer("one", loader=loader)

    with ThreadPoolExecutor(8) as pool:
        tokenizers = list(pool.map(ask, range(8)))
    assert calls == ["one"]
    assert all(tokenizer is tokenizers[0] for tokenizer in tokenizers)


def test_slow_load_does_not_block_another_id() -> None:
    started, release = Event(), Event()

    def slow(_: str) -> FakeTokenizer:
        started.set()
        assert release.wait(10)
        return FakeTokenizer()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(load_tokenizer, "slow", loader=slow)
        assert started.wait(10)
        load_tokenizer("quick", loader=lambda _: FakeTokenizer())
        assert not waiting.done()
        release.set()
        waiting.result(10)


def test_loaders_do_not_share_a_cache_entry() -> None:
    first, second = FakeTokenizer(), FakeTokenizer()
    assert load_tokenizer("same", loader=lambda _: first) is first
    assert load_tokenizer("same", loader=lambda _: second) is second


def test_old_entries_are_evicted() -> None:
    calls: list[str] = []

    def loader(name: str) -> FakeTokenizer:
        calls.append(name)
        return FakeTokenizer()

    for index in range(40):
        load_tokenizer(f"model-{index}", loader=loader)
    load_tokenizer("model-39", loader=loader)
    assert len(calls) == 40
    load_tokenizer("model-0", loader=loader)
    assert len(calls) == 41


def test_failed_load_is_not_cached() -> None:
    answers: list[object] = [OSError("no\n network"), FakeTokenizer()]

    def loader(_: str) -> object:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(InvalidInput, match="Failed to load tokenizer 'flaky': no network"):
        load_tokenizer("flaky", loader=loader)
    assert isinstance(load_tokenizer("flaky", loader=loader), FakeTokenizer)


def test_loader_must_return_a_tokenizer() -> None:
    with pytest.raises(InvalidInput, match="'odd': a int has no encode"):
        load_tokenizer("odd", loader=lambda _: 3)


def test_loader_excludes_revision() -> None:
    with pytest.raises(InvalidInput, match="'abc'"):
        load_tokenizer("x", revision="abc", loader=lambda _: FakeTokenizer())


@pytest.mark.parametrize("name", ["", None])
def test_invalid_tokenizer_id_is_refused(name: Any) -> None:
    with pytest.raises(InvalidInput, match=repr(name)):
        load_tokenizer(name)


@pytest.mark.parametrize("text", [None, 3, b"bytes", ["a"]])
def test_only_text_is_encoded(text: Any) -> None:
    with pytest.raises(InvalidInput, match="Only text"):
        encode(FakeTokenizer(), text)


def test_tokenizers_tokenizer_can_encode(folder: Path) -> None:
    bare: Any = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert encode(bare, "world") == [1, 3]


def test_chat_is_rendered() -> None:
    tokenizer = FakeTokenizer("a template")
    messages = [{"role": "user", "content": "four"}, {"role": "assistant", "content": "seventy"}]
    assert render_chat(tokenizer, messages) == [4, 7]
    assert render_chat(tokenizer, messages, add_generation_prompt=False) == [4, 7]
    assert [options["add_generation_prompt"] for options in tokenizer.seen] == [True, False]
    assert render_chat(
        tokenizer, [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    ) == [0]


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], r"\[\]"),
        ("hello", "'hello'"),
        ({"role": "user", "content": "x"}, "list of messages"),
        (None, "None"),
        (["hello"], r"messages\[0\] must have a role and a content, got 'hello'"),
        ([{"role": "user", "content": "x"}, {"content": "y"}], r"messages\[1\] has no role"),
        ([{"role": 3, "content": "y"}], r"messages\[0\] has no role"),
        ([{"role": "user"}], r"messages\[0\] has no text"),
        ([{"role": "user", "content": 5}], r"messages\[0\] has no text.*5"),
    ],
)
def test_invalid_messages_are_refused(messages: Any, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        render_chat(FakeTokenizer("a template"), messages)


def test_template_error_raises_invalid_input() -> None:
    with pytest.raises(InvalidInput, match="refused the messages: roles must alternate"):
        render_chat(FakeTokenizer("t"), [{"role": "forbidden", "content": "x"}])
