"""The documentation against the source: commands parse, keys and errors exist, the pages build and load nothing."""

import html
import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import qerl
from qerl.api.run import Run
from qerl.cli.plan import plan_of, show
from qerl.config.keys import REMOVED, describe_config
from qerl.config.names import OTHER_NAMES
from qerl.config.recipe import load_recipe, recipe_names
from qerl.config.schema import RunConfig
from qerl.plan.engine_memory import card_of
from qerl.plan.sizes import read_sizes
from quantize.export.options import serve_adapter_line, serve_model_line
from tests.helpers.parsed import check_parses
from training.preflight.advice import largest_completion, likely
from training.preflight.seconds import step_seconds

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = sorted([*DOCS.glob("*.md"), *DOCS.glob("lab/*.md")])
BENCHMARKS = ROOT / "benchmarks" / "README.md"
TEXTS = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES]
WORDS = 1000  # that the README may have
MANUAL = 900  # words of a page that says how to do something; what was measured is in docs/lab
REFERENCES = ("metrics.md", "other-names.md", "troubleshooting.md")  # to look something up in
RECORDINGS = sorted((DOCS / "recordings").glob("*.txt"))


def page_name(path):
    return path.relative_to(ROOT).as_posix().removesuffix(".md")


def script(name):
    spec = importlib.util.spec_from_file_location(name, next((ROOT / "scripts").glob(f"*/{name}.py")))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands():
    """(file, command) for each `qerl ...` line of the recordings and of the code in the pages."""
    for path in (*RECORDINGS, *TEXTS):
        prefix = r"^(?:\$|Next:) " if path.suffix == ".txt" else r"^    "
        for line in re.findall(prefix + r"(.*\bqerl .*)$", path.read_text(encoding="utf-8"), re.MULTILINE):
            yield pytest.param(line.rpartition(" | ")[2], id=f"{path.stem}: {line[:60]}")


@pytest.mark.parametrize("command", list(commands()))
def test_each_command_that_is_shown_parses(command):
    check_parses(command)


