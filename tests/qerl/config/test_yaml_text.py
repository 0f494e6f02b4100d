"""Recipes follow YAML 1.2's core schema where it matters; some texts are refused."""

import random

import pytest
import yaml

from qerl.config.yaml_text import YamlError, dump, parse

# text, value: cases close to those that PyYAML (YAML 1.1) reads otherwise
SCALARS = [
    ("1e-5", 1e-5),
    ("1e5", 1e5),
    ("-1e-5", -1e-5),
    (".5", 0.5),
    ("-.5", -0.5),
    ("5.", 5.0),
    ("1.5e3", 1500.0),
    ("+2.0", 2.0),
    ("0.003", 0.003),
    ("", None),
    ("12", 12),
    ("-12", -12),
    ("+12", 12),
    ("010", 10),
    ("true", True),
    ("null", None),
    ("~", None),
    (".inf", float("inf")),
    ("yes", "yes"),
    ("no", "no"),
    ("Off", "Off"),
    ("y", "y"),
    ("1_000", "1_000"),
    ("0x10", "0x10"),
    ("1:30", "1:30"),
    ("2025-11-21", "2025-11-21"),
    ("1e", "1e"),
    (".", "."),
    ("1.2.3", "1.2.3"),
    ("'1e-5'", "1e-5"),
    ('"true"', "true"),
    ("=", "="),
    ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
]


@pytest.mark.parametrize(("text", "value"), SCALARS)
def test_a_scalar_is_what_it_looks_like(text, value):
    assert parse(text).data == value
    assert type(parse(text).data) is type(value)
    assert parse(f"key: {text}").data == {"key": value}


def test_pyyaml_still_reads_1e_5_as_text():
    assert yaml.safe_load("1e-5") == "1e-5"  # once this fails, PyYAML reads a number and _FLOAT can go
    assert yaml.safe_load("off") is False


def test_lines_count_from_one_and_reach_list_items():
    lines = parse("# comment\na:\n  b: 1\n\n  c:\n    - x: 1\n    - x: 2\n").lines
    assert lines == {
        ("a",): 2,
        ("a", "b"): 3,
        ("a", "c"): 5,
        ("a", "c", 0): 6,
        ("a", "c", 0, "x"): 6,
        ("a", "c", 1): 7,
        ("a", "c", 1, "x"): 7,
    }


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("a: 1\na: 2", 2, "a stands twice (first in line 1)"),
        ("a:\n  b: 1\n  b: 1", 3, "a.b stands twice (first in line 2)"),
        ("l:\n  - {x: 1, x: 2}", 2, "l.0.x stands twice"),
        ("a: 1\n1: 2", 2, "'1' stands where a key belongs"),
        ("true: 2", 1, "'true' stands where a key belongs"),
        ("? [a]\n: 2", 1, "a list or mapping stands where a key belongs"),
        ("a: 1\n\tb: 2", 2, "write spaces for tabs"),
        ("a: &x 1\nb: *x", 1, "an anchor or alias"),
        ("a: *x", 1, "an anchor or alias"),
        ("a: &x [*x]", 1, "an anchor or alias"),
        ("a: 1\n---\nb: 2", 2, "a second document begins here"),
        ("a: !!python/object/apply:os.system [ls]", 1, "the tag"),
        ("a: !mine 1", 1, "the tag '!mine'"),
        ("a: !!int x", 1, "'x' is not a int"),
        ("a: [1, 2", 1, "not YAML"),
        ("a: 'open", 1, "not YAML"),
        ("a: b: c", 1, "align the keys, and quote text with colons"),
        ("a: 1\nb: \x07", 2, "the character U+0007 cannot stand in YAML"),
        ("a: @b", 1, "not YAML"),
        ("[" * 5000, 1, "nested too deeply"),
    ],
)
def test_ambiguous_text_is_refused_with_its_line(text, line, says):
    with pytest.raises(YamlError) as error:
        parse(text)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.line == line


@pytest.mark.parametrize("text", [text for text, _ in SCALARS])
def test_text_that_looks_like_something_else_is_written_in_quotes(text):
    data = {"key": text, "list": [text]}
    assert parse(dump(data)).data == data
    assert yaml.safe_load(dump(data)) == data  # a YAML 1.1 reader gets the same


def test_random_data_reads_back_exactly_here_and_in_yaml_1_1():
    rng = random.Random(0)
    pieces = ["a", "é", "日", " ", "\n", "\t", ": ", "#", "'", '"', "\\", "{", "}", "-", "1e-5", "\u2028", "\x85", "😀"]

    def scalar():
        text = "".join(rng.choices(pieces, k=rng.randrange(6)))
        return rng.choice([text, rng.uniform(-1, 1) * 10 ** rng.randrange(-12, 12), rng.randrange(-9, 9), None, True])

    for _ in range(300):
        shared = [scalar()]
        data = {
            "a": {"b": [scalar() for _ in range(3)], "c": scalar()},
            "d": [{"e": scalar()}],
            "f": shared,
            "g": shared,
        }
        assert parse(dump(data)).data == data
        assert yaml.safe_load(dump(data)) == data
