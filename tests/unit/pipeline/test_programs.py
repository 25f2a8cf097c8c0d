from __future__ import annotations

import sys

import pytest

from tinkex.errors import ConfigError
from tinkex.pipeline.programs import run_program


class Gone:
    """A terminal that was closed."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    def flush(self) -> None:
        raise BrokenPipeError(32, "Broken pipe")


def interrupted() -> int:
    raise KeyboardInterrupt


def refused() -> int:
    raise ConfigError("there is no data", hint="Name a file.")


def test_what_went_wrong_is_a_sentence_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program(refused) == 1
    assert capsys.readouterr().err == "Error: there is no data\nName a file.\n"


@pytest.mark.parametrize(("work", "code"), [(interrupted, 130), (refused, 1), (lambda: 7, 7)])
def test_a_terminal_that_is_gone_changes_no_exit_code(
    monkeypatch: pytest.MonkeyPatch, work: object, code: int
) -> None:
    monkeypatch.setattr(sys, "stderr", Gone())
    assert callable(work)
    assert run_program(work) == code