def test_the_recordings_are_those_of_the_script():
    recording = script("record_docs")
    sessions = {**recording.SESSIONS, "live": [recording.LIVE]}
    assert {path.stem for path in RECORDINGS} == set(sessions)
    for path in RECORDINGS:
        shown = re.findall(r"^\$ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert shown == sessions[path.stem], path.name


@pytest.mark.parametrize(
    ("name", "recipe", "gpu", "overrides"),
    [
        ("plan", "dapo_7b", "24", ["rollout.max_new_tokens=2048"]),
        ("plan-too-large", "dapo_14b", "4090", ["rollout.max_new_tokens=12288"]),
        ("dry-run", "tiny", "24", []),
    ],
)
def test_the_plans_that_are_shown_are_what_is_planned(name, recipe, gpu, overrides):
    """But for the card's name: a dry run without a card plans for 24 GiB."""
    config = load_recipe(recipe, overrides)
    said = Console(file=StringIO(), width=80)
    recorded = (DOCS / "recordings" / f"{name}.txt").read_text(encoding="utf-8")
    prompts = re.search(r"and prompts (\d+) \(as its (\d+) prompts have\)", recorded)  # a dry run reads its rows
    expected = likely(config, prompts=[int(prompts[1])] * int(prompts[2]) if prompts else None)
    show(config, plan_of(config, gpu), said, expected)
    shown, planned = (text.partition("Memory on ")[2].splitlines()[1:] for text in (recorded, said.file.getvalue()))
    assert [line.rstrip() for line in shown if not line.startswith("(exit code")] == [line.rstrip() for line in planned]


@pytest.mark.parametrize("name", ["help", "recipes", "errors"])
def test_a_recording_that_needs_no_model_is_what_is_printed_now(tmp_path, name):
    recording = script("record_docs")
    done = [recording.run(command, tmp_path) for command in recording.SESSIONS[name]]
    printed = [recording.normalised(each.stdout, tmp_path) for each in done]
    shown = (DOCS / "recordings" / f"{name}.txt").read_text(encoding="utf-8")
    assert [text for text in printed if text not in shown] == []


def test_each_recording_is_shown_on_a_page():
    shown = set(re.findall(r"recordings/([\w-]+)\.txt", "".join(page.read_text(encoding="utf-8") for page in PAGES)))
    assert shown == {path.stem for path in RECORDINGS}


def test_each_heading_of_troubleshooting_is_a_part_of_an_error():
    errors = script("docs_errors")
    texts = [message.text for message in errors.messages()]
    found = errors.headings((DOCS / "troubleshooting.md").read_text(encoding="utf-8"))
    assert len(found) > 30
    assert [words for words, _ in found if not any(words in text for text in texts)] == []


def test_messages_are_read_from_calls_conditions_and_functions(tmp_path, monkeypatch):
    errors = script("docs_errors")
    package = tmp_path / "qerl"
    package.mkdir()
    (package / "a.py").write_text(
        'def f(x):\n    raise DataError(f"got {x.name}, {len(x) + 1} " + "rows")\n'
        'def g():\n    raise EngineError(_why(1))\ndef _why(n):\n    return "one" if n else "two"\n'
        'def h():\n    yield Conflict({"a.b": 1, f"c.{k}": 2}, "cannot be", "a.b: 3")\n'
        'raise ValueError("ours to fix")\n'
    )
    monkeypatch.setattr(errors, "ROOT", tmp_path)
    monkeypatch.setattr(errors, "PACKAGES", ("qerl",))
    assert [(message.kind, message.text) for message in errors.messages()] == [
        ("ConfigError", "a.b {value} with c.{k} {value}: cannot be; write a.b: 3"),
        ("DataError", "got {name}, {...} rows"),
        ("EngineError", "one"),
        ("EngineError", "two"),
    ]


@pytest.mark.parametrize("page", TEXTS, ids=page_name)
def test_each_key_that_a_page_names_exists(page):
    keys = {row.key for row in describe_config()}
    words = rf"(?<![\w.])(?:{'|'.join(RunConfig.model_fields)})\.[a-z0-9_]+(?:\.[a-z_]+)*"
    text = page.read_text()
    if page.name == "coming-from.md":  # commands of others
        text = re.sub("```bash\n.*?```", "", text, flags=re.DOTALL)
    named = {re.sub(r"\.\d+\b", ".N", name) for name in re.findall(words, text)} - {*OTHER_NAMES}
    named -= {name for name in named if name.endswith((".py", ".yaml", ".md", ".json", ".txt"))}
    named -= {f"run.{name}" for name in dir(Run)} | {"train.torch"}  # of a variable in Python, and of a module of Ray
    if page.name == "CHANGELOG.md":
        keys |= {part for key in REMOVED for part in (key, key.replace(".N.", "."))}
    sections = {key.rpartition(".")[0].removesuffix(".N") for key in keys}
    assert {name for name in named if name not in keys | sections} == set()


def test_each_line_for_vllm_is_of_options_that_it_takes():
    """Of 0.25.1 (its entrypoints/openai/cli_args.py and engine/arg_utils.py); where vllm is installed it reads them."""
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (*RECORDINGS, *TEXTS))
    lines = re.findall(r"^(?:or: | {4})?(vllm serve .*)$", pages, re.MULTILINE)
    lines += [serve_model_line(Path("a b")), *(serve_adapter_line(Path(name), "b", 5, False) for name in ("x", "a=b"))]
    commands = [shlex.split(line, comments=True) for line in lines]
    assert len(commands) > 8
    takes = {"--served-model-name", "--enable-lora", "--max-lora-rank", "--lora-modules"}
    assert {word for words in commands for word in words if word.startswith("-")} <= takes
    if importlib.util.find_spec("vllm"):
        from vllm.entrypoints.openai.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = make_arg_parser(FlexibleArgumentParser())
        assert [parser.parse_args(words[2:]).model_tag for words in commands] == [words[2] for words in commands]


@pytest.mark.parametrize("page", TEXTS, ids=page_name)
def test_each_file_that_a_page_names_exists(page):
    folders = "qerl|quantize|training|eval|scripts|tests|benchmarks"
    paragraphs = page.read_text(encoding="utf-8").split("\n\n")
    text = "\n\n".join(part for part in paragraphs if "49887883" not in part)  # which names files of that commit
    named = set(re.findall(rf"\b(?:{folders})/[\w./-]*\w/?", text))
    assert {name for name in named if not (ROOT / name).exists()} == set()


def rows(text, width):
    """The cells of each table line of `width` cells; marks of code are left out."""
    cells = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in re.findall(r"^\|.*\|$", text, re.MULTILINE)
    ]
    return [row for row in cells if len(row) == width and row[0] != "---"]


def test_what_a_page_says_fits_is_what_the_plan_says():
    table = [row for row in rows((DOCS / "memory.md").read_text(encoding="utf-8"), 5) if row[0] in recipe_names()]
    assert len(table) == 9
    for name, own, *fitting in table:
        config = load_recipe(name)
        sizes = read_sizes(config.model.base)
        found = [largest_completion(config, sizes, card_of(gpu)) for gpu in ("24", "4090", "80")]
        assert own == str(config.rollout.max_new_tokens)
        assert fitting == [str(tokens) if tokens >= 512 else "does not fit" for tokens in found], name


