"""Parsers of the tool calls of model families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tinkex.server.inference.tool_parsers import hermes, llama3, mistral, qwen_xml
from tinkex.server.inference.tool_parsers.call_parts import OfferedTools as OfferedTools
from tinkex.server.inference.tool_parsers.call_parts import ToolParser as ToolParser


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFamily:
    """How the models of a family write tool calls."""

    name: str
    new_parser: Callable[[OfferedTools], ToolParser]
    opening: Callable[[str | None, str], str]
    """The beginning of a call of a function, or of any function; depends on the chat template."""
    marks: frozenset[str]
    """Texts of tokens that are parts of calls, although some tokenizers call them special."""
    call_end: str | None = None
    """The text after each call, if there is one."""
    has_short_call_ids: bool = False
    """Whether chat templates refuse ids that do not have nine letters and digits."""


FAMILIES: Mapping[str, ToolFamily] = {
    family.name: family
    for family in (
        ToolFamily(
            name="hermes",
            new_parser=hermes.HermesParser,
            opening=hermes.hermes_opening,
            marks=frozenset({hermes.START, hermes.END}),
            call_end=hermes.END,
        ),
        ToolFamily(
            name="qwen-xml",
            new_parser=qwen_xml.QwenXmlParser,
            opening=qwen_xml.qwen_xml_opening,
            marks=frozenset({qwen_xml.START, qwen_xml.END}),
            call_end=qwen_xml.FUNCTION_END,
        ),
        ToolFamily(
            name="llama3",
            new_parser=llama3.Llama3Parser,
            opening=llama3.llama3_opening,
            marks=frozenset({llama3.PYTHON_TAG}),
        ),
        ToolFamily(
            name="mistral",
            new_parser=mistral.MistralParser,
            opening=mistral.mistral_opening,
            marks=frozenset({mistral.START, mistral.CALL_ID, mistral.ARGUMENTS}),
            has_short_call_ids=True,
        ),
    )
}


def detect_family(template: str) -> ToolFamily | None:
    """Return the family whose calls a chat template describes; None if it has no tools."""
    if mistral.START in template:
        return FAMILIES["mistral"]
    if qwen_xml.FUNCTION_START in template:
        return FAMILIES["qwen-xml"]
    if hermes.START in template:
        return FAMILIES["hermes"]
    describes_parameters = "tools" in template and '"parameters"' in template
    if llama3.PYTHON_TAG in template or describes_parameters:
        return FAMILIES["llama3"]
    return None
