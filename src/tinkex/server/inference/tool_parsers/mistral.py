"""Tool calls of Mistral: a list of objects, or `name[ARGS]{...}`, after `[TOOL_CALLS]`."""

from __future__ import annotations

import re

from tinkex.server.inference.string_matcher import Expected
from tinkex.server.inference.tool_parsers.call_parts import OfferedTools
from tinkex.server.inference.tool_parsers.json_scanner import JsonScanner, write_json
from tinkex.server.inference.tool_parsers.state_parser import StateParser

START = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"
_NAME = re.compile(r"[A-Za-z0-9_.:/\-]*")
MAX_NAME_CHARS = 256


class MistralParser(StateParser):
    """Text, then a list of calls, or calls that each begin with the mark."""

    def __init__(self, tools: OfferedTools) -> None:
        super().__init__(tools, (START,))
        self._name = ""
        self._num_id_chars = 0
        self._scanner = JsonScanner()

    def _on_mark(self, mark: str) -> None:
        self._expect("[", then=self._on_list_or_name)

    def _on_list_or_name(self, found: Expected) -> str:
        self._raw += found.skipped
        if found.mark is not None:
            self._raw += found.mark
            self._expect_object()
        else:
            self._name = ""
            self._state = self._in_name
        return found.rest

    def _after_object(self) -> None:
        self._expect(",", "]", then=self._on_list_separator)

    def _on_list_separator(self, found: Expected) -> str:
        if found.mark == ",":
            self._raw = found.mark
            self._expect_object()
            return found.rest
        self._state = self._in_text
        return found.rest if found.mark else found.skipped + found.rest

    def _in_name(self, text: str) -> str:
        """Read the name of a function up to a character that it cannot contain."""
        taken = _NAME.match(text[: MAX_NAME_CHARS - len(self._name)])
        assert taken is not None
        self._name += taken[0]
        rest = text[taken.end() :]
        if rest:
            self._raw += self._name
            self._expect(ARGUMENTS, CALL_ID, "{", then=self._on_name_end)
        return rest

    def _on_name_end(self, found: Expected) -> str:
        is_call = found.mark is not None and self._writer.is_offered(self._name)
        if not is_call:
            return self._on_mismatch(found)
        if found.mark == CALL_ID:
            self._raw += found.skipped + found.mark
            self._num_id_chars = 0
            self._state = self._in_call_id
            return found.rest
        return self._on_arguments_mark(found)

    def _in_call_id(self, text: str) -> str:
        taken = _NAME.match(text[: MAX_NAME_CHARS - self._num_id_chars])
        assert taken is not None
        self._num_id_chars += taken.end()
        self._raw += taken[0]
        rest = text[taken.end() :]
        if rest:
            self._expect(ARGUMENTS, "{", then=self._on_arguments_mark)
        return rest

    def _on_arguments_mark(self, found: Expected) -> str:
        if found.mark == ARGUMENTS:
            self._raw += found.skipped + found.mark
            self._expect("{", then=self._on_arguments_mark)
            return found.rest
        if found.mark is None:
            return self._on_mismatch(found)
        self._raw = ""
        self._writer.start_call(self._name)
        self._scanner = JsonScanner()
        self._state = self._in_arguments
        return "{" + found.rest

    def _in_arguments(self, text: str) -> str:
        end = self._scanner.feed(text)
        if end is None:
            self._writer.add_arguments(text)
            return ""
        self._writer.add_arguments(text[:end])
        self._writer.end_call()
        self._state = self._in_text
        return text[end:]

    def _finish_state(self) -> None:
        if self._state == self._in_name:
            self._writer.add_text(self._raw + self._name)
        elif self._state == self._in_call_id:
            self._writer.add_text(self._raw)
        else:
            super()._finish_state()


def mistral_opening(name: str | None, template: str) -> str:
    """Return the beginning of a call of a function, or of any function."""
    if name is None:
        return START
    if ARGUMENTS in template:
        return f"{START}{name}{ARGUMENTS}"
    return f'{START}[{{"name": {write_json(name)}, "arguments":'