def test_each_algorithm_on_the_page_of_the_loss_is_a_recipe():
    page = (ROOT / "docs" / "loss.md").read_text(encoding="utf-8")
    table = page.partition("## Algorithms by name")[2].partition("\n## ")[0]
    algorithms = [re.findall(r"`([a-z_.]+): ([^`]+)`", row) for row in table.splitlines() if row.startswith("|")]
    assert sum(map(bool, algorithms)) == 10
    for keys in algorithms:
        load_recipe("tiny", [f"{key}={value}" for key, value in keys])


def test_the_readme_and_manuals_are_short():
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in (README, *DOCS.glob("*.md"))}
    assert words.pop("README.md") <= WORDS
    assert {name: count for name, count in words.items() if count > MANUAL and name not in REFERENCES} == {}


def test_the_readme_s_hours_are_those_of_the_plan():
    """With the mean length that the plan assumes. Cards that a recipe does not fit are refused by the plan."""
    head, *table = rows(README.read_text(encoding="utf-8"), 7)
    assert head[1:] == ["3090", "4090", "5090", "A100", "H100", "H200"]
    assert len(table) == 4
    for recipe, *cells in table:
        config = load_recipe(recipe.split()[0].strip("`"))
        for gpu, cell in zip(head[1:], cells, strict=True):
            made = plan_of(config, gpu.lower())
            seconds = step_seconds(config, made.sizes, made.card, made.micro_batches, likely(config).lengths)
            hours = config.run.steps * sum(seconds.values()) / 3600
            assert cell == (f"{hours:.{hours < 1:d}f} h" if not made.found else "no"), (recipe, gpu)


def test_the_readme_has_its_two_commands_and_two_tables():
    text = README.read_text(encoding="utf-8")
    assert [line.split()[0] for line in re.findall(r"^    (\./scripts/.*)$", text, re.MULTILINE)] == [
        "./scripts/quickstart.sh",
        "./scripts/test.sh",
    ]
    assert len(re.findall(r"^\|---", text, re.MULTILINE)) == 2  # speed, and cards


def test_the_readme_s_figures_are_those_of_the_benchmarks():
    """Seconds and memory of each row stand in a row of the benchmarks: all but one in a table of one call."""
    measured = BENCHMARKS.read_text(encoding="utf-8")
    one_call = {row[0].partition(", micro-batch")[0]: (row[1], f"{row[3]} GiB") for row in rows(measured, 4)}
    shown = {
        "qerl": "qerl, NVFP4",
        "qerl, [gradients in FP8](docs/fp8.md)": "qerl, NVFP4, `train.fp8_recipe: tensorwise_gradients",
        "Unsloth 2026.10.9, 16-bit": "Unsloth 2026.10.9, 16-bit",
        "TRL 1.16, tuned": "TRL 1.16, tuned as above",
    }
    expected = {}
    for name, row in shown.items():
        seconds = [f"{float(each):.1f}" for each in one_call[row][0].split("-")]
        expected[name] = ("-".join(seconds), one_call[row][1])
    held = next(row for row in rows(measured, 14) if "cap_gib: 24" in row[0])
    expected["qerl, held under 24 GiB, in another call"] = (held[1], f"{held[12]} GiB")
    assert {name: tuple(figures) for name, *figures in rows(README.read_text(encoding="utf-8"), 3)[1:]} == expected


def test_the_first_pictures_show_figures_that_were_measured():
    measured = README.read_text(encoding="utf-8") + (DOCS / "lab" / "study.md").read_text(encoding="utf-8")
    for name, count in (("learns", 6), ("speed", 17)):
        drawn = re.findall(r">([^<]+)</text>", (DOCS / "images" / f"{name}.svg").read_text(encoding="utf-8"))
        figures = re.findall(r"\d+\.\d+(?:\.\d+)?", " ".join(drawn))
        assert len(figures) == count
        assert set(figures) <= set(re.findall(r"\d+\.\d+(?:\.\d+)?", measured))


def test_the_architecture_names_functions_and_files_that_exist():
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`(?:\w+\.)?(\w+)` in \[[^\]]*\]\(\.\./([\w/]+\.py)\)", text)
    assert len(named) > 4
    undefined = [
        (name, path) for name, path in named if not re.search(rf"(?:def|class) {name}\b", (ROOT / path).read_text())
    ]
    assert undefined == []
    drawn = re.findall(r"[\w/]+\.py", (DOCS / "images" / "data-flow.svg").read_text(encoding="utf-8"))
    assert len(drawn) > 8
    assert [name for name in drawn if not (ROOT / name).exists() and not (ROOT / "training" / name).exists()] == []


