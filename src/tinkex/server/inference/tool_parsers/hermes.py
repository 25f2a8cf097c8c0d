"""Tool calls of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from tinkex.server.inference.string_matcher import Expected
from tinkex.server.inference.tool_parsers.call_parts import OfferedTools
from tinkex.server.inference.tool_parsers.json_scanner import write_json
from tinkex.server.inference.tool_parsers.state_parser import StateParser

START = "<tool_call>"
END = "</tool_call>"


class HermesParser(StateParser):
    """Text, then any number of calls between marks."""

    def __init__(self, tools: OfferedTools) -> None:
        super().__init__(tools, (START,))

    def _on_mark(self, mark: str) -> None:
        self._expect_object()

    def _after_object(self) -> None:
        self._expect(END, then=self._on_end)

    def _on_end(self, found: Expected) -> str:
        self._state = self._in_text
        return found.rest if found.mark else found.skipped + found.rest

    def _finish_state(self) -> None:
        # An incomplete mark after a whole call is not text.
        if self._on_expected != self._on_end or self._state != self._in_expected:
            super()._finish_state()


def hermes_opening(name: str | None, template: str) -> str:
    """Return the beginning of a call of a function, or of any function."""
    newline = "\n" if f"{START}\\n" in template or f"{START}\n" in template else ""
    if name is None:
        return START + newline
    return f'{START}{newline}{{"name": {write_json(name)}, "arguments":'
