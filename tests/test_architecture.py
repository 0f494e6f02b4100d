"""The layers of the design: the syntax trees show which module imports which."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from functools import cache

import pytest

from qerl import formats
from tests.helpers.folders import imported, modules, upward
from tests.helpers.syntax import PACKAGES, ROOT, name_of, nodes, python_files, tree

SOURCES = python_files(*PACKAGES)
# third-party package -> the only files that may import it
SOLE_IMPORTERS = {
    "vllm": ("qerl/engine/vllm/engine.py", "qerl/engine/vllm/"),
    "peft": ("qerl/checkpoint/adapter.py",),
    "trl": ("training/trainer.py",),
    "llmcompressor": ("quantize/",),
    "lighteval": ("eval/lighteval_model.py", "eval/lighteval_suite.py"),  # seconds of imports, and no part of a run
}
# The command line and the Python interface start all stages, and `qerl train --quantize` two of them. An evaluation
# reads, asks and grades its questions as training does.
ENTRY_POINTS = {
    "eval/plan.py": {"training"},
    "eval/run.py": {"training"},
    "qerl/cli/main.py": {"training", "eval"},
    "qerl/cli/evaluate.py": {"eval"},
    "qerl/cli/quantize.py": {"quantize"},
    "qerl/cli/plan.py": {"training"},  # the plan of a recipe is a part of its preflight
    "qerl/cli/train.py": {"quantize", "training"},
    "qerl/api/recipe.py": {"training"},
    "qerl/api/training.py": {"training", "eval", "quantize"},
}

MOST_MODULES = 16  # of a folder


def is_type_checking(node):
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def walk(node):
    """All nodes except those that only type checkers see."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not is_type_checking(child):
            yield from walk(child)


def walk_import(node):
    """The nodes that run when a module is imported: without functions' bodies, and what only type checkers see."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not is_type_checking(child) and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from walk_import(child)


@cache
def imported_packages(path):
    found = set()
    for node in walk(tree(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.partition(".")[0])
    return found


def strangers(path):
    """The stages that a file imports and must not."""
    allowed = {name_of(path).partition("/")[0], "qerl"} | ENTRY_POINTS.get(name_of(path), set())
    return imported_packages(path) & set(PACKAGES) - allowed


def test_stages_import_qerl_and_not_one_another():
    assert {name_of(path): strangers(path) for path in SOURCES if strangers(path)} == {}


@pytest.mark.parametrize("package", SOLE_IMPORTERS)
def test_each_heavy_package_has_its_importers(package):
    importers = {name_of(path) for path in SOURCES if package in imported_packages(path)}
    assert {name for name in importers if not name.startswith(SOLE_IMPORTERS[package])} == set()
    assert importers or package == "llmcompressor"  # imported by name, to explain it if it is missing


def names_torch_distributed(node):
    if isinstance(node, ast.Import):
        return any(alias.name.startswith("torch.distributed") for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        return module.startswith("torch.distributed") or (
            module == "torch" and any(alias.name == "distributed" for alias in node.names)
        )
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed"


def test_folders_import_downwards_only():
    """Imports for type checkers and inside functions count too; the order is that of tests/helpers/folders.py."""
    assert sorted(f"{module} -> {other}" for module, other in upward()) == []


def test_a_folder_is_seen_at_a_glance():
    counted = Counter(name_of(path.parent) for path in modules().values() if path.name != "__init__.py")
    assert {folder: count for folder, count in counted.items() if count > MOST_MODULES} == {}


def test_only_parallel_talks_to_other_processes():
    users = [name_of(path) for path in SOURCES if any(map(names_torch_distributed, nodes(path)))]
    launcher = "qerl/cli/launch.py"  # it starts the processes
    assert users == ["qerl/base/process_group.py", launcher]


A_RUN = ("training.run", "qerl.engine.transformers.engine")  # what a run of an adapter begins with, on a CPU
MOST_AT_START = 140  # our modules that it loads; a run with every feature loads 200
FEATURES = {  # what a run that does not ask for it never loads
    "algebra": ("qerl.data.formulas.equality", "qerl.data.formulas.expression", "qerl.data.grading.math_pool"),
    "carry-over": ("training.rollout.carry_over",),
    "CUDA sources": ("qerl.formats.cuda", "qerl.formats.nvfp4.kernel_layout", "qerl.formats.nvfp4.slab_layout"),
    "distillation": ("training.loss.divergence", "training.policy.teacher"),
    "dynamic sampling": ("training.rollout.dynamic_sampling",),
    "episodes": ("qerl.episodes",),
    "experts": ("qerl.formats.experts", "qerl.model.experts"),
    "export": ("qerl.checkpoint.export", "qerl.checkpoint.output", "qerl.checkpoint.peft_folder"),
    "FP8": ("qerl.formats.fp8.kv", "qerl.formats.fp8.linear", "qerl.formats.fp8.training", "training.policy.kv_ranges"),
    "given conversations": ("qerl.data.conversations", "qerl.engine.loaded_base", "training.sft", "training.sft_step"),
    "judge and reward servers": ("training.rewards.server",),
    "quantization-aware training": (
        *("training.policy.rounding", "training.policy.shards", "training.policy.weights"),
        *("training.run_dir.start_base", "qerl.formats.nvfp4.activations"),
    ),
    "trackers": ("training.run_dir.trackers",),
    "validation": ("qerl.data.grading.intervals", "training.validate", "training.validation"),
}


@cache
def at_start():
    """Our modules that A_RUN loads as it is imported. The few that its functions import are for what a recipe says."""
    loaded, left = set(), list(A_RUN)
    while left:
        if (module := left.pop()) not in loaded:
            loaded.add(module)
            left += imported(module, walk_import(tree(modules()[module])))
            left += [parent for parent in (module.rpartition(".")[0],) if parent in modules()]
    return loaded


def test_a_run_loads_what_every_run_needs():
    assert len(at_start()) <= MOST_AT_START, "let the builder that reads the recipe's switch import the feature"


@pytest.mark.parametrize("feature", FEATURES)
def test_a_run_does_not_pay_for_a_feature_that_it_does_not_have(feature):
    assert set(FEATURES[feature]) <= set(modules())
    paid = [name for name in at_start() if any(f"{name}.".startswith(f"{each}.") for each in FEATURES[feature])]
    assert paid == []


def strings(module):
    """The string constants among a module's nodes, without docstrings and the help texts of options and keys."""
    skipped = set()
    for node in module:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            skipped.add(node.body[0].value)
        if isinstance(node, ast.keyword) and node.arg in ("help", "description"):
            skipped.update(ast.walk(node.value))
    texts = (node for node in module if isinstance(node, ast.Constant) and node not in skipped)
    return [node.value for node in texts if isinstance(node.value, str)]


