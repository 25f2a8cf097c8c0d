"""`run sample`, its short form and its alias, against a server."""

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
def test_three_names_of_the_command(
    words: tuple[str, ...], finished: Trained, tinkex: RunCli
) -> None:
    result = tinkex(
        *words, "--prompt", "hel", "--model-path", finished.path, *SHORT, context=finished.context
    )
    assert (result.exit_code, result.out) == (0, "llll\n")
    assert result.err.splitlines() == [
        f"Sampling 1 sample of up to 4 tokens from {finished.path} ...",
        f"Done: 4 tokens in {result.err.split()[-1]}",
    ]


def test_only_model_is_the_default(finished: Trained, tinkex: RunCli) -> None:
    found = tinkex("sample", "--prompt", "a", *SHORT, "--json", context=finished.context).json
    assert found["base_model"] == BASE_MODEL


def test_ambiguous_model_is_an_error(serve: Serve, tinkex: RunCli) -> None:
    server = serve(api_keys={KEY}, models=("a/one", "a/two"))
    result = tinkex("sample", "--prompt", "a", context=context_for(server.url))
    assert (result.exit_code, result.out) == (1, "")
    assert "the server has: a/one, a/two" in result.err


def test_json_has_response_and_text(finished: Trained, tinkex: RunCli) -> None:
    found = tinkex(
        "sample", "--prompt", "hel", "--model-path", finished.path, "--num-samples", "2", *SHORT,
        "--logprobs", "-f", "json", context=finished.context,
    ).json  # fmt: skip
    assert (found["type"], found["prompt_tokens"]) == ("sample", list(b"hel"))
    assert [sequence["text"] for sequence in found["sequences"]] == ["llll", "llll"]
    first = found["sequences"][0]
    assert (first["tokens"], first["stop_reason"]) == (list(b"llll"), "length")
    assert len(first["logprobs"]) == 4
    assert found["prompt_logprobs"][0] is None
    assert len(found["prompt_logprobs"]) == 3


def test_several_samples_have_headers(finished: Trained, tinkex: RunCli) -> None:
    shown = tinkex(
        "sample", "--prompt", "hel", "--model-path", finished.path, "--num-samples", "2", *SHORT,
        context=finished.context,
    ).out  # fmt: skip
    assert shown == (
        "--- sample 1 of 2 (4 tokens, length) ---\nllll\n\n"
        "--- sample 2 of 2 (4 tokens, length) ---\nllll\n"
    )


def test_sampling_parameters_are_sent(finished: Trained, tinkex: RunCli) -> None:
    result = tinkex(
        "run", "--base-model", BASE_MODEL, "--prompt-tokens", "[104, 101]", "--max-tokens", "3",
        "--temperature", "0.5", "--top-k", "7", "--top-p", "0.9", "--seed", "11", "--stop", "x",
        "--stop", "yy", "--http-pool", "mine", "--timeout", "20s", context=finished.context,
    )  # fmt: skip
    assert result.exit_code == 0, result.err
    asked = json.loads(finished.server.calls("asample")[-1].body)
    assert asked["sampling_params"] == {
        "max_tokens": 3, "temperature": 0.5, "top_k": 7, "top_p": 0.9, "seed": 11,
        "stop": ["x", "yy"],
    }  # fmt: skip
    assert asked["prompt"]["chunks"][0]["tokens"] == [104, 101]


