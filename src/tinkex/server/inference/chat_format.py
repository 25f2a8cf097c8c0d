"""How conversations with a model are written as text, and how its answers are parsed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tinkex.data.rendering import Renderer, find_end_of_turn
from tinkex.errors import InvalidInput
from tinkex.server.inference.answer_parser import AnswerParser, AnswerSyntax
from tinkex.server.inference.chat_request import ChatRequest, SamplingSettings
from tinkex.server.inference.reasoning import (
    ReasoningMarks,
    ReasoningParser,
    ends_in_reasoning,
    find_reasoning_marks,
)
from tinkex.server.inference.token_texts import TokenTexts
from tinkex.server.inference.tool_messages import adapt_call_ids, describe_tools
from tinkex.server.inference.tool_parsers import FAMILIES, OfferedTools, ToolFamily, detect_family
from tinkex.text import Tokenizer, encode, get_chat_template, render_chat_text

#: The next message begins with one of these if the model has no chat template.
_PLAIN_TURN_ENDS = ("\nUser:", "\nSystem:", "\nTool:")
_PLAIN_GENERATION_PROMPT = "Assistant:"


class ToolsUnsupported(InvalidInput):
    """The model's chat template has no tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """The prompt of a conversation, and what its answer depends on."""

    tokens: Sequence[int]
    starts_in_reasoning: bool = False
    """Whether the answer continues reasoning that the prompt begins."""
    forced_text: str = ""
    """The end of the prompt that is the beginning of a tool call."""
    end_texts: tuple[str, ...] = ()
    """Texts that end the answer, in addition to those of the request."""


@dataclass(frozen=True)
class ChatFormat:
    """The chat format of one model; made once per model, because it looks at the tokenizer."""

    model: str
    tokenizer: Tokenizer
    tool_parser: str | None = None
    """The family of the model's tool calls; None detects it from the chat template."""
    template: str = field(init=False)
    """Empty without a chat template."""
    texts: TokenTexts = field(init=False)
    family: ToolFamily | None = field(init=False)
    marks: ReasoningMarks = field(init=False)
    end_tokens: tuple[int, ...] = field(init=False)
    """The tokens that end a turn in the chat template."""

    def __post_init__(self) -> None:
        template = get_chat_template(self.tokenizer)
        found = FAMILIES.get(self.tool_parser) if self.tool_parser else detect_family(template)
        renderer = Renderer(self.tokenizer)
        values = {
            "template": template,
            "texts": TokenTexts(self.tokenizer),
            "family": found if template else None,
            "marks": find_reasoning_marks(template),
            "end_tokens": tuple(find_end_of_turn(renderer)) if template else (),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def render(self, request: ChatRequest) -> RenderedChat:
        """Render a conversation; raises InvalidInput for what the model's format cannot express."""
        tools = request.tools if _offers_tools(request) else ()
        family = self._require_tools() if tools else None
        if not self.template:
            return self._render_plain(request)
        text = self._render_template(request, tools)
        starts_in_reasoning = self._is_in_reasoning(request, text)
        forced = ""
        if family and (request.forced_tool or request.tool_choice == "required"):
            forced = family.opening(request.forced_tool, self.template)
        if starts_in_reasoning and (forced or request.sampling.grammar is not None):
            # A call or a grammar leaves no space for reasoning.
            text = f"{text.rstrip()}\n{self.marks.end}\n\n"
            starts_in_reasoning = False
        return RenderedChat(
            tokens=encode(self.tokenizer, text + forced, add_special_tokens=False),
            starts_in_reasoning=starts_in_reasoning,
            forced_text=forced,
        )

    def extend_sampling(self, request: ChatRequest, prompt: RenderedChat) -> SamplingSettings:
        """Return the sampling settings of a request, and what else ends an answer of the model."""
        sampling = request.sampling
        end_texts = prompt.end_texts
        call_end = self.family.call_end if self.family and _offers_tools(request) else None
        if call_end and not request.has_parallel_tool_calls:
            end_texts = (*end_texts, call_end)
        return replace(
            sampling,
            stop=(*sampling.stop, *end_texts),
            stop_token_ids=(
                *sampling.stop_token_ids,
                *(() if sampling.ignores_eos else self.end_tokens),
            ),
        )

    def new_parser(self, request: ChatRequest, prompt: RenderedChat) -> AnswerParser:
        """Return a parser of one answer to a rendered conversation."""
        reasoning = tools = None
        marks = frozenset(self.marks)
        if request.separates_reasoning and not prompt.forced_text:
            reasoning = ReasoningParser(self.marks, starts_in_reasoning=prompt.starts_in_reasoning)
        if self.family and _offers_tools(request):
            offered = OfferedTools.from_tools(
                request.tools, has_parallel_calls=request.has_parallel_tool_calls
            )
            tools = self.family.new_parser(offered)
            marks |= self.family.marks
        return AnswerParser(
            self.texts,
            request.sampling.stop,
            context=prompt.tokens,
            syntax=AnswerSyntax(
                marks=marks, end_texts=prompt.end_texts, strips_start=not self.template
            ),
            reasoning=reasoning,
            tools=tools,
            forced_text=prompt.forced_text,
        )

    def _require_tools(self) -> ToolFamily:
        if self.family is None:
            reason = "has no tools" if self.template else "does not exist"
            raise ToolsUnsupported(
                f"tools cannot be used with {self.model!r}, because its chat template {reason}; "
                "leave tools out, or let the operator set tool_parsers for this model"
            )
        return self.family

    def _render_template(self, request: ChatRequest, tools: Sequence[Mapping[str, object]]) -> str:
        messages = request.messages
        if self.family and self.family.has_short_call_ids:
            messages = adapt_call_ids(messages)
        if "tools" not in self.template and self.family:
            messages, tools = describe_tools(messages, tools), ()
        return render_chat_text(
            self.tokenizer,
            messages,
            name=self.model,
            tools=tools,
            add_generation_prompt=request.has_generation_prompt,
            continue_final_message=request.continues_final_message,
            variables=request.template_variables,
        )

    def _is_in_reasoning(self, request: ChatRequest, text: str) -> bool:
        if not request.continues_final_message:
            return ends_in_reasoning(text, self.marks)
        final = str(request.messages[-1].get("content") or "")
        return final.rpartition(self.marks.end)[2].lstrip().startswith(self.marks.start)

    def _render_plain(self, request: ChatRequest) -> RenderedChat:
        """Render as in the recipes: `Role: text` and an empty line per message."""
        renderer, messages = Renderer(self.tokenizer), tuple(request.messages)
        if request.continues_final_message:
            *before, final = messages
            if final.get("role") != "assistant":
                raise InvalidInput("only a final message of the assistant can be continued")
            text = encode(self.tokenizer, f" {final.get('content') or ''}", False)
            tokens = [*renderer.render_prompt(tuple(before)), *text]
        else:
            tokens = renderer.render_prompt(messages)
            if not request.has_generation_prompt:
                num_prompt = len(encode(self.tokenizer, _PLAIN_GENERATION_PROMPT, False))
                tokens = tokens[: len(tokens) - num_prompt]
        return RenderedChat(tokens=tokens, end_texts=_PLAIN_TURN_ENDS)


def _offers_tools(request: ChatRequest) -> bool:
    return bool(request.tools) and request.tool_choice != "none"
