"""The stories of task arith_chain: tables of openings, events and questions."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A sentence or two of a story.

    `numbers` maps each letter to its inclusive range. A step is "left op right", where each side is a letter, "v" (the
    value before this part), or the number of an earlier step of this part, counted from 1. The value after the part is
    the result of its last step; without steps, the value of an opening is its letter a, and an event changes nothing.
    Every phrasing names each letter once.
    """

    name: str
    numbers: dict[str, tuple[int, int]]
    steps: tuple[str, ...]
    phrasings: tuple[str, ...]


OPENINGS: tuple[Part, ...] = (
    Part(
        "owns",
        {"a": (20, 300)},
        (),
        ("{A} has {a} {things}.", "{A} starts the week with {a} {things}.", "There are {a} {things} in {A}'s shop."),
    ),
    Part(
        "holders",
        {"a": (3, 25), "b": (3, 12)},
        ("a * b",),
        (
            "{A} has {a} {holders} with {b} {things} in each.",
            "{A} fills {a} {holders} with {b} {things} each.",
            "On {A}'s table are {a} {holders} of {b} {things}.",
        ),
    ),
    Part(
        "two_kinds",
        {"a": (2, 12), "b": (3, 12), "c": (2, 12), "d": (3, 12)},
        ("a * b", "c * d", "1 + 2"),
        (
            "{A} buys {a} {holders} of {b} {things} and {c} {holders} of {d} {things}.",
            "{A} packs {b} {things} into each of {a} {holders} and {d} into each of {c} more.",
        ),
    ),
    Part(
        "times",
        {"a": (8, 90), "b": (2, 6)},
        ("a * b", "a + 1"),
        (
            "{A} has {a} {things} and {B} has {b} times as many. They put them all together and {A} keeps them.",
            "{B} found {a} {things}. {A} found {b} times as many, and {B} gives all of {B}'s to {A}.",
        ),
    ),
    Part(
        "days",
        {"a": (4, 40), "b": (3, 9), "c": (10, 90)},
        ("a * b", "c + 1"),
        (
            "{A} had {c} {things} and makes {a} more a day for {b} days.",
            "{A} collects {a} {things} a day. After {b} days {she} adds them to the {c} {things} at home.",
        ),
    ),
)

EVENTS: tuple[Part, ...] = (
    Part(
        "gain",
        {"a": (5, 150)},
        ("v + a",),
        ("{B} gives {A} {a} more.", "Then {A} finds {a} more.", "{She} gets {a} {things} from {C}."),
    ),
    Part(
        "lose",
        {"a": (5, 150)},
        ("v - a",),
        ("{A} loses {a} of them.", "Then {A} sells {a} {things}.", "{B} takes {a} of them."),
    ),
    Part(
        "gain_holders",
        {"a": (2, 12), "b": (3, 12)},
        ("a * b", "v + 1"),
        ("{A} buys {a} more {holders} with {b} in each.", "{C} brings {a} {holders} of {b} {things}."),
    ),
    Part(
        "give_friends",
        {"a": (2, 12), "b": (2, 12)},
        ("a * b", "v - 1"),
        ("{A} gives {b} to each of {a} friends.", "Each of {a} children gets {b} of the {things}."),
    ),
    Part(
        "times",
        {"a": (2, 5)},
        ("v * a",),
        ("A month later {she} has {a} times as many.", "After a good year the number is {a} times as large."),
    ),
    Part(
        "share",
        {"a": (2, 9)},
        ("v / a",),
        (
            "{A} makes {a} equal parts and keeps one.",
            "The {things} are shared equally by {a} people, and {A} is one of them.",
        ),
    ),
    Part(
        "swap",
        {"a": (5, 60), "b": (5, 60)},
        ("v - a", "1 + b"),
        ("{A} sells {a} and buys {b} others.", "{She} gives {a} to {B} and gets {b} back from {C}."),
    ),
    Part(
        "aside",
        {"a": (2, 90)},
        (),
        ("{B} has {a} hats.", "{C} is {a} years old.", "That day {a} people walk by."),
    ),
)

QUESTIONS = (
    "How many {things} does {A} have now?",
    "How many {things} does {she} have in the end?",
    "How many {things} does {A} have left?",
)
