"""The keys of a recipe: all of them as a table, a recipe's values by key, and what an error says of a wrong one.

A `Draft` puts a configuration together from recipe, base recipe, `--set` and flags, and remembers where each key was
written. A mapping given for a section merges into it key by key; everything else (numbers, lists, data.columns)
replaces what was there.
"""

import difflib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from qerl.base.errors import ConfigError
from qerl.base.http import may_hold_key
from qerl.config.names import OTHER_NAMES
from qerl.config.quant import expanded
from qerl.config.schema import RunConfig
from qerl.config.section import Conflict, OneOf, Section, yaml_word
from qerl.config.yaml_text import Path, YamlError, parse


class Removed(NamedTuple):
    """A key of older versions. A saved recipe may still have it with a value of `was` (of a mapping, with at least
    these items); None: with any value, since the key did not decide what a run learns."""

    was: tuple | None
    now: str


REMOVED = {  # items of a list are N
    "noise.controller": Removed(({"metric": "off"},), "sigma follows noise.schedule: leave it out"),
    "qat.quant_cfg.weights.group": Removed((16,), "a format has its own: leave it out"),
    "qat.quant_cfg.weights.global_scale": Removed(("pow2",), "it is a power of two: leave it out"),
    "qat.quant_cfg.weights.headroom_bits": Removed((2,), "weights may grow by two powers of two: leave it out"),
    "qat.quant_cfg.keep_first": Removed((0,), r"write ['re:model\.layers\.0\.'], or more, into ignore"),
    "qat.quant_cfg.keep_last": Removed((0,), r"write ['re:model\.layers\.27\.'], or more, into ignore"),
    "model.dtype": Removed(("auto",), "it is bfloat16 on a GPU, and float32 on a CPU: leave it out"),
    "qat.quant_cfg.calibration.rows": Removed((512,), "up to 512 rows are read: leave it out"),
    "qat.quant_cfg.calibration.batch": Removed(None, "a row takes one forward pass: leave it out"),
    "qat.quant_cfg.calibration.length": Removed((2048,), "a row has up to 2048 tokens: leave it out"),
    "data.curriculum.kind": Removed(("solved_share",), "a curriculum goes by the share of right completions"),
    "train.fp8": Removed(("auto",), "gradients are e5m2 if train.fp8_recipe is tensorwise, else e4m3: leave it out"),
    "adapter.dtype": Removed(("float32",), "the adapter's master weights are float32: leave it out"),
    "rollout.dynamic_sampling.max_extra_rollouts": Removed((6,), "a step has up to 6 extra rollouts: leave it out"),
    "data.grader_timeout_s": Removed((300.0,), "write it at the reward that grades: {name: accuracy, timeout_s: 60}"),
    "data.curriculum.low": Removed((0.0,), "a row is hard if none of its completions was right: leave it out"),
    "data.curriculum.high": Removed((1.0,), "a row is easy if all of its completions were right: leave it out"),
    "data.curriculum.reward": Removed((None,), "accuracy says what is right, or else the first reward: put it first"),
    "data.sources.N.system_prompt": Removed((None,), "write data.system_prompt, or a task of its own"),
    "data.sources.N.prompt_template": Removed((None,), "write data.prompt_template, or a task of its own"),
    "data.sources.N.validation.columns": Removed((None,), "its columns are the source's: leave it out"),
    "validation.columns": Removed((None,), "write data.columns, which a validation.source has too"),
    "rollout.tune_kernels": Removed(None, "the kernel decides by shape and number of tokens: leave it out"),
    "rollout.kv_refresh": Removed((10,), "fp8 keys and values get new scales every 10 steps: leave it out"),
    "rollout.batch_size": Removed(None, "write fewer rollout.prompts_per_step"),
    "environment.max_turn_tokens": Removed((None,), "write environment.max_turns and rollout.max_new_tokens"),
    "environment.failure_reward": Removed((0.0,), "an episode whose environment fails has the reward 0: leave it out"),
    "distill.temperature": Removed((None,), "write rollout.temperature"),
    "distill.chunk_tokens": Removed(None, "256 tokens have logits at once: leave it out"),
    "optim.beta1": Removed((0.9,), "it is 0.9: leave it out"),
    "optim.eps": Removed((1e-8,), "it is 1e-8: leave it out"),
    "run.save_every_minutes": Removed(None, "a checkpoint is due after 30 minutes as well: write run.save_every"),
    "validation.keep_best": Removed(None, "the best checkpoint is always kept: leave it out"),
    "noise.indexing": Removed(("code",), "write noise.schedule: paper for the paper's (k-1)/(K-1)"),
    "rollout.min_p": Removed((0.0,), "write rollout.top_p or rollout.top_k"),
    "sft.long_rows": Removed(("drop",), "longer rows are left out and counted: raise sft.max_tokens, or cut them"),
    "data.keep_unreadable": Removed(
        (False,), "rows that no grader reads are dropped: write data.task: own, data.grader"
    ),
    "data.curriculum.hard_share": Removed((0.2,), "write data.curriculum: true, which takes 0.2 of them"),
    "data.curriculum.easy_share": Removed((0.1,), "write data.curriculum: true, which takes 0.1 of them"),
    "data.sources.N.split": Removed((None,), "write data.split, which each source has"),
    "data.sources.N.limit": Removed((None,), "write data.limit, which each source has"),
    "data.sources.N.held_out": Removed((0,), "write data.held_out, of each source without a validation of its own"),
    "data.sources.N.validation.split": Removed(("test",), "write validation.split, which each source has"),
    "environment.max_observation_tokens": Removed((None,), "cut a long message in the environment or its tool"),
    "validation.target": Removed((None,), "write validation.stop_after, or fewer run.steps"),
    "logging.project": Removed(None, "set the variable WANDB_PROJECT"),
    "logging.run_name": Removed(None, "a run has its directory's name at trackers: write run.out"),
    "train.fp8_products": Removed(("all",), "write train.fp8_recipe: tensorwise_gradients, or blockwise_gradients"),
    "validation.min_improvement": Removed((0.0,), "any improvement counts: write validation.stop_after"),
}


