"""The stories of task arith: a table of kinds, each with its steps and phrasings, and the words that fill them."""

from dataclasses import dataclass

NAMES = {
    "she": ("Mia", "Anna", "Lena", "Nora", "Ella", "Zoe", "Ruth", "Ivy", "Maya", "Lucy"),
    "he": ("Tom", "Ben", "Sam", "Leo", "Max", "Omar", "Paul", "Ravi", "Hugo", "Finn"),
}
THINGS = (
    "pens", "books", "cards", "coins", "stamps", "shells", "apples", "pears", "plums", "eggs",
    "cookies", "stickers", "balls", "beads", "stones", "nuts", "lemons", "candles", "buttons", "marbles",
)  # fmt: skip
HOLDERS = ("boxes", "bags", "baskets", "jars", "packs")


@dataclass(frozen=True)
class Kind:
    """A story.

    `numbers` maps each letter to its inclusive range. A step is "left op right", where each side is a letter or the
    number of an earlier step, counted from 1. Every phrasing names each letter once.
    """

    name: str
    numbers: dict[str, tuple[int, int]]
    steps: tuple[str, ...]
    phrasings: tuple[str, ...]


KINDS: tuple[Kind, ...] = (
    Kind(
        "boxes_less",
        {"a": (2, 9), "b": (2, 9), "c": (2, 30)},
        ("a * b", "1 - c"),
        (
            "{A} has {a} {holders} with {b} {things} in each. {She} gives {c} {things} to {B}. "
            "How many {things} does {A} have left?",
            "There are {a} {holders} of {b} {things} on the table. {A} takes {c} of the {things} away. "
            "How many {things} are left?",
        ),
    ),
    Kind(
        "boxes_more",
        {"a": (2, 9), "b": (2, 9), "c": (3, 40)},
        ("a * b", "1 + c"),
        (
            "{A} fills {a} {holders} with {b} {things} each and has {c} {things} over. "
            "How many {things} does {A} have in all?",
            "{A} buys {a} {holders} of {b} {things}. {She} had {c} {things} before. "
            "How many {things} does {she} have now?",
        ),
    ),
    Kind(
        "boxes_both",
        {"a": (2, 9), "b": (2, 9), "c": (2, 30), "d": (2, 30)},
        ("a * b", "1 - c", "2 + d"),
        (
            "{A} has {a} {holders} with {b} {things} each. {She} gives {c} to {B} and then finds {d} more. "
            "How many {things} does {A} have now?",
            "{A} packs {a} {holders} of {b} {things}. {B} takes {c} of them, and {C} brings {d} new ones. "
            "How many {things} are there now?",
        ),
    ),
    Kind(
        "come_and_go",
        {"a": (10, 60), "b": (2, 30), "c": (2, 30)},
        ("a + b", "1 - c"),
        (
            "{A} has {a} {things}. {She} gets {b} more from {B} and loses {c}. How many {things} does {A} have now?",
            "A bus leaves with {a} people. At the first stop {b} get on and {c} get off. "
            "How many people are on the bus now?",
        ),
    ),
    Kind(
        "go_and_come",
        {"a": (15, 60), "b": (2, 30), "c": (2, 30), "d": (2, 20)},
        ("a - b", "1 + c", "2 - d"),
        (
            "{A} has {a} {things}. {She} sells {b}, buys {c} and then gives {d} to {B}. "
            "How many {things} does {A} have left?",
            "There are {a} people in the park. Then {b} go home, {c} come in, and {d} more go home. "
            "How many people are in the park now?",
        ),
    ),
    Kind(
        "times_together",
        {"a": (3, 25), "b": (2, 3)},
        ("a * b", "a + 1"),
        (
            "{A} has {a} {things}. {B} has {b} times as many. How many {things} do they have together?",
            "{A} found {a} {things} and {B} found {b} times as many. How many {things} did they find in all?",
        ),
    ),
    Kind(
        "more_together",
        {"a": (3, 40), "b": (2, 20)},
        ("a + b", "a + 1"),
        (
            "{A} has {a} {things}. {B} has {b} more than {A}. How many {things} do they have together?",
            "{A} read {a} pages. {B} read {b} pages more than {A}. How many pages did they read in all?",
        ),
    ),
    Kind(
        "three_friends",
        {"a": (3, 25), "b": (2, 15), "c": (2, 3)},
        ("a + b", "a * c", "1 + 2"),
        (
            "{A} has {a} {things}. {B} has {b} more than {A}, and {C} has {c} times as many as {A}. "
            "How many {things} do {B} and {C} have together?",
        ),
    ),
    Kind(
        "two_prices",
        {"a": (2, 9), "b": (2, 9), "c": (2, 9), "d": (2, 9)},
        ("a * b", "c * d", "1 + 2"),
        (
            "{A} buys {a} {things} for {b} dollars each and {c} hats for {d} dollars each. "
            "How many dollars does {A} pay?",
            "In a shop {A} pays for {a} {things} at {b} dollars and {c} cups at {d} dollars. "
            "How much does {she} pay in all?",
        ),
    ),
    Kind(
        "change",
        {"a": (2, 9), "b": (2, 9), "c": (2, 30), "d": (40, 99)},
        ("a * b", "1 + c", "d - 2"),
        (
            "{A} has {d} dollars. {She} buys {a} {things} for {b} dollars each and a bag for {c} dollars. "
            "How many dollars does {A} have left?",
        ),
    ),
    Kind(
        "wages",
        {"a": (3, 9), "b": (3, 9), "c": (2, 30)},
        ("a * b", "1 - c"),
        (
            "{A} earns {a} dollars an hour and works {b} hours. {She} spends {c} dollars. "
            "How many dollars does {she} have left?",
        ),
    ),
    Kind(
        "savings",
        {"a": (2, 9), "b": (2, 9), "c": (5, 30), "d": (2, 20)},
        ("a * b", "1 + c", "2 - d"),
        (
            "{A} saves {a} dollars a week for {b} weeks. {She} gets {c} dollars from {B} and spends {d} dollars. "
            "How many dollars does {A} have now?",
        ),
    ),
    Kind(
        "pages_left",
        {"a": (40, 99), "b": (3, 9), "c": (2, 9)},
        ("b * c", "a - 1"),
        (
            "A book has {a} pages. {A} reads {b} pages a day for {c} days. How many pages are left?",
            "{A} has {a} {things} and gives {b} of them to each of {c} friends. How many {things} does {A} have left?",
        ),
    ),
    Kind(
        "rows",
        {"a": (3, 9), "b": (3, 9), "c": (2, 5), "d": (2, 6)},
        ("a * b", "c * d", "1 - 2"),
        (
            "A room has {a} rows of {b} chairs. {A} carries out {c} chairs at a time and goes {d} times. "
            "How many chairs are left?",
            "{A} plants {a} rows of {b} trees. A storm breaks {c} trees a day for {d} days. How many trees are left?",
        ),
    ),
    Kind(
        "baking",
        {"a": (2, 9), "b": (2, 9), "c": (2, 20), "d": (2, 15), "e": (2, 15)},
        ("a * b", "1 + c", "2 - d", "3 - e"),
        (
            "{A} bakes {a} trays of {b} cookies and {B} brings {c} more. {A} eats {d} and {B} eats {e}. "
            "How many cookies are left?",
        ),
    ),
    Kind(
        "long_trip",
        {"a": (2, 9), "b": (2, 9), "c": (2, 15), "d": (2, 25), "e": (2, 25)},
        ("a * b", "1 - c", "2 + d", "3 + e"),
        (
            "A train has {a} cars with {b} people in each. At the first stop {c} get off and {d} get on. "
            "At the next stop {e} more get on. How many people are on the train now?",
        ),
    ),
)
