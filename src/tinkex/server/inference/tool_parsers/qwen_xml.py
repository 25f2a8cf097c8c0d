"""Tool calls of Qwen coder models, whose arguments are elements:

`<tool_call><function=f><parameter=x>value</parameter></function></tool_call>`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from tinkex.server.inference.string_matcher import Expected, Match, StringMatcher
from tinkex.server.inference.tool_parsers.call_parts import OfferedTools
from tinkex.server.inference.tool_parsers.json_scanner import write_json
from tinkex.server.inference.tool_parsers.parameter_values import ParameterValue, parameter_types
from tinkex.server.inference.tool_parsers.state_parser import StateParser

START = "<tool_call>"
END = "</tool_call>"
FUNCTION_START = "<function="
FUNCTION_END = "</function>"
PARAMETER_START = "<parameter="
PARAMETER_END = "</parameter>"
_NAME = re.compile(r"[^<>\n]*")
MAX_NAME_CHARS = 256


class QwenXmlParser(StateParser):
    """Text, then any number of calls; the arguments are written as JSON while they arrive."""

    def __init__(self, tools: OfferedTools) -> None:
        super().__init__(tools, (START, FUNCTION_START))
        self._schemas = tools.schemas
        self._schema: Mapping[str, object] = {}
        self._name = ""
        self._after_name: Callable[[Expected], str] = self._on_function_name
        self._num_parameters = 0
        self._value = ParameterValue(frozenset())
        self._value_end = StringMatcher([PARAMETER_END])

    def _on_mark(self, mark: str) -> None:
        if mark == FUNCTION_START:
            self._read_name(self._on_function_name)
        else:
            self._expect(FUNCTION_START, then=self._on_function)

    def _on_function(self, found: Expected) -> str:
        if found.mark is None:
            return self._on_mismatch(found)
        self._raw += found.skipped + found.mark
        self._read_name(self._on_function_name)
        return found.rest

    # --- names ------------------------------------------------------------------------------

    def _read_name(self, then: Callable[[Expected], str]) -> None:
        self._name = ""
        self._after_name = then
        self._state = self._in_name

    def _in_name(self, text: str) -> str:
        taken = _NAME.match(text[: MAX_NAME_CHARS - len(self._name)])
        assert taken is not None
        self._name += taken[0]
        rest = text[taken.end() :]
        if rest:
            if self._after_name == self._on_function_name:
                self._raw += self._name
            self._expect(">", then=self._after_name)
        return rest

    def _on_function_name(self, found: Expected) -> str:
        name = self._name.strip()
        if found.mark is None or not self._writer.is_offered(name):
            return self._on_mismatch(found)
        self._raw = ""
        self._schema = self._schemas[name]
        self._num_parameters = 0
        self._writer.start_call(name)
        self._expect_parameter()
        return found.rest

    # --- parameters -------------------------------------------------------------------------

    def _expect_parameter(self) -> None:
        self._expect(PARAMETER_START, FUNCTION_END, END, then=self._on_parameter)

    def _on_parameter(self, found: Expected) -> str:
        if found.mark == PARAMETER_START:
            self._read_name(self._on_parameter_name)
            return found.rest
        # A call ends at its end mark, or before text that cannot be a part of it.
        self._end_call()
        if found.mark == FUNCTION_END:
            self._expect(END, then=self._on_end)
            return found.rest
        self._state = self._in_text
        return found.rest if found.mark else found.skipped + found.rest

    def _on_parameter_name(self, found: Expected) -> str:
        if found.mark is None:
            self._end_call()
            self._raw = PARAMETER_START + self._name
            return self._on_mismatch(found)
        name = self._name.strip()
        separator = ", " if self._num_parameters else "{"
        self._writer.add_arguments(f"{separator}{write_json(name)}: ")
        self._num_parameters += 1
        self._value = ParameterValue(parameter_types(self._schema, name))
        self._value_end = StringMatcher([PARAMETER_END])
        self._state = self._in_value
        return found.rest

    def _in_value(self, text: str) -> str:
        found = self._value_end.feed(text)
        if not isinstance(found, Match):
            self._writer.add_arguments(self._value.feed(found))
            return ""
        self._writer.add_arguments(self._value.feed(found.before) + self._value.finish())
        self._expect_parameter()
        return found.rest

    # --- the end ----------------------------------------------------------------------------

    def _end_call(self) -> None:
        self._writer.add_arguments("}" if self._num_parameters else "{}")
        self._writer.end_call()

    def _on_end(self, found: Expected) -> str:
        self._state = self._in_text
        return found.rest if found.mark else found.skipped + found.rest

    def _after_object(self) -> None:
        raise AssertionError("calls are not objects")

    def _finish_state(self) -> None:
        is_expecting = self._state == self._in_expected
        if is_expecting and self._on_expected == self._on_parameter:
            # Only end marks are missing.
            self._end_call()
        elif self._state == self._in_name and self._after_name == self._on_function_name:
            self._writer.add_text(self._raw + self._name)
        elif not (is_expecting and self._on_expected in {self._on_end, self._on_parameter_name}):
            super()._finish_state()


def qwen_xml_opening(name: str | None, template: str) -> str:
    """Return the beginning of a call of a function, or of any function."""
    return f"{START}\n{FUNCTION_START}" + ("" if name is None else f"{name}>\n")