class Key(NamedTuple):
    """A row of the table of keys; `default` is as YAML writes it, or "required"."""

    key: str
    type: str
    default: str
    description: str


def describe_config() -> list[Key]:
    """Every key in order, without the sections; the keys of a reward are listed as rewards.N.name."""
    return [Key(".".join(path), type_text(field), default_text(field), field.description) for path, field in _leaves()]


def type_text(field: FieldInfo) -> str:
    """The type as a person writes it: `number > 0 or null`, `one of nvfp4, bf16`, `list of text`."""
    if choice := next((each for each in field.metadata if isinstance(each, OneOf)), None):
        return f"one of {', '.join(choice.names())}"
    shown = [_type_name(kind) for kind in _alternatives(field.annotation)]
    bounds = " and ".join(_bounds(field))
    if bounds:
        shown[0] += f" {bounds}"
    return " or ".join(shown)


def default_text(field: FieldInfo) -> str:
    """The default as YAML writes it; "required" where there is none."""
    if field.is_required():
        return "required"
    return yaml_word(field.get_default(call_default_factory=True))


def field_at(path: Path) -> FieldInfo | None:
    """The field at a path of section keys and list indices; None where there is none."""
    section: type[Section] | None = RunConfig
    field = None
    for part in path:
        if isinstance(part, int):
            continue  # a list item has the list's field, and its section was taken from that
        if section is None or part not in section.model_fields:
            return None
        field = section.model_fields[part]
        section = section_of(field)
    return field


def section_at(path: Path) -> type[Section] | None:
    """The section at a path, an item's section for a list of sections; None where there is none."""
    if not path:
        return RunConfig
    field = field_at(path)
    return None if field is None else section_of(field)


