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

from tinkex.errors import InvalidInput
from tinkex.installation import install_command
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


@pytest.fixture
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `import transformers` fail, as if it were not installed."""
    monkeypatch.setitem(sys.modules, "transformers", None)


class FakeTokenizer:
    """Encodes a text as its lengths; optionally has a chat template."""

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template
        self.seen: list[dict[str, Any]] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [7] * add_special_tokens + [len(word) for word in text.split()]

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        return " ".join("x" * token for token in token_ids)

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        self.seen.append(options)
        if any(message["role"] == "forbidden" for message in messages):
            raise RuntimeError("roles must alternate")
        return [len(message["content"] or "") for message in messages]


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


@pytest.mark.usefixtures("without_transformers")
def test_local_folder_works_without_transformers(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    assert isinstance(tokenizer, Tokenizer)
    assert encode(tokenizer, "hello world") == [1, 2, 3]
    assert encode(tokenizer, "hello world", add_special_tokens=False) == [2, 3]
    assert tokenizer.decode([2, 3]) == "hello world"
    assert load_tokenizer(str(folder)) is tokenizer


@pytest.mark.usefixtures("without_transformers")
def test_home_folder_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert encode(load_tokenizer(f"~/{folder.name}"), "world") == [1, 3]


@pytest.mark.usefixtures("without_transformers")
def test_hub_name_without_transformers_suggests_installation() -> None:
    with pytest.raises(InvalidInput, match="Failed to load tokenizer 'no/such-model': ") as caught:
        load_tokenizer("no/such-model")
    assert "transformers is not installed" in caught.value.message
    assert caught.value.hint is not None
    assert install_command("text") in caught.value.hint


def test_missing_folder_fails_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"Failed to load tokenizer '.*gone': .*no such folder"):
        load_tokenizer(str(tmp_path / "gone"))


@pytest.mark.usefixtures("without_transformers")
def test_invalid_file_fails_and_is_retried(folder: Path) -> None:
    good = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidInput, match="Failed to load tokenizer"):
        load_tokenizer(str(folder))
    (folder / "tokenizer.json").write_bytes(good)
    assert encode(load_tokenizer(str(folder)), "hello") == [1, 2]


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


@pytest.mark.usefixtures("without_transformers")
def test_text_that_is_not_unicode_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="ud800"):
        encode(load_tokenizer(str(folder)), "a\ud800")


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


@pytest.mark.usefixtures("without_transformers")
def test_missing_chat_template_is_reported(folder: Path) -> None:
    chat = [{"role": "user", "content": "hello"}]
    for tokenizer in (FakeTokenizer(None), load_tokenizer(str(folder))):
        with pytest.raises(InvalidInput, match="has no chat template"):
            render_chat(tokenizer, chat)


def test_template_error_raises_invalid_input() -> None:
    with pytest.raises(InvalidInput, match="refused the messages: roles must alternate"):
        render_chat(FakeTokenizer("t"), [{"role": "forbidden", "content": "x"}])