def test_the_first_page_leads_to_each_page_and_so_does_the_menu():
    pages = {path.relative_to(DOCS).as_posix() for path in PAGES} - {"index.md"}
    linked = {path for path, _ in script("docs_links").links((DOCS / "index.md").read_text(encoding="utf-8"))}
    assert pages <= linked
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    assert pages <= set(re.findall(r"- ([\w/-]+\.md)", menu))
    assert "docs/index.md" in README.read_text(encoding="utf-8")


LINKED = [*TEXTS, BENCHMARKS]


@pytest.mark.parametrize("page", LINKED, ids=page_name)
def test_each_relative_link_leads_to_a_file_and_an_anchor_that_exist(page):
    docs_links = script("docs_links")
    name = page.relative_to(ROOT).as_posix()
    missing = []
    for path, anchor in docs_links.links(page.read_text(encoding="utf-8")):
        found = ROOT / docs_links.target(name, path)
        if not found.exists():
            missing.append(path)
        elif anchor and anchor not in docs_links.anchors(found.read_text(encoding="utf-8")):
            missing.append(f"{path}#{anchor}")
    assert missing == []


def test_links_and_anchors_are_read_as_github_reads_them():
    docs_links = script("docs_links")
    text = (
        "# The `a.b` key, and more\n[a](b.md#c) `[no](x.md)` [b](#d) [c](http://e.org) ![](i.png)\n## Twice\n## Twice"
    )
    assert list(docs_links.links(text)) == [("b.md", "c"), ("", "d"), ("i.png", "")]
    assert docs_links.anchors(f"{text}\n```\n# code\n```") == {"the-ab-key-and-more", "twice", "twice-1"}
    assert docs_links.target("docs/a.md", "../b/c.md") == "b/c.md"
    assert docs_links.replace_links("`[x](y)` [`a`](b.md#c)", lambda link: link[3]) == "`[x](y)` b.md"


def test_the_pages_build_and_load_nothing_from_elsewhere(tmp_path):
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = [*tmp_path.glob("*.html"), *tmp_path.glob("lab/*.html")]
    assert len(pages) >= len(PAGES) + 2
    loaded = re.compile(r"<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^\"' >]+")
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert loaded.findall(text) == [], page.name
        assert "<!-- made" not in text, page.name
        assert "recordings/" not in text, page.name  # each is shown where its link stood
    assert "noise.sigma_start" in (tmp_path / "recipe-keys.html").read_text(encoding="utf-8")
    check_commands((tmp_path / "commands.html").read_text(encoding="utf-8"))
    check_copies((tmp_path / "quickstart.html").read_text(encoding="utf-8"))
    check_functions((tmp_path / "python-reference.html").read_text(encoding="utf-8"))


def check_functions(page):
    """Each name of the Python interface, and each argument with what it means."""
    shown = dict(re.findall(r'<h3 id="qerl\.(\w+)"(.*?)(?=<h[23]|</article>)', page, re.DOTALL))
    assert set(shown) == {name for name in qerl.__all__ if name not in ("__version__", "QerlError")}
    for name in ("train", "sft", "distill"):
        text = html.unescape(re.sub(r"<[^>]*>", "", shown[name]))
        for argument in list(inspect.signature(getattr(qerl, name)).parameters)[-10:]:
            assert re.search(rf"\n\s*{argument}\s+\(.*?\)\s+–\s+\w+", text, re.DOTALL), (name, argument)


def check_commands(page):
    """Each command with each of its options, as the command line has them."""
    parts = dict(re.findall(r'<h2 id="[^"]*">(qerl [a-z ]+)<.*?</h2>(.*?)(?=<h2|</article>)', page, re.DOTALL))
    known = dict(script("docs_commands").all_commands())
    assert set(parts) == {f"qerl {name}" for name in known}
    for name, command in known.items():
        options = {option for each in command.params for option in each.opts if option.startswith("--")} - {"--help"}
        shown = html.unescape(re.sub(r"<[^>]*>", "", parts[f"qerl {name}"]))
        assert {option for option in options if not re.search(rf"{option}\b", shown)} == set(), name


def check_copies(page):
    """The copy button belongs to blocks of commands, which hold no prompt; output has none."""
    blocks = re.findall(r'<div class="([^"]*highlight[^"]*)">(.*?)</div>', page, re.DOTALL)
    texts = [(kind, html.unescape(re.sub(r"<[^>]*>", "", block))) for kind, block in blocks]
    copied = [text.strip() for kind, text in texts if "no-copy" not in kind]
    printed = [text for kind, text in texts if "no-copy" in kind]
    assert "qerl train --recipe tiny --steps 12 --set run.save_every=6 --out runs/demo" in copied
    assert any("step 12/12" in text for text in printed)
    assert not any(re.search(r"^\$ |step 12/12|[│┃]", text, re.MULTILINE) for text in copied)
