"""With `-f json`, stdout is one JSON document or empty, for every command and error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.cli.command_examples import EXAMPLES, Example, Stage, all_commands
from tests.integration.cli.command_examples import stage as stage
from tests.integration.conftest import KEY, Serve

WRONG = "tml-wrong"
ESCAPE = "\x1b"
#: `-f json` before or after the command.
PLACES = ("before", "behind")
#: Groups that run without a subcommand.
ALONE = {"serve", "usage"}
GROUPS = sorted({name.split()[0] for name in EXAMPLES if " " in name} - ALONE)
OF_SERVERS = [name for name, one in EXAMPLES.items() if not (one.is_local or one.is_verdict)]
#: List commands, and the key of their list.
LISTS: dict[str, Any] = {
    "run list": {"runs": [], "total": 0, "shown": 0},
    "checkpoint list": {"checkpoints": [], "total": 0, "shown": 0},
    "session list": None,
    "model list --home {dir}/empty": None,  # one is always there
    "usage tokens": None,
    "usage storage": None,
    "billing checkpoint-storage": None,
    "key list": [],
}


def documents(out: str, example: Example) -> list[Any]:
    """Parse stdout as one JSON document or one per line."""
    assert ESCAPE not in out
    return [json.loads(part) for part in (out.splitlines() if example.is_lines else [out])]


def error_of(out: str, err: str) -> dict[str, Any]:
    """Parse the error on stderr; stdout must be empty."""
    assert out == ""
    assert ESCAPE not in err
    said = json.loads(err)
    assert said.keys() == {"error"}
    found: dict[str, Any] = said["error"]
    assert found["message"]
    assert found["type"]
    assert "Traceback" not in err
    return found


def test_every_command_has_an_example() -> None:
    """Commands that run or need server processes have no example; they have their own tests."""
    of_clusters = ("drain", "nodes", "up", "down", "scale")
    with_own_tests = ["serve", "worker", "pipeline tensorboard"]
    with_own_tests += [f"cluster {name}" for name in of_clusters]
    assert sorted([*EXAMPLES, *with_own_tests]) == sorted(all_commands())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", EXAMPLES)
def test_stdout_is_one_json_document(name: str, place: str, stage: Stage) -> None:
    example = EXAMPLES[name]
    words = stage.prepare(example)
    words = ["-f", "json", *words] if place == "before" else [*words, "--format=json"]
    if place == "behind" and name == "serve logs":
        words = ["serve", "logs", "--json"]
    result = stage.run(*words, stdin=example.stdin)
    assert result.exit_code == example.exit_code, result.err
    found = documents(result.out, example)
    assert len(found) >= 1
    assert all(isinstance(one, dict | list) for one in found)
    assert ESCAPE not in result.err


@pytest.mark.parametrize("name", EXAMPLES)
def test_pipe_output_has_no_escape_codes(name: str, stage: Stage) -> None:
    example = EXAMPLES[name]
    result = stage.run(*stage.prepare(example), stdin=example.stdin)
    assert result.exit_code == example.exit_code, result.err
    assert ESCAPE not in result.out + result.err


@pytest.mark.parametrize("name", EXAMPLES)
def test_usage_error_is_json_with_exit_code_2(name: str, stage: Stage) -> None:
    for words in ([*name.split(), "--nosuch", "--json"], ["--json", *name.split(), "--nosuch"]):
        result = stage.run(*words)
        assert result.exit_code == 2
        assert "--nosuch" in error_of(result.out, result.err)["message"]


@pytest.mark.parametrize("words", ["", *GROUPS])
def test_unknown_command_error_is_json(words: str, stage: Stage) -> None:
    for more in (["--json"], ["nosuch", "--json"]):
        result = stage.run(*words.split(), *more)
        assert result.exit_code == 2
        assert error_of(result.out, result.err)["type"]


@pytest.mark.parametrize("name", OF_SERVERS)
def test_server_error_is_json(name: str, stage: Stage) -> None:
    example = EXAMPLES[name]
    words = stage.prepare(example)
    stage.monkeypatch.setenv("TINKER_API_KEY", WRONG)
    result = stage.run(*words, "--json", stdin=WRONG if name == "auth login" else example.stdin)
    assert result.exit_code == 1
    assert error_of(result.out, result.err)["category"] == "user"


@pytest.mark.parametrize("name", [n for n, one in EXAMPLES.items() if one.is_verdict])
def test_failed_check_is_still_a_result(name: str, stage: Stage) -> None:
    stage.monkeypatch.setenv("TINKER_API_KEY", WRONG)
    result = stage.run(*EXAMPLES[name].words.split(), "--json")
    assert result.exit_code == 1
    assert isinstance(json.loads(result.out), dict | list)
    assert result.err == ""


@pytest.mark.parametrize("words", LISTS)
def test_an_empty_list_is_json(words: str, stage: Stage, serve: Serve) -> None:
    stage.monkeypatch.setenv("TINKER_BASE_URL", serve(api_keys={KEY}).url)
    result = stage.run(*stage.fill(words), "--json")
    assert (result.exit_code, result.err) == (0, "")
    found = json.loads(result.out)
    assert LISTS[words] is None or found == LISTS[words]


@pytest.mark.parametrize(
    "words", ["checkpoint delete {training}", "checkpoint unpublish {training}"]
)
@pytest.mark.parametrize("answer", ["", "n\n", "nonsense\n", "n"])
def test_cancelled_confirmation_is_json(words: str, answer: str, stage: Stage) -> None:
    result = stage.run(*stage.fill(words), "--json", stdin=answer, is_person=True)
    assert result.exit_code == 1
    assert json.loads(result.out)["cancelled"] is True
    assert result.err.endswith("Cancelled.\n")