def section_of(field: FieldInfo) -> type[Section] | None:
    """The Section that a field holds, alone, as the items of a list, or unless it is null."""
    kinds = get_args(field.annotation)[:1] if is_list(field) else _alternatives(field.annotation)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def is_list(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is tuple


def is_mapping(field: FieldInfo) -> bool:
    """Whether the field holds a mapping with keys of the user's own."""
    return any(get_origin(kind) is dict for kind in _alternatives(field.annotation))


def nearest(word: str, words: list[str] | tuple[str, ...], cutoff: float = 0.6) -> str | None:
    """The word that looks most like this one; None where none does."""
    found = difflib.get_close_matches(word, words, n=1, cutoff=cutoff)
    return found[0] if found else None


def nearest_key(path: Path) -> str | None:
    """The dotted key that an unknown one was probably meant to be: a sibling, another trainer's name, a namesake."""
    words = [str(part) for part in path]
    ends = [".".join(words[at:]) for at in range(len(words))]  # others have them in sections of their own
    if (name := next((end for end in ends[:-1] or ends if end in OTHER_NAMES), None)) is not None:
        return OTHER_NAMES[name]
    *parent, word = words
    section = section_at(path[:-1])
    siblings = list(section.model_fields) if section else []
    prefix = "".join(f"{part}." for part in parent)
    leaves = {key.split(".")[-1]: key for key in reversed([row.key for row in describe_config()])}
    if (close := nearest(word, siblings, 0.8)) is not None:
        return prefix + close
    if (name := next((each for each in reversed(words) if each in OTHER_NAMES), None)) is not None:
        return OTHER_NAMES[name]
    if word in leaves:
        return leaves[word]
    if (close := nearest(word, siblings)) is not None:
        return prefix + close
    close = nearest(word, list(leaves), 0.8)
    return leaves[close] if close else None


PROMPTS = ("data.sources.N.system_prompt", "data.sources.N.prompt_template")  # an evaluation asks by them
AT_TRACKERS = ("logging.project", "logging.run_name")


def drop_removed_(data: dict, evaluated: bool = False) -> list[str]:
    """Drop removed keys from a saved recipe, where the run did not use them, or translate them. The validation refuses
    the others. A recipe that is only `evaluated` goes without all that do not decide what is asked. Returns the keys
    that said something and are left out, which is to be logged."""
    validation, rows = _section(data, "validation"), _section(data, "data")
    if validation.get("columns") == rows.get("columns"):
        validation.pop("columns", None)
    _translate_(data)
    said = []
    for dotted, (was, _) in REMOVED.items():
        if dotted == "data.sources.N.validation.split":
            was = (validation.get("split", "test"),)  # which it is from now on
        for section, key in _holders(data, dotted):
            value = section[key]
            same = _was(value, was)
            if same or (evaluated and dotted not in PROMPTS):
                del section[key]
                if not same or (dotted in AT_TRACKERS and value is not None and not evaluated):
                    said.append(dotted)
    return list(dict.fromkeys(said))


def _section(data: dict, name: str) -> dict:
    return section if isinstance(section := data.get(name), dict) else {}


def _holders(data: dict, dotted: str) -> Iterator[tuple[dict, str]]:
    """The mappings of a recipe that have such a key, whose N is any item, and its last word."""
    *parents, key = dotted.split(".")
    sections: list[object] = [data]
    for parent in parents:
        if parent == "N":
            sections = [item for each in sections if isinstance(each, list) for item in each]
        else:
            sections = [each.get(parent) for each in sections if isinstance(each, dict)]
    yield from ((section, key) for section in sections if isinstance(section, dict) and key in section)


def _translate_(data: dict) -> None:
    """Write removed keys of a saved recipe as the keys that say the same now."""
    noise, train, rows = (_section(data, name) for name in ("noise", "train", "data"))
    if noise.get("indexing") == "paper" and noise.get("schedule", "exponential") == "exponential":
        del noise["indexing"]
        noise["schedule"] = "paper"
    if train.get("fp8_products") == "gradients" and train.get("fp8_recipe") in ("tensorwise", "blockwise"):
        del train["fp8_products"]
        train["fp8_recipe"] += "_gradients"
    sources = rows.get("sources")
    if not isinstance(sources, list) or not all(isinstance(each, dict) for each in sources):
        return
    for key in ("split", "limit"):
        given = [rows.get(key) if each.get(key) is None else each[key] for each in sources]
        _say_once_(rows, sources, key, given)
    if not rows.get("held_out"):
        given = [each.get("held_out", 0) for each in sources if each.get("validation") is None]
        _say_once_(rows, sources, "held_out", given)


def _say_once_(rows: dict, sources: list[dict], key: str, given: list) -> None:
    """Let `data` say what each of its sources said alike."""
    if given and any(each.get(key) for each in sources) and all(value == given[0] for value in given):
        rows[key] = given[0]
        for each in sources:
            each.pop(key, None)


def _was(value: object, values: tuple | None) -> bool:
    if values is None or value in values:
        return True
    return isinstance(value, dict) and any(isinstance(was, dict) and was.items() <= value.items() for was in values)


def _leaves(
    section: type[Section] = RunConfig, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    for name, key in section.model_fields.items():
        below = section_of(key)
        if below is None:
            yield (*path, name), key
        else:
            yield from _leaves(below, (*path, name, "N") if is_list(key) else (*path, name))


def _alternatives(annotation: object) -> tuple[object, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _type_name(kind: object) -> str:
    origin = get_origin(kind)
    if origin is Annotated:
        return _type_name(get_args(kind)[0])
    if origin is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if origin is tuple:
        return f"list of {_type_name(get_args(kind)[0])}"
    if origin is dict:
        return "mapping"
    return {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "null"}[kind]


def _bounds(field: FieldInfo) -> Iterator[str]:
    for bound in field.metadata:
        for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
            if hasattr(bound, name):
                yield f"{sign} {getattr(bound, name)}"


MOST_INSIDE = 50  # keys of a section that does not exist which are looked at
SHOWN = 60  # characters of a value that are shown


def to_config_error(error: ValidationError, origins: Mapping[Path, str], source: str) -> ConfigError:
    """The first mistake of a configuration; unknown keys first, since a misspelt key also makes one missing.

    `origins` gives the place (`file:line`, `--set ...`) of each key that was written; the others are in `source`.
    """
    details = sorted(error.errors(include_url=False), key=lambda detail: detail["type"] != "extra_forbidden")
    line = _line(details[0], origins, source)
    places = {detail["loc"] for detail in details}
    around = places & {place[:length] for place in places for length in range(len(place))}
    more = len(places - around - {details[0]["loc"]})  # a list with a wrong item also counts as too short
    return ConfigError(line + (f" ({more} more after this one)" if more > 0 else ""))


def unknown_key(path: Path, *inside: Path) -> str:
    """What an error says of a key that does not exist; it names the nearest one that does, of a section that does not
    exist for the first of the keys `inside` that another trainer has, or that is like one."""
    any_item = ".".join("N" if isinstance(part, int) else part for part in path)
    if any_item in REMOVED:
        return f"{'.'.join(map(str, path))}: this key is gone; {REMOVED[any_item].now}"
    like = [inner for inner in inside[:MOST_INSIDE] if nearest_key(inner) is not None]
    theirs = [inner for inner in like if any(str(word) in OTHER_NAMES for word in inner)]
    path = next(iter(theirs or (like if nearest_key(path) is None else ())), path)
    dotted = ".".join(map(str, path))
    if (close := nearest_key(path)) is not None:
        return f"{dotted}: unknown key; did you mean {close}?"
    section = section_at(path[:-1])
    if section is None:
        return f"{dotted}: unknown key; {'.'.join(map(str, path[:-1]))} holds a value, not keys"
    return f"{dotted}: unknown key; the keys here are {', '.join(section.model_fields)}"


def shown(value: object) -> str:
    """A value as an error shows it: in YAML's words, with its kind where that matters, cut to SHOWN characters."""
    if value is None or isinstance(value, bool):
        return yaml_word(value)
    if isinstance(value, str):
        return f"{_cut(repr(value))} (text)"
    if isinstance(value, list | tuple):
        return f"the list {_cut(repr(list(value)))}"
    if isinstance(value, dict):
        return f"the mapping {_cut(repr(value))}"
    return _cut(str(value))


def origin_of(path: Path, origins: Mapping[Path, str]) -> str | None:
    """Where a key was written, or else the innermost section or item around it."""
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return origins[path[:length]]
    return None


def _line(detail: Mapping, origins: Mapping[Path, str], source: str) -> str:
    conflict = detail.get("ctx", {}).get("error")
    if isinstance(conflict, Conflict):
        return f"{_conflict_place(conflict, origins) or source}: {conflict}"
    path = detail["loc"]
    place = origin_of(path, origins) or source
    if detail["type"] == "extra_forbidden":
        return f"{place}: {unknown_key(path, *_inside(path, detail['input']))}"
    dotted = ".".join(map(str, path))
    field, given = field_at(path), detail["input"]
    if isinstance(given, dict) and (gone := next((key for key in given if f"{dotted}.{key}" in REMOVED), None)):
        return f"{place}: {unknown_key((*path, gone))}"
    if detail["type"] == "missing":
        section = section_at(path)
        if section is not None:
            required = [key for key, below in section.model_fields.items() if below.is_required()]
            return f"{place}: {dotted}: missing; write {dotted}: and under it at least {', '.join(required)}"
        return f"{place}: {dotted}: missing; write {dotted} ({type_text(field)}: {field.description})"
    return f"{place}: {dotted}: got {shown(detail['input'])}, expected {_expected(path, field)}{_remedy(detail, field)}"


def _inside(path: Path, value: object) -> Iterator[Path]:
    """The paths of what is in a mapping, however deep; the path of another value."""
    if not isinstance(value, dict) or not value:
        yield path
        return
    for key, inner in value.items():
        yield from _inside((*path, key), inner)


def _conflict_place(conflict: Conflict, origins: Mapping[Path, str]) -> str | None:
    """Where the first of the keys was written; those on the command line come before those in a file."""
    paths = [tuple(int(part) if part.isdecimal() else part for part in key.split(".")) for key in conflict.keys]
    places = [origin_of(path, origins) for path in paths]
    written = [place for place in places if place is not None]
    return next((place for place in written if place.startswith("--")), next(iter(written), None))


def _expected(path: Path, field: FieldInfo | None) -> str:
    section = section_at(path)
    if section is not None and (isinstance(path[-1], int) or not is_list(field)):
        return f"keys ({', '.join(section.model_fields)})"
    if section is not None:
        return "a list of " + "{" + ", ".join(section.model_fields) + "}"
    text = "text" if field is None else type_text(field)  # None: a value in data.columns
    return text.removeprefix("list of ") if isinstance(path[-1], int) else text


def _remedy(detail: Mapping, field: FieldInfo | None) -> str:
    kind, value = detail["type"], detail["input"]
    if kind == "literal_error" and isinstance(value, str):
        close = nearest(value, detail["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", "))
        return f"; did you mean {close}?" if close else ""
    dotted = ".".join(map(str, detail["loc"]))
    if kind == "string_type":
        return f"; write text in quotes (after --set in a second pair: --set '{dotted}=\"...\"')"
    if field is None or field.is_required() or isinstance(detail["loc"][-1], int):
        return ""
    if kind == "model_type":
        return f"; write keys under it, or {f'{dotted}: null' if field.default is None else 'leave it out'}"
    return f"; the default is {default_text(field)}"


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


QUANT_CFG = ("qat", "quant_cfg")


@dataclass
class Draft:
    """`origins` maps a key to where it was written, `file:line` or `--set ...`. `source` is the file, which errors name
    for a missing key."""

    source: str
    data: dict = field(default_factory=dict)
    origins: dict[Path, str] = field(default_factory=dict)

    def merge(self, data: dict, origins: dict[Path, str]) -> None:
        """Merge a recipe over this one. Unknown keys are kept: the validation reports them."""
        for key, value in data.items():
            self._assign((key,), value, origins.get)

    def override(self, text: str) -> None:
        """Apply one `a.b=c`: c is YAML, a.b may hold list indices (`rewards.0.weight`). Raises ConfigError."""
        key, equals, value_text = (part.strip() for part in text.partition("="))
        # Errors show the origin, and a header or a URL may hold a secret.
        secret = "headers" in text or ("://" in text and ("@" in text or "?" in text)) or may_hold_key(text)
        origin = f"--set {key}=..." if secret else f"--set {text}"
        if not equals or not key:
            raise ConfigError(f"{origin}: is not KEY=VALUE; write --set section.key=value")
        if not value_text:
            raise ConfigError(
                f"{origin}: has no value; write --set {key}=null, or --set {key}='\"\"' for an empty text"
            )
        try:
            value = parse(value_text).data
        except YamlError as error:
            raise ConfigError(
                f"{origin}: {error}; text that is not YAML goes in quotes: --set '{key}=\"...\"'"
            ) from None
        self.put(key, value, origin)

    def put(self, key: str, value: object, origin: str) -> None:
        """Set one dotted key. Raises ConfigError if there is no such key or item."""
        path: Path = ()
        inside = [*_inside(tuple(key.split(".")), value)]
        for part in key.split("."):
            path = (*path, self._step(path, part, inside, origin))
        self._assign(path, value, lambda _: origin)

    def _step(self, parent: Path, part: str, inside: Sequence[Path], origin: str) -> str | int:
        """One part of a dotted key as the data holds it: a key of a mapping, or the number of a list item."""
        holder = field_at(parent)
        of_items = holder is not None and is_list(holder) and not isinstance(parent[-1], int)
        if not of_items and field_at((*parent, part)) is None and not self._is_free(parent):
            raise ConfigError(f"{origin}: {unknown_key((*parent, part), *inside)}")
        container = self._container((*parent, part))
        if isinstance(container, dict):
            return part
        if part.isdecimal() and int(part) < len(container):
            return int(part)
        dotted = ".".join(map(str, parent))
        numbers = f"0 to {len(container) - 1}" if container else "none"
        raise ConfigError(
            f"{origin}: {dotted} is a list, item {part} is not in it; write {dotted}.N with N an item's "
            f"number ({numbers}), or the whole list: --set '{dotted}=[...]'"
        )

    def _is_free(self, path: Path) -> bool:
        """Whether the path lies in a mapping with keys of the user's own (data.columns, rewards.N.args)."""
        fields = (field_at(path[:length]) for length in range(1, len(path) + 1))
        return any(is_mapping(found) for found in fields if found is not None)

    def _assign(self, path: Path, value: object, origin: Callable[[Path], str | None]) -> None:
        section = section_at(path)
        merges = section is not None and not (is_list(field_at(path)) and not isinstance(path[-1], int))
        if merges and isinstance(value, dict) and (value or isinstance(self._container(path).get(path[-1]), dict)):
            for key, inner in value.items():
                self._assign((*path, key), inner, origin)
            return
        container = self._container(path)
        if isinstance(container, list) or path[-1] in container:  # what it held was written elsewhere
            for old in [old for old in self.origins if old[: len(path)] == path]:
                del self.origins[old]
        container[path[-1]] = value
        self._note(path, value, origin)

    def _note(self, path: Path, value: object, origin: Callable[[Path], str | None]) -> None:
        if (place := origin(path)) is not None:
            self.origins[path] = place
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, inner in items:
            self._note((*path, key), inner, origin)

    def _container(self, path: Path) -> dict | list:
        """The mapping or list that holds the last part of the path; made from the defaults if it was not written."""
        container: dict | list = self.data
        for length in range(1, len(path)):
            here, part = path[:length], path[length - 1]
            if isinstance(container, dict) and container.get(part) is None:
                container[part] = _default(here)
            if here == QUANT_CFG and isinstance(container[part], str):
                container[part] = self._keys_of(container[part])  # of which one is to change
            container = container[part]
            if not isinstance(container, dict | list):
                place = self.origins.get(here, self.source)
                dotted = ".".join(map(str, here))
                raise ConfigError(f"{place}: {dotted}: got {shown(container)}, expected keys; write them under it")
        return container

    def _keys_of(self, quant_cfg: str) -> object:
        try:
            return expanded(quant_cfg)
        except Conflict as conflict:
            raise ConfigError(f"{self.origins.get(QUANT_CFG, self.source)}: {conflict}") from None


def _default(path: Path) -> dict | list:
    """A list's default as YAML data; anything else is an empty mapping, whose keys have defaults of their own."""
    holder = field_at(path)
    if holder is None or not is_list(holder):
        return {}
    return [item if isinstance(item, str) else item.model_dump() for item in holder.default]
