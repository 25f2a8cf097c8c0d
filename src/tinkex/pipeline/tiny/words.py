"""Vocabulary for the generated text of tinkex/tiny."""

from __future__ import annotations

from tinkex.data import sample_rows

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
