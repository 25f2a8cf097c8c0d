"""Tool calls of Llama 3: the whole answer is `{"name": ..., "parameters": {...}}`."""

from __future__ import annotations

from tinkex.server.inference.string_matcher import Expected
from tinkex.server.inference.tool_parsers.call_parts import OfferedTools
from tinkex.server.inference.tool_parsers.json_scanner import write_json
from tinkex.server.inference.tool_parsers.state_parser import StateParser

PYTHON_TAG = "<|python_tag|>"
_SEPARATORS = (";", ",")


class Llama3Parser(StateParser):
    """Calls at the beginning of the answer, perhaps after a tag and separated by semicolons."""

    def __init__(self, tools: OfferedTools) -> None:
        super().__init__(tools)
        self._expect(PYTHON_TAG, "{", then=self._on_start)

    def _on_mark(self, mark: str) -> None:
        raise AssertionError("text has no marks")

    def _on_start(self, found: Expected) -> str:
        if found.mark is None or found.mark == "{":
            return self._on_object(found)
        self._raw += found.skipped + found.mark
        self._expect_object()
        return found.rest

    def _after_object(self) -> None:
        self._expect(PYTHON_TAG, "{", *_SEPARATORS, then=self._on_next)

    def _on_next(self, found: Expected) -> str:
        if found.mark not in _SEPARATORS:
            return self._on_start(found)
        self._raw += found.skipped + found.mark
        self._expect(PYTHON_TAG, "{", then=self._on_start)
        return found.rest

    def _finish_state(self) -> None:
        if self._state == self._in_expected and self._raw.strip() in _SEPARATORS:
            # A separator without a next call is not text.
            self._raw = ""
        super()._finish_state()


def llama3_opening(name: str | None, template: str) -> str:
    """Return the beginning of a call of a function, or of any function."""
    return '{"name": "' if name is None else f'{{"name": {write_json(name)}, "parameters":'