def test_prompt_from_file_and_stdin(
    finished: Trained, tinkex: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "p.txt").write_text("hel\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("hel\n"))
    for words in (("--prompt-file", str(tmp_path / "p.txt")), ("--prompt-file", "-")):
        result = tinkex(
            "sample", *words, "--model-path", finished.path, *SHORT, "--json",
            context=finished.context,
        )  # fmt: skip
        assert result.json["prompt_tokens"] == list(b"hel")


def test_chat_prompt_is_rendered(finished: Trained, tinkex: RunCli) -> None:
    found = tinkex(
        "sample", "--prompt", "hi", "--chat", *SHORT, "--json", context=finished.context
    ).json
    assert bytes(found["prompt_tokens"]).decode() == "User: hi\n\nAssistant:"


@pytest.mark.parametrize("words", [(), ("--prompt", "a", "--prompt-file", "b")])
def test_missing_or_double_prompt_sends_no_request(
    words: tuple[str, ...], finished: Trained, tinkex: RunCli
) -> None:
    before = len(finished.server.calls())
    result = tinkex("run", "sample", *words, context=finished.context)
    assert (result.exit_code, result.out) == (2, "")
    assert "prompt" in result.err
    assert len(finished.server.calls()) == before


def test_tokenizer_error_is_a_user_error(serve: Serve, tinkex: RunCli) -> None:
    context = context_for(serve(api_keys={KEY}, models=("tinkex/mute",)).url)
    result = tinkex("sample", "--prompt", "a", "--json", context=context)
    assert result.exit_code == 1
    assert "Failed to load tokenizer 'tinkex/mute': there is no such" in result.failure["message"]
    assert result.failure["category"] == "user"
    assert "--tokenizer" in result.failure["hint"]


def test_token_ids_need_no_tokenizer(serve: Serve, tinkex: RunCli) -> None:
    context = context_for(serve(api_keys={KEY}, models=("tinkex/mute",)).url)
    result = tinkex("sample", "--prompt-tokens", "1,2", *SHORT, context=context)
    assert result.exit_code == 0
    assert all(word.isdecimal() for word in result.out.split())
    assert "'tinkex/mute': there is no such tokenizer; token ids are shown" in result.err
    found = tinkex("sample", "--prompt-tokens", "1,2", *SHORT, "--json", context=context).json
    assert found["sequences"][0]["text"] is None


@pytest.mark.parametrize("format", ["table", "json"])
def test_sample_is_written_to_the_output_file(
    format: str, finished: Trained, tinkex: RunCli, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "out"
    result = tinkex(
        "sample", "--prompt", "hel", "--model-path", finished.path, *SHORT, "-o", str(path),
        "-f", format, context=finished.context,
    )  # fmt: skip
    assert result.exit_code == 0
    assert [entry.name for entry in path.parent.iterdir()] == ["out"]
    if format == "json":
        assert json.loads(result.out) == {"output": str(path), "num_tokens": 4}
        assert json.loads(path.read_text())["sequences"][0]["text"] == "llll"
    else:
        assert (result.out, path.read_text()) == ("", "llll\n")
        assert f"Wrote {path}" in result.err


def test_output_device_is_rejected(finished: Trained, tinkex: RunCli) -> None:
    words = ("sample", "--prompt", "a", *SHORT, "-o")
    result = tinkex(*words, "/dev/null", context=finished.context)
    assert (result.exit_code, result.out) == (1, "")
    assert "must be a file" in result.err
    assert Path("/dev/null").is_char_device()
    assert "Sampling" not in result.err, "it is said before any work"


def test_model_output_is_escaped_on_terminal(
    finished: Trained, tinkex: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tinkex.engine.fake.toy_tokenizer.ToyTokenizer.decode", lambda *a, **k: "a\x1b[2Jb\nc"
    )
    words = ("sample", "--prompt", "a", *SHORT)
    terminal = finished.context._replace(stdout=Screen(is_terminal=True, width=80))
    assert tinkex(*words, context=terminal).out == "a\\x1b[2Jb\nc\n"
    assert tinkex(*words, context=finished.context).out == "a\x1b[2Jb\nc\n"


def test_model_path_without_scheme_is_a_model_name(finished: Trained, tinkex: RunCli) -> None:
    words = ("sample", "--prompt", "a", *SHORT, "--json")
    found = tinkex(*words, "--model-path", BASE_MODEL, context=finished.context).json
    assert (found["base_model"], found["model_path"]) == (BASE_MODEL, None)
    both = ("--model-path", "x", "--base-model", BASE_MODEL)
    assert tinkex(*words, *both, context=finished.context).exit_code == 2


@pytest.mark.parametrize("bare", ["0001", "weights/0001", "run/weights/0001"])
def test_bare_checkpoint_id_is_rejected(bare: str, finished: Trained, tinkex: RunCli) -> None:
    words = ("sample", "--prompt", "a", "--model-path", bare)
    refused = tinkex(*words, context=finished.context)
    assert refused.exit_code == 1
    assert f"Invalid tinker path: {bare!r}; expected tinker://<run>/" in refused.err


def test_unknown_model_is_a_user_error(finished: Trained, tinkex: RunCli) -> None:
    result = tinkex(
        "sample", "--prompt", "a", "--model-path", "tinker://no/weights/x", "--json",
        context=finished.context,
    )  # fmt: skip
    assert (result.exit_code, result.failure["status"], result.failure["category"]) == (
        1,
        404,
        "user",
    )
