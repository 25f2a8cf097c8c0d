"""`run sample`, its bare form and its alias, against a server."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tests.integration.cli.conftest import RunCli
from tests.integration.cli.run.conftest import Trained
from tests.integration.conftest import BASE_MODEL, KEY, Serve
from tests.support.byte_tokenizer_cli import context_for
from tinkex.cli.context import Screen

SHORT = ("--max-tokens", "4", "--temperature", "0")


@pytest.mark.parametrize("words", [("run", "sample"), ("run",), ("sample",)])
def test_three_spellings_of_the_same_command(
    words: tuple[str, ...], trained: Trained, tinkex: RunCli
) -> None:
    result = tinkex(
        *words, "--prompt", "hel", "--model-path", trained.path, *SHORT, context=trained.context
    )
    assert (result.exit_code, result.out) == (0, "llll\n")
    assert result.err.splitlines() == [
        f"Sampling 1 sample of up to 4 tokens from {trained.path} ...",
        f"Done: 4 tokens in {result.err.split()[-1]}",
    ]


def test_the_only_model_needs_no_name(trained: Trained, tinkex: RunCli) -> None:
    found = tinkex("sample", "--prompt", "a", *SHORT, "--json", context=trained.context).json
    assert found["base_model"] == BASE_MODEL


def test_which_model_is_asked_if_there_are_several(serve: Serve, tinkex: RunCli) -> None:
    server = serve(api_keys={KEY}, models=("a/one", "a/two"))
    result = tinkex("sample", "--prompt", "a", context=context_for(server.url))
    assert (result.exit_code, result.out) == (1, "")
    assert "the server has: a/one, a/two" in result.err


def test_json_has_the_whole_response_and_the_text(trained: Trained, tinkex: RunCli) -> None:
    found = tinkex(
        "sample", "--prompt", "hel", "--model-path", trained.path, "--num-samples", "2", *SHORT,
        "--logprobs", "-f", "json", context=trained.context,
    ).json  # fmt: skip
    assert (found["type"], found["prompt_tokens"]) == ("sample", list(b"hel"))
    assert [sequence["text"] for sequence in found["sequences"]] == ["llll", "llll"]
    first = found["sequences"][0]
    assert (first["tokens"], first["stop_reason"]) == (list(b"llll"), "length")
    assert len(first["logprobs"]) == 4
    assert found["prompt_logprobs"][0] is None
    assert len(found["prompt_logprobs"]) == 3


def test_several_samples_are_told_apart(trained: Trained, tinkex: RunCli) -> None:
    shown = tinkex(
        "sample", "--prompt", "hel", "--model-path", trained.path, "--num-samples", "2", *SHORT,
        context=trained.context,
    ).out  # fmt: skip
    assert shown == (
        "--- sample 1 of 2 (4 tokens, length) ---\nllll\n\n"
        "--- sample 2 of 2 (4 tokens, length) ---\nllll\n"
    )


def test_every_setting_reaches_the_server(trained: Trained, tinkex: RunCli) -> None:
    result = tinkex(
        "run", "--base-model", BASE_MODEL, "--prompt-tokens", "[104, 101]", "--max-tokens", "3",
        "--temperature", "0.5", "--top-k", "7", "--top-p", "0.9", "--seed", "11", "--stop", "x",
        "--stop", "yy", "--http-pool", "mine", "--timeout", "20s", context=trained.context,
    )  # fmt: skip
    assert result.exit_code == 0, result.err
    asked = json.loads(trained.server.calls("asample")[-1].body)
    assert asked["sampling_params"] == {
        "max_tokens": 3, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "seed": 11,
        "stop": ["x", "yy"],
    }  # fmt: skip
    assert asked["prompt"]["chunks"][0]["tokens"] == [104, 101]


def test_a_prompt_from_a_file_and_from_a_pipe(
    trained: Trained, tinkex: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.txt").write_text("hel\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("hel\n"))
    for words in (("--prompt-file", str(tmp_path / "p.txt")), ("--prompt-file", "-")):
        result = tinkex(
            "sample", *words, "--model-path", trained.path, *SHORT, "--json",
            context=trained.context,
        )  # fmt: skip
        assert result.json["prompt_tokens"] == list(b"hel")


def test_a_chat_prompt_is_laid_out(trained: Trained, tinkex: RunCli) -> None:
    found = tinkex(
        "sample", "--prompt", "hi", "--chat", *SHORT, "--json", context=trained.context
    ).json
    assert bytes(found["prompt_tokens"]).decode() == "User: hi\n\nAssistant:"


@pytest.mark.parametrize("words", [(), ("--prompt", "a", "--prompt-file", "b")])
def test_no_prompt_or_two_are_usage_errors_before_anything_is_sent(
    words: tuple[str, ...], trained: Trained, tinkex: RunCli
) -> None:
    before = len(trained.server.calls())
    result = tinkex("run", "sample", *words, context=trained.context)
    assert (result.exit_code, result.out) == (2, "")
    assert "prompt" in result.err
    assert len(trained.server.calls()) == before


def test_a_tokenizer_that_fails_is_the_users_error_and_is_named(
    serve: Serve, tinkex: RunCli
) -> None:
    context = context_for(serve(api_keys={KEY}, models=("tinkex/mute",)).url)
    result = tinkex("sample", "--prompt", "a", "--json", context=context)
    assert result.exit_code == 1
    assert "Failed to load tokenizer 'tinkex/mute': there is no such" in result.failure["message"]
    assert result.failure["category"] == "user"
    assert "--tokenizer" in result.failure["hint"]


def test_token_ids_do_without_a_tokenizer(serve: Serve, tinkex: RunCli) -> None:
    context = context_for(serve(api_keys={KEY}, models=("tinkex/mute",)).url)
    result = tinkex("sample", "--prompt-tokens", "1,2", *SHORT, context=context)
    assert result.exit_code == 0
    assert all(word.isdecimal() for word in result.out.split())
    assert "'tinkex/mute': there is no such tokenizer; token ids are shown" in result.err
    found = tinkex("sample", "--prompt-tokens", "1,2", *SHORT, "--json", context=context).json
    assert found["sequences"][0]["text"] is None


@pytest.mark.parametrize("format", ["table", "json"])
def test_the_result_goes_to_a_file_whole(
    format: str, trained: Trained, tinkex: RunCli, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "out"
    result = tinkex(
        "sample", "--prompt", "hel", "--model-path", trained.path, *SHORT, "-o", str(path),
        "-f", format, context=trained.context,
    )  # fmt: skip
    assert result.exit_code == 0
    assert [entry.name for entry in path.parent.iterdir()] == ["out"]
    if format == "json":
        assert json.loads(result.out) == {"output": str(path), "num_tokens": 4}
        assert json.loads(path.read_text())["sequences"][0]["text"] == "llll"
    else:
        assert (result.out, path.read_text()) == ("", "llll\n")
        assert f"Wrote {path}" in result.err


def test_a_device_is_never_replaced_by_a_file(trained: Trained, tinkex: RunCli) -> None:
    words = ("sample", "--prompt", "a", *SHORT, "-o")
    result = tinkex(*words, "/dev/null", context=trained.context)
    assert (result.exit_code, result.out) == (1, "")
    assert "must be a file" in result.err
    assert Path("/dev/null").is_char_device()
    assert "Sampling" not in result.err, "it is said before any work"


def test_what_a_model_says_moves_no_cursor(
    trained: Trained, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tinkex.engine.fake.toy_tokenizer.ToyTokenizer.decode", lambda *a, **k: "a\x1b[2Jb\nc"
    )
    words = ("sample", "--prompt", "a", *SHORT)
    terminal = trained.context._replace(stdout=Screen(is_terminal=True, width=80))
    assert tinkex(*words, context=terminal).out == "a\\x1b[2Jb\nc\n"
    assert tinkex(*words, context=trained.context).out == "a\x1b[2Jb\nc\n"


def test_a_path_that_is_no_address_is_a_models_name(trained: Trained, tinkex: RunCli) -> None:
    words = ("sample", "--prompt", "a", *SHORT, "--json")
    found = tinkex(*words, "--model-path", BASE_MODEL, context=trained.context).json
    assert (found["base_model"], found["model_path"]) == (BASE_MODEL, None)
    both = ("--model-path", "x", "--base-model", BASE_MODEL)
    assert tinkex(*words, *both, context=trained.context).exit_code == 2


@pytest.mark.parametrize("bare", ["0001", "weights/0001", "run/weights/0001"])
def test_a_bare_checkpoint_id_is_no_models_name(
    bare: str, trained: Trained, tinkex: RunCli
) -> None:
    words = ("sample", "--prompt", "a", "--model-path", bare)
    refused = tinkex(*words, context=trained.context)
    assert refused.exit_code == 1
    assert f"Invalid tinker path: {bare!r}; expected tinker://<run>/" in refused.err


def test_a_model_that_is_not_there_is_the_users_error(trained: Trained, tinkex: RunCli) -> None:
    result = tinkex(
        "sample", "--prompt", "a", "--model-path", "tinker://no/weights/x", "--json",
        context=trained.context,
    )  # fmt: skip
    assert (result.exit_code, result.failure["status"], result.failure["category"]) == (
        1,
        404,
        "user",
    )
