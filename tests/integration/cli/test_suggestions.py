"""Suggestions for mistyped command lines."""

from __future__ import annotations

import pytest

from tests.integration.cli.conftest import RunCli


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("chekpoint",), "checkpoint"),
        (("checkpoint", "dowload"), "download"),
        (("run", "lst"), "list"),
        (("serve", "sttaus"), "status"),
    ],
)
def test_similar_commands_are_suggested(words: tuple[str, ...], meant: str, tinkex: RunCli) -> None:
    refused = tinkex(*words)
    assert (refused.exit_code, refused.out) == (2, "")
    assert f"Did you mean '{meant}'?" in refused.err.replace('"', "'")


def test_invalid_prompt_tokens_error(tinkex: RunCli) -> None:
    refused = tinkex("sample", "--prompt-tokens", "1,b")
    assert refused.exit_code == 2
    assert "neither a list of token ids such as 1,2,3 nor a file" in refused.err
    refused = tinkex("sample", "--prompt-file", "nosuch.txt")
    assert refused.exit_code == 1
    assert "nosuch.txt cannot be used: No such file or directory\nCheck the spelling" in refused.err
