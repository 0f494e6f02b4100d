"""Sizes that keep the code readable: lines of a file and of a function, parameters of a function."""

import ast

import pytest

from tests.helpers.syntax import PACKAGES, name_of, nodes, python_files

FILE_LINES, FUNCTION_LINES, PARAMETERS = 600, 60, 6
# Functions that take what a library passes, with the reason.
OVERRIDES = {
    "qerl/api/training.py: evaluate": "its arguments are the options of `qerl eval` that a program gives objects for",
    "qerl/engine/vllm/attention.py: forward": "vLLM calls it as a method of its attention backend",
    "qerl/model/delta_kernels.py: products_backward": "fla-core calls it in place of its own function",
    "qerl/model/packed_attention.py: packed_attention": "transformers calls it as an attention function",
}


def is_kernel(function):
    """Whether Triton compiles it: a kernel's parameters are pointers and sizes, and its body is one program."""
    return any("triton" in ast.unparse(decorator) for decorator in function.decorator_list)


def parameters(function):
    """The names of the parameters, without the one that stands for the object."""
    arguments = function.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def functions(path):
    """(name, function) of each function that is no kernel."""
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_kernel(node):
            yield f"{name_of(path)}: {node.name}", node


@pytest.fixture(scope="module")
def all_functions():
    return [each for path in python_files(*PACKAGES, "scripts", "tests") for each in functions(path)]


def too_many(function):
    """Whether it takes more than it may. torch passes what an autograd function is applied to, one by one."""
    names = parameters(function)
    return len(names) > PARAMETERS and names[0] != "ctx"


def test_a_file_can_be_read_in_one_sitting():
    lines = {name_of(path): len(path.read_bytes().splitlines()) for path in python_files(*PACKAGES, "scripts", "tests")}
    assert {name: count for name, count in lines.items() if count > FILE_LINES} == {}


def test_a_function_fits_a_screen(all_functions):
    found = [(name, node.end_lineno - node.lineno + 1) for name, node in all_functions]
    assert [each for each in found if each[1] > FUNCTION_LINES] == []


def test_a_function_takes_few_values(all_functions):
    """What has more takes one value that carries what belongs together. Each exception is still needed."""
    assert {name for name, node in all_functions if too_many(node)} == set(OVERRIDES)
