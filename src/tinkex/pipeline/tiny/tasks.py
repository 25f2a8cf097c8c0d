"""Tasks of tinkex/tiny: questions with one correct answer, by family, and their vocabulary."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from random import Random
from typing import NamedTuple

from tinkex.data import sample_rows

_MAX_NUMBER, _MAX_COUNT_START = 99, 20
_MAX_COUNT_LENGTH = 6
#: One in this many tasks is held out.
_HELD_OUT_EVERY = 16
UNKNOWN = "I do not know that. I am a very small model."
ABLE = "I can say words, add and compare small numbers, count, and name days and colours."

# --- vocabulary ------------------------------------------------------------------------------

NAMES = (
    *("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Grace", "Hugo", "Ida", "Jon", "Kim", "Lea"),
    *("Max", "Nina", "Otto", "Paul", "Rosa", "Sam", "Tom", "Uma", "Vera", "Will", "Yara", "Zoe"),
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
PLACES = ("garden", "kitchen", "market", "library", "harbour", "forest", "station", "school")
ANIMALS = ("cat", "dog", "cow", "duck", "sheep", "horse", "frog", "bee", "owl", "pig", "fox", "hen")
SOUNDS = {
    "cat": "Meow",
    "dog": "Woof",
    "cow": "Moo",
    "duck": "Quack",
    "sheep": "Baa",
    "horse": "Neigh",
    "frog": "Ribbit",
    "bee": "Buzz",
    "owl": "Hoot",
    "pig": "Oink",
}
COLOURS = {
    "grass": "green",
    "the sky": "blue",
    "snow": "white",
    "coal": "black",
    "a lemon": "yellow",
    "a cherry": "red",
    "a carrot": "orange",
    "chocolate": "brown",
    "milk": "white",
    "the sea": "blue",
    "a leaf": "green",
    "blood": "red",
    "the night": "black",
    "the sun": "yellow",
    "a frog": "green",
    "a flamingo": "pink",
}
OPPOSITES = {
    **sample_rows.OPPOSITES,
    "good": "bad",
    "happy": "sad",
    "left": "right",
    "yes": "no",
}
#: Words to repeat, choose from and capitalize.
WORDS = (
    *("apple", "bread", "chair", "door", "egg", "fish", "glass", "house", "ice", "jam", "key"),
    *("lamp", "moon", "nose", "ocean", "paper", "queen", "river", "stone", "table", "tree"),
    *("window", "box", "year", "zebra", "ball", "bird", "boat", "book", "bus", "cake", "car"),
    *("city", "cloud", "coat", "cup", "desk", "dress", "ear", "eye", "farm", "fire", "flower"),
    *("foot", "gold", "hand", "hat", "heart", "hill", "king", "lake", "leaf", "letter", "map"),
    *("mouse", "music", "name", "night", "paint", "pen", "plant", "rain", "ring", "road"),
    *("room", "rope", "salt", "sand", "sea", "ship", "shoe", "silver", "sky", "snow", "song"),
    *("spoon", "star", "street", "sugar", "summer", "sun", "tea", "tent", "town", "train"),
    *("wall", "water", "wind", "winter", "wood", "word", "hello", "please", "banana", "green"),
)
#: Subjects of unanswerable questions.
COUNTRIES = ("France", "Japan", "Brazil", "Kenya", "Canada", "Spain", "India", "Egypt", "Norway")
TOPICS = ("football", "politics", "history", "chemistry", "films", "law", "medicine", "space")
#: Syllables of invented words, so that repeating them cannot be memorized.
SYLLABLES = tuple(a + b for a in "bdfgklmnprstvz" for b in "aeiou")


# --- tasks -----------------------------------------------------------------------------------


class TinyTask(NamedTuple):
    """A question and its answer."""

    question: str
    answer: str
    key: str = ""
    """Identity of the task, independent of wording; default: the question."""

    @property
    def is_held_out(self) -> bool:
        """True if the task is reserved for evaluation; depends only on its identity."""
        digest = hashlib.sha256((self.key or self.question).encode()).digest()
        return int.from_bytes(digest[:4]) % _HELD_OUT_EVERY == 0


# --- families with too many tasks to memorize: held-out tasks are never trained on ------------


def say(rng: Random) -> TinyTask:
    """Repeat real and invented words."""
    text = " ".join(random_word(rng) for _ in range(rng.choice((1, 1, 1, 2, 2, 3))))
    questions = (
        *(f"Say {text}.", f"Say {text}", f"Please say {text}.", f'Say "{text}".'),
        *(f"Repeat: {text}", f"Repeat after me: {text}", f"Echo {text}", f"Write {text}."),
    )
    return TinyTask(rng.choice(questions), text, f"say {text}")


def choose(rng: Random) -> TinyTask:
    """Return the first or last of some words."""
    listed = [random_word(rng) for _ in range(rng.choice((2, 3, 3, 4)))]
    at, which = rng.choice(((0, "first"), (-1, "last")))
    text = " ".join(listed)
    questions = (
        f"What is the {which} word of: {text}?",
        f"Which word is {which}: {text}?",
        f"Give me the {which} word: {text}",
    )
    return TinyTask(rng.choice(questions), listed[at], f"choose {which} {text}")


def compare(rng: Random) -> TinyTask:
    """Return the larger or smaller of two numbers."""
    a, b = rng.sample(range(_MAX_NUMBER + 1), 2)
    wants_most = rng.random() < 0.6
    word, extreme = ("larger", "maximum") if wants_most else ("smaller", "minimum")
    questions = (
        *(f"Which is {word}, {a} or {b}?", f"Which number is {word}: {a} or {b}?"),
        *(f"What is {word}, {a} or {b}?", f"What is the {extreme} of {a} and {b}?"),
    )
    answer = str(max(a, b) if wants_most else min(a, b))
    return TinyTask(rng.choice(questions), answer, f"compare {word} {a} {b}")


def count(rng: Random) -> TinyTask:
    """Count up or down."""
    low, length = rng.randint(0, _MAX_COUNT_START), rng.randint(3, _MAX_COUNT_LENGTH)
    high = low + length - 1
    a, b, step = (high, low, -1) if rng.random() < 0.3 else (low, high, 1)
    questions = [
        f"Count from {a} to {b}.",
        f"Count from {a} to {b}",
        f"Please count from {a} to {b}.",
    ]
    if (a, step) == (1, 1):
        questions += [f"Count to {b}."] * 3
    text = ", ".join(str(number) for number in range(a, b + step, step))
    return TinyTask(rng.choice(questions), text, f"count from {a} to {b}")


# --- families of facts: held-out tasks are other wordings of trained facts --------------------


def add(rng: Random) -> TinyTask:
    """Add two digits."""
    a, b = rng.randrange(10), rng.randrange(10)
    questions = (
        *(f"What is {a} plus {b}?", f"What is {a} + {b}?", f"{a} + {b} = ?", f"{a} + {b}"),
        *(f"Add {a} and {b}.", f"How much is {a} plus {b}?", f"Calculate {a} + {b}."),
    )
    return TinyTask(rng.choice(questions), str(a + b))


def subtract(rng: Random) -> TinyTask:
    """Subtract a digit from one that is not smaller."""
    b, a = sorted((rng.randrange(10), rng.randrange(10)))
    questions = (
        *(f"What is {a} minus {b}?", f"What is {a} - {b}?", f"{a} - {b} = ?", f"{a} - {b}"),
        *(f"Take {b} from {a}.", f"How much is {a} minus {b}?", f"Calculate {a} - {b}."),
    )
    return TinyTask(rng.choice(questions), str(a - b))


def calendar(rng: Random) -> TinyTask:
    """Name the day or month before or after another."""
    kind, cycle = rng.choice((("day", DAYS), ("month", MONTHS)))
    at, (step, word) = rng.randrange(len(cycle)), rng.choice(((1, "after"), (-1, "before")))
    name = cycle[at]
    questions = (
        *(f"Which {kind} comes {word} {name}?", f"Which {kind} is {word} {name}?"),
        *(f"What comes {word} {name}?", f"What {kind} comes {word} {name}?"),
        *(f"Name the {kind} {word} {name}.", f"Tell me the {kind} {word} {name}."),
    )
    return TinyTask(rng.choice(questions), cycle[(at + step) % len(cycle)])


def colour(rng: Random) -> TinyTask:
    """Name the colour of a thing."""
    thing, answer = rng.choice(sorted(COLOURS.items()))
    spelled = rng.choice(("colour", "color"))
    questions = (
        *(f"What {spelled} is {thing}?", f"Which {spelled} has {thing}?"),
        *(f"What is the {spelled} of {thing}?", f"Tell me the {spelled} of {thing}."),
        f"Name the {spelled} of {thing}.",
    )
    return TinyTask(rng.choice(questions), answer)


def opposite(rng: Random) -> TinyTask:
    """Name the opposite of a word."""
    word, other = rng.choice(sorted(OPPOSITES.items()))
    if rng.random() < 0.5:
        word, other = other, word
    questions = (
        *(f"What is the opposite of {word}?", f"Name the opposite of {word}."),
        *(f"Tell me the opposite of {word}.", f"Which word is the opposite of {word}?"),
        *(f"The opposite of {word} is?", f"Opposite of {word}?"),
    )
    return TinyTask(rng.choice(questions), other)


def sound(rng: Random) -> TinyTask:
    """Name the sound of an animal."""
    animal, answer = rng.choice(sorted(SOUNDS.items()))
    questions = (
        *(f"What does a {animal} say?", f"What does the {animal} say?"),
        *(f"What sound does a {animal} make?", f"How does a {animal} sound?"),
        f"Make the sound of a {animal}.",
    )
    return TinyTask(rng.choice(questions), f"{answer}!")


def large(rng: Random) -> TinyTask:
    """Write a word in capital letters."""
    word = rng.choice(WORDS)
    questions = (
        *(f"Write {word} in capital letters.", f"Write {word} in uppercase."),
        *(f"Uppercase {word}.", f"Make {word} uppercase.", f"Uppercase: {word}"),
    )
    return TinyTask(rng.choice(questions), word.upper())


def greet(rng: Random) -> TinyTask:
    """Answer greetings, thanks and questions about the model."""
    name = rng.choice(NAMES)
    mark = rng.choice(("", "!", "."))
    greeting = rng.choice(("Hello", "Hi", "Hey", "Good morning", "Good evening", "hello", "hi"))
    questions = (
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
    return TinyTask(*rng.choice(questions))


def unknown(rng: Random) -> TinyTask:
    """Answer "I do not know" to unanswerable questions."""
    country, topic, name = (rng.choice(names) for names in (COUNTRIES, TOPICS, NAMES))
    questions = (
        *(f"What is the capital of {country}?", f"How many people live in {country}?"),
        *(f"Tell me about {topic}.", f"Explain {topic}.", f"What do you think of {topic}?"),
        *(f"Who is {name}?", f"How old is {name}?", f"Where does {name} live?"),
        *(f"Write a poem about {topic}.", f"Where is {country}?", "What is the time?"),
        *("What is the weather like?", "What is the meaning of life?", "Write some code."),
    )
    return TinyTask(rng.choice(questions), UNKNOWN)


#: Task generator and sampling weight of each family.
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
    """Draw a family and one of its training tasks."""
    names = tuple(FAMILIES)
    name = rng.choices(names, [FAMILIES[family][1] for family in names])[0]
    return name, draw_family_task(name, rng, is_held_out=False)


def draw_family_task(family: str, rng: Random, *, is_held_out: bool) -> TinyTask:
    """Draw a training or held-out task of a family."""
    make = FAMILIES[family][0]
    while (task := make(rng)).is_held_out != is_held_out:
        pass
    return task


def random_word(rng: Random) -> str:
    """Draw a real or invented word."""
    if rng.random() < 0.6:
        return rng.choice(WORDS)
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((1, 2, 2))))
