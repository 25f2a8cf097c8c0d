"""What tinkex/tiny is asked: questions that have one right answer, by family."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from random import Random
from typing import NamedTuple

from tinkex.pipeline.tiny import words

_LARGEST, _LARGEST_COUNT = 99, 20
_MOST_COUNTED = 6
#: One in so many tasks is never trained on.
_HELD_OUT_EVERY = 16
UNKNOWN = "I do not know that. I am a very small model."
ABLE = "I can say words, add and compare small numbers, count, and name days and colours."


class TinyTask(NamedTuple):
    """A question and its answer."""

    question: str
    answer: str
    key: str = ""
    """What is asked for, in whichever words; without it, the question as it is worded."""

    @property
    def is_held_out(self) -> bool:
        """Whether it is kept for measuring: a pure function of what is asked for."""
        digest = hashlib.sha256((self.key or self.question).encode()).digest()
        return int.from_bytes(digest[:4]) % _HELD_OUT_EVERY == 0


# --- families whose tasks are too many to learn by heart: held out are things never asked -----


def say(rng: Random) -> TinyTask:
    """Say words again, known ones and ones that nobody uses."""
    text = " ".join(random_word(rng) for _ in range(rng.choice((1, 1, 1, 2, 2, 3))))
    asked = (
        *(f"Say {text}.", f"Say {text}", f"Please say {text}.", f'Say "{text}".'),
        *(f"Repeat: {text}", f"Repeat after me: {text}", f"Echo {text}", f"Write {text}."),
    )
    return TinyTask(rng.choice(asked), text, f"say {text}")


def choose(rng: Random) -> TinyTask:
    """The first or the last of some words."""
    listed = [random_word(rng) for _ in range(rng.choice((2, 3, 3, 4)))]
    at, which = rng.choice(((0, "first"), (-1, "last")))
    text = " ".join(listed)
    asked = (
        f"What is the {which} word of: {text}?",
        f"Which word is {which}: {text}?",
        f"Give me the {which} word: {text}",
    )
    return TinyTask(rng.choice(asked), listed[at], f"choose {which} {text}")


def compare(rng: Random) -> TinyTask:
    """The larger or the smaller of two numbers."""
    a, b = rng.sample(range(_LARGEST + 1), 2)
    wants_most = rng.random() < 0.6
    word, extreme = ("larger", "maximum") if wants_most else ("smaller", "minimum")
    asked = (
        *(f"Which is {word}, {a} or {b}?", f"Which number is {word}: {a} or {b}?"),
        *(f"What is {word}, {a} or {b}?", f"What is the {extreme} of {a} and {b}?"),
    )
    answer = str(max(a, b) if wants_most else min(a, b))
    return TinyTask(rng.choice(asked), answer, f"compare {word} {a} {b}")


def count(rng: Random) -> TinyTask:
    """Count a few numbers, up or down."""
    low, length = rng.randint(0, _LARGEST_COUNT), rng.randint(3, _MOST_COUNTED)
    high = low + length - 1
    a, b, step = (high, low, -1) if rng.random() < 0.3 else (low, high, 1)
    asked = [f"Count from {a} to {b}.", f"Count from {a} to {b}", f"Please count from {a} to {b}."]
    if (a, step) == (1, 1):
        asked += [f"Count to {b}."] * 3
    text = ", ".join(str(number) for number in range(a, b + step, step))
    return TinyTask(rng.choice(asked), text, f"count from {a} to {b}")


# --- families of facts: held out are ways to ask, and the fact is known from other ways -------


def add(rng: Random) -> TinyTask:
    """A sum of two digits."""
    a, b = rng.randrange(10), rng.randrange(10)
    asked = (
        *(f"What is {a} plus {b}?", f"What is {a} + {b}?", f"{a} + {b} = ?", f"{a} + {b}"),
        *(f"Add {a} and {b}.", f"How much is {a} plus {b}?", f"Calculate {a} + {b}."),
    )
    return TinyTask(rng.choice(asked), str(a + b))


def subtract(rng: Random) -> TinyTask:
    """A digit less another that is not larger."""
    b, a = sorted((rng.randrange(10), rng.randrange(10)))
    asked = (
        *(f"What is {a} minus {b}?", f"What is {a} - {b}?", f"{a} - {b} = ?", f"{a} - {b}"),
        *(f"Take {b} from {a}.", f"How much is {a} minus {b}?", f"Calculate {a} - {b}."),
    )
    return TinyTask(rng.choice(asked), str(a - b))


def calendar(rng: Random) -> TinyTask:
    """The day or the month before or after another."""
    kind, cycle = rng.choice((("day", words.DAYS), ("month", words.MONTHS)))
    at, (step, word) = rng.randrange(len(cycle)), rng.choice(((1, "after"), (-1, "before")))
    name = cycle[at]
    asked = (
        *(f"Which {kind} comes {word} {name}?", f"Which {kind} is {word} {name}?"),
        *(f"What comes {word} {name}?", f"What {kind} comes {word} {name}?"),
        *(f"Name the {kind} {word} {name}.", f"Tell me the {kind} {word} {name}."),
    )
    return TinyTask(rng.choice(asked), cycle[(at + step) % len(cycle)])


def colour(rng: Random) -> TinyTask:
    """The colour of something."""
    thing, answer = rng.choice(sorted(words.COLOURS.items()))
    spelled = rng.choice(("colour", "color"))
    asked = (
        *(f"What {spelled} is {thing}?", f"Which {spelled} has {thing}?"),
        *(f"What is the {spelled} of {thing}?", f"Tell me the {spelled} of {thing}."),
        f"Name the {spelled} of {thing}.",
    )
    return TinyTask(rng.choice(asked), answer)


def opposite(rng: Random) -> TinyTask:
    """The opposite of a word."""
    word, other = rng.choice(sorted(words.OPPOSITES.items()))
    if rng.random() < 0.5:
        word, other = other, word
    asked = (
        *(f"What is the opposite of {word}?", f"Name the opposite of {word}."),
        *(f"Tell me the opposite of {word}.", f"Which word is the opposite of {word}?"),
        *(f"The opposite of {word} is?", f"Opposite of {word}?"),
    )
    return TinyTask(rng.choice(asked), other)


def sound(rng: Random) -> TinyTask:
    """What an animal says."""
    animal, answer = rng.choice(sorted(words.SOUNDS.items()))
    asked = (
        *(f"What does a {animal} say?", f"What does the {animal} say?"),
        *(f"What sound does a {animal} make?", f"How does a {animal} sound?"),
        f"Make the sound of a {animal}.",
    )
    return TinyTask(rng.choice(asked), f"{answer}!")


def large(rng: Random) -> TinyTask:
    """A word in capital letters."""
    word = rng.choice(words.WORDS)
    asked = (
        *(f"Write {word} in capital letters.", f"Write {word} in uppercase."),
        *(f"Uppercase {word}.", f"Make {word} uppercase.", f"Uppercase: {word}"),
    )
    return TinyTask(rng.choice(asked), word.upper())


def greet(rng: Random) -> TinyTask:
    """Greetings, thanks, and who it is."""
    name = rng.choice(words.NAMES)
    mark = rng.choice(("", "!", "."))
    greeting = rng.choice(("Hello", "Hi", "Hey", "Good morning", "Good evening", "hello", "hi"))
    asked = (
        (f"{greeting}{mark}", "Hello! How can I help you?"),
        (f"{greeting}{rng.choice(('', ',', '!'))} I am {name}.", f"Hello, {name}! How are you?"),
        (f"My name is {name}{mark}", f"Hello, {name}! How are you?"),
        (f"{rng.choice(('How are you', 'How do you do'))}?", "I am fine, thank you."),
        (f"{rng.choice(('Thanks', 'Thank you', 'Thanks a lot'))}{mark}", "You are welcome."),
        (f"{rng.choice(('Bye', 'Goodbye', 'See you'))}{mark}", "Goodbye!"),
        (rng.choice(("Who are you?", "What are you?")), "I am tinkex/tiny, a very small model."),
        (rng.choice(("What is your name?", "Your name?")), "My name is tinkex/tiny."),
        (rng.choice(("What can you do?", "Help", "How can you help me?", "Help me.")), ABLE),
    )
    return TinyTask(*rng.choice(asked))


def unknown(rng: Random) -> TinyTask:
    """What it cannot know, and says so."""
    country, topic, name = (
        rng.choice(some) for some in (words.COUNTRIES, words.TOPICS, words.NAMES)
    )
    asked = (
        *(f"What is the capital of {country}?", f"How many people live in {country}?"),
        *(f"Tell me about {topic}.", f"Explain {topic}.", f"What do you think of {topic}?"),
        *(f"Who is {name}?", f"How old is {name}?", f"Where does {name} live?"),
        *(f"Write a poem about {topic}.", f"Where is {country}?", "What is the time?"),
        *("What is the weather like?", "What is the meaning of life?", "Write some code."),
    )
    return TinyTask(rng.choice(asked), UNKNOWN)


#: Each family with how often it is asked: more often where there is more to learn.
FAMILIES: Mapping[str, tuple[Callable[[Random], TinyTask], int]] = {
    "say": (say, 5),
    "choose": (choose, 3),
    "compare": (compare, 4),
    "count": (count, 6),
    "add": (add, 4),
    "subtract": (subtract, 3),
    "calendar": (calendar, 3),
    "colour": (colour, 2),
    "opposite": (opposite, 3),
    "sound": (sound, 2),
    "large": (large, 4),
    "greet": (greet, 3),
    "unknown": (unknown, 2),
}


def draw_task(rng: Random) -> tuple[str, TinyTask]:
    """A family and a task of it that may be trained on."""
    names = tuple(FAMILIES)
    name = rng.choices(names, [FAMILIES[one][1] for one in names])[0]
    return name, draw_family_task(name, rng, is_held_out=False)


def draw_family_task(family: str, rng: Random, *, is_held_out: bool) -> TinyTask:
    """The next task of a family on this side of the line."""
    make = FAMILIES[family][0]
    while (task := make(rng)).is_held_out != is_held_out:
        pass
    return task


def random_word(rng: Random) -> str:
    """A word that there is, or one that could be."""
    if rng.random() < 0.6:
        return rng.choice(words.WORDS)
    return "".join(rng.choice(words.SYLLABLES) for _ in range(rng.choice((1, 2, 2))))