def test_only_the_formats_know_their_names():
    """Everything else asks the value: a format is never an `if` on its name."""
    names = [name for name in formats.names() if name != "mixed"]  # which is a word of other things, too
    word = re.compile(rf"(?<![\w.-])({'|'.join(names)})(?![\w-])")
    others = [path for path in SOURCES if not name_of(path).startswith("qerl/formats/")]
    named = {name_of(path): [text for text in strings(nodes(path)) if word.search(text)] for path in others}
    assert {name: texts for name, texts in named.items() if texts} == {}


def format_classes():
    """The names of the classes that belong to one format, and of the formats themselves in Python."""
    own = [path for path in SOURCES if name_of(path).startswith(("qerl/formats/nvfp4/", "qerl/formats/fp8/"))]
    classes = {node.name for path in own for node in nodes(path) if isinstance(node, ast.ClassDef)}
    return classes | {name for name, value in vars(formats).items() if isinstance(value, formats.Format)}


def is_name_of_a_format(node):
    """Whether an expression is `x.name` of something called a format, or of a format itself."""
    if not isinstance(node, ast.Attribute) or node.attr != "name":
        return False
    owner = ast.unparse(node.value).rpartition(".")[2]
    return owner.endswith("format") or owner in format_classes()


def questions_about_formats(module):
    """`isinstance` on a class of one format, and comparisons with a format or its name, among a module's nodes."""
    for node in module:
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "issubclass")
        ):
            if {ast.unparse(each).rpartition(".")[2] for each in ast.walk(node.args[1])} & format_classes():
                yield ast.unparse(node)
        elif isinstance(node, ast.Compare) and any(map(is_name_of_a_format, [node.left, *node.comparators])):
            yield ast.unparse(node)


def test_nobody_asks_which_format_it_is():
    others = [path for path in SOURCES if not name_of(path).startswith("qerl/formats/")]
    found = {f"{name_of(path)}: {text}" for path in others for text in questions_about_formats(nodes(path))}
    assert found == set()


def test_a_recipe_does_not_travel():
    """Below training, parts take the values that they need, type imports included."""
    knowing = ("training/", "qerl/config/", "qerl/api/", "qerl/cli/")
    importers = {
        name_of(path)
        for path in SOURCES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ImportFrom) and any(alias.name == "RunConfig" for alias in node.names)
    }
    assert {name for name in importers if not name.startswith(knowing)} == set()
    assert importers


HEAVY = (
    *("torch", "transformers", "numpy", "datasets", "pyarrow", "peft", "trl", "vllm", "safetensors", "pandas"),
    *("matplotlib", "sympy", "math_verify"),
)
LIGHT = {  # what is imported -> what else it must not load
    "import qerl.cli.main": ("pydantic", "httpx"),
    "import qerl.formats, qerl.formats.nvfp4.layout": (),
    "import qerl.checkpoint.resolve": ("huggingface_hub", "yaml"),
    "import quantize.run": ("llmcompressor", "compressed_tensors"),
    "from qerl.config.recipe import load_recipe, recipe_names; [load_recipe(name) for name in recipe_names()]": (),
    "import qerl.data.examples, qerl.data.grading.grade_file; "
    "from qerl.data.grading.grade import grade; grade('gsm8k', '#### 18', '18')": ("pydantic",),
}


@pytest.mark.parametrize("code", LIGHT)
def test_what_answers_at_once_loads_nothing_heavy(code):
    unwanted = [*HEAVY, *LIGHT[code]]
    code += f"; import sys; print([name for name in {unwanted!r} if name in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert printed.stdout.strip() == "[]"


def test_every_package_is_installed():
    """They are listed by hand, and one that is not listed is missing from the wheel alone."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    made = [path.parent for package in PACKAGES for path in (ROOT / package).rglob("__init__.py")]
    assert sorted(listed) == sorted(".".join(path.relative_to(ROOT).parts) for path in made)


def test_no_test_folder_is_a_package():
    """The folders of tests/ are named like the packages: an __init__.py would make Python import them instead."""
    assert not list((ROOT / "tests").rglob("__init__.py"))
