"""Seeded damage to files: bits and bytes, and changes of what a file's structure holds."""

import copy
import gzip
import json

import yaml

ODD = (
    None, True, False, 0, -1, 1, 2**31, 10**30, -(10**40), 1e308, 0.5, float("nan"), float("inf"), "", "x", "-1",
    "\x1b[2J", "[/x]", "\ud800", "x" * 10_000, "../../etc/passwd", "9" * 5000, [], {}, [[]], [None], {"": None},
)  # fmt: skip
TOKENS = (
    b"{", b"}", b"[", b"]", b'"', b",", b":", b"\n", b"\0", b"\xff", b"\xf0\x9f", b"\r", b"\t", b"&a ", b"*a", b"!!p ",
    b"{{", b"}}", b"{% for x in range(99) %}", b"{%", b"\x1b[31m", b"1e999", b"NaN", b"---\n", b"\xef\xbb\xbf",
)  # fmt: skip


def of_bytes(data, rng):
    """One to four changes: flipped bits, cuts, and bytes that are added, repeated, zeroed or removed."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        size = rng.choice([1, 2, 8, 64, 512])
        match rng.choice("bbbtidzrs"):
            case "b" if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case "t":
                del data[at:]
            case "i":
                data[at:at] = rng.choice(TOKENS) * rng.choice([1, 1, 1, 2000])
            case "d":
                data[at:at] = data[at : at + size]
            case "z":
                data[at : at + size] = bytes(len(data[at : at + size]))
            case "r":
                del data[at : at + size]
            case "s":
                data[at : at + size] = rng.randbytes(size)
    return bytes(data)


def of_value(value, rng):
    """One to three changes somewhere in lists and objects."""
    value = [copy.deepcopy(value)]
    for _ in range(rng.randint(1, 3)):
        places = [each for each in _places(value) if each[0] is not value] or [(value, 0)]
        inner, key = rng.choice(places)
        match rng.choice("ooodnwsr"):
            case "o":
                inner[key] = copy.deepcopy(rng.choice(ODD))
            case "d" if inner is not value:
                del inner[key]
            case "n":
                inner[key] = json.loads("[" * 200 + "]" * 200)
            case "w":
                inner[key] = rng.choice([[inner[key]], {"x": inner[key]}, str(inner[key])])
            case "s":
                other, place = rng.choice(places)
                inner[key] = copy.deepcopy(other[place]) if other is not value else 7
            case "r" if isinstance(inner, dict):
                inner[rng.choice(["x", "", "\x1b[31m", f"{key}2"])] = inner.pop(key)
    return value[0]


def _places(value):
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(inside):
        yield value, key
        if isinstance(inner, list | dict) and len(inner) < 500:
            yield from _places(inner)


def of_json(data, rng):
    return json.dumps(of_value(json.loads(data), rng)).encode()


def of_lines(data, rng):
    lines = data.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = rng.choice([of_json(lines[at], rng), rng.choice(lines), b"", lines[at][: len(lines[at]) // 2]])
    return b"\n".join(lines) + b"\n"


def of_yaml(data, rng):
    return yaml.safe_dump(of_value(yaml.safe_load(data), rng), allow_unicode=True).encode(errors="replace")


def of_header(data, rng):
    size = int.from_bytes(data[:8], "little")
    header = of_json(data[8 : 8 + size], rng)
    length = len(header) if rng.random() < 0.8 else rng.choice([0, 2**63, len(header) + 1, len(data) * 2])
    return length.to_bytes(8, "little") + header + data[8 + size :]


def of_gzip(data, rng):
    return gzip.compress(of_lines(gzip.decompress(data), rng), 1)


STRUCTURES = {
    ".json": of_json, ".jsonl": of_lines, ".yaml": of_yaml, ".safetensors": of_header, ".gz": of_gzip,
}  # fmt: skip


def mutated(name, data, rng):
    """The content of a file of that name, damaged; of its bytes only in a third of all cases."""
    change = STRUCTURES.get(name[name.rfind(".") :], of_bytes)
    return (of_bytes if rng.random() < 0.34 else change)(data, rng)
