"""Models of the fake engine that have a real tokenizer and say what a test wants.

    with StubServer(models=[scripted_model()]) as server: ...          # or in a process:
    tinkex serve --engine fake --model tinkex/scripted=FOLDER

FOLDER has a tokenizer.json and a chat template; `scripted_model` takes those of tinkex/tiny. The
answer is the text between [say] and [/say] in the prompt, followed by the end token; the last such
text counts, so each message of a conversation can set the next answer. `say("a", "b")` writes it;
with several texts, sequence i says text i, and so on in turns. Without one, the model samples like
any other model of the fake engine, and follows the grammar of the request, which a script need not.
Stop conditions and `max_tokens` apply as usual, and log-probabilities are those of the bigram
model.

    client.chat.completions.create(
        model=SCRIPTED, messages=[{"role": "user", "content": say("<think>hm</think>42")}]
    )
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Sized
from pathlib import Path

from tinkex import text
from tinkex.engine.sampling.grammars import Grammar, GrammarCompiler
from tinkex.engine.sampling.request import GrammarSpec
from tinkex.errors import ConfigError
from tinkex.models import TINY_FOLDER

#: The name of the model that `scripted_model` describes.
SCRIPTED = "tinkex/scripted"
#: The table of a bigram model has this number of tokens squared.
MAX_VOCAB_SIZE = 4096

_SCRIPT = re.compile(r"\[say\](.*?)\[/say\]", re.DOTALL)
_SEPARATOR = "[or]"


def scripted_model(folder: Path = TINY_FOLDER, name: str = SCRIPTED) -> str:
    """The name of a scripted model for `models` of a fake engine, a stub server or `serve`."""
    return f"{name}={folder}"


def say(*texts: str) -> str:
    """A part of a prompt that lets a scripted model answer with these texts."""
    return f"[say]{_SEPARATOR.join(texts)}[/say]"


class ScriptedText:
    """The tokenizer of a scripted model, and the answers in its prompts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tokenizer = tokenizer = text.load_tokenizer(str(folder))
        if not isinstance(tokenizer, Sized) or len(tokenizer) > MAX_VOCAB_SIZE:
            raise ConfigError(f"a scripted model has at most {MAX_VOCAB_SIZE} tokens; see {folder}")
        self.vocab_size = len(tokenizer)
        eos_token = getattr(tokenizer, "eos_token_id", None)
        if eos_token is None:
            raise ConfigError(f"a scripted model needs an EOS token; the tokenizer is in {folder}")
        self.eos_token = int(eos_token)
        self._compiler = GrammarCompiler(tokenizer, self.vocab_size, frozenset({self.eos_token}))

    def compile_grammar(self, spec: GrammarSpec) -> Grammar:
        """Compile the grammar of a request; raises InvalidInput if that is impossible."""
        return self._compiler.compile(spec)

    def decode(self, token_ids: Sequence[int], /) -> str:
        """The text of tokens, including special ones."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def find_answers(self, prompt: Sequence[int]) -> list[list[int]]:
        """The tokens of the answers in a prompt, with the end token; empty without a script."""
        found = _SCRIPT.findall(self.decode(prompt))
        if not found:
            return []
        return [
            [*text.encode(self._tokenizer, answer, add_special_tokens=False), self.eos_token]
            for answer in found[-1].split(_SEPARATOR)
        ]
