#!/usr/bin/env python3
r"""Compile the Triton kernels of FP8 for a Hopper on a machine without one; prints a line for each.

    pip install --target T --no-deps triton==3.6.0          # that of requirements/gpu.txt, where there is none
    PYTHONPATH=.:T python scripts/checks/compile_fp8.py

Whether they compile, what they take of registers and shared memory, and whether registers spill is known before a card
is asked. What they compute is for Triton's interpreter:

    PYTHONPATH=.:T TRITON_INTERPRET=1 python -m pytest -m gpu \
        tests/qerl/formats/fp8/test_kernels.py tests/qerl/formats/nvfp4/test_to_fp8.py

Sizes and strides are taken to be multiples of 16, as those of usual models are.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

HOPPER = ("cuda", 90, 32)
TYPES = {"codes_ptr": "*u8", "turned_ptr": "*u8", "scale_ptr": "*fp32", "faults_ptr": "*i32", "largest_ptr": "*i32"}
TYPES |= {"words_ptr": "*i32", "scales_ptr": "*u8"}
FLOATS = ("least", "reciprocal", "alpha")
SMALL = ("rows", "scale_stride")  # which may be any number


def main() -> None:
    failed = 0
    for kernel, dtypes, constants, options in cases():
        line = f"{kernel.__name__.strip('_')} {' '.join(dtypes.values())} {constants}"
        try:
            print(f"{line}: {compiled(kernel, dtypes, constants, options)}")
        except Exception as problem:  # of the compiler
            failed += 1
            print(f"{line}: FAILED, {(str(problem).strip().splitlines() or [''])[0]}")
    sys.exit(1 if failed else 0)


def cases() -> list[tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """(kernel, pointers that are not as in TYPES, its constants, the options of a launch)."""
    from qerl.formats.fp8 import kernels
    from qerl.formats.nvfp4 import kernels as nvfp4_kernels

    own = jitted(kernels)
    block, wide, found = {"BLOCK": kernels.BLOCK}, {"num_warps": 8}, []
    for dtype in ("*fp32", "*bf16"):
        found.append((own["decode"], {"out_ptr": dtype}, {"ROWS": kernels.ROWS, **block}, {}))
        for pow2 in (True, False):
            found.append((own["pack"], {"matrix_ptr": dtype}, {"POW2": pow2, **block}, wide))
        found.append((own["largest"], {"x_ptr": dtype}, {"TILES": kernels.TILES, **block}, wide))
        for five in (True, False):
            for plain, turned in ((True, True), (True, False), (False, True)):
                side, warps = (kernels.HALF, 4) if plain and turned else (kernels.BLOCK, 8)
                kinds = {"LARGEST": 448.0, "FIVE": five, "PLAIN": plain, "TURNED": turned, "BLOCK": side}
                found.append((own["round"], {"x_ptr": dtype}, kinds, {"num_warps": warps}))
    found.append((own["turn"], {"out_ptr": "*u8"}, block, wide))
    for pow2 in (True, False):
        for rows, warps in ((4, 1), (32, 4)):
            kinds = {"POW2": pow2, "BY_CARD": True, "LARGEST": kernels.CODE_MAX, "ROWS": rows, **block}
            found.append((own["input"], {"x_ptr": "*bf16"}, kinds, {"num_warps": warps}))
    own = jitted(nvfp4_kernels)
    found.append((own["largest_scale"], {}, {"PIECE": nvfp4_kernels.PIECE}, wide))
    kinds = {"CODE_MAX": nvfp4_kernels.CODE_MAX, "LARGEST": kernels.CODE_MAX, "BY_CARD": True}
    found.append((own["turn"], {"out_ptr": "*u8"}, kinds, wide))
    return found


def jitted(module: ModuleType) -> dict[str, Any]:
    """A module's kernels by the first word of their names."""
    from triton.runtime.jit import JITFunction

    found = {name: value for name, value in vars(module).items() if isinstance(value, JITFunction)}
    return {name.strip("_").removesuffix("_kernel"): value for name, value in found.items() if "kernel" in name}


def compiled(kernel: Any, dtypes: dict[str, str], constants: dict[str, Any], options: dict[str, int]) -> str:
    """What the kernel takes of a processor."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    kinds = {name: dtypes.get(name) or TYPES.get(name) or ("fp32" if name in FLOATS else "i32") for name in names}
    given = {name: "constexpr" if name in constants else kind for name, kind in kinds.items()}
    whole = [name for name in names if name not in constants and name not in FLOATS and name not in SMALL]
    source = ASTSource(
        kernel,
        given,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in whole},
    )
    made = triton.compile(source, target=GPUTarget(*HOPPER), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", said).groups()
    return f"{registers} registers, {stack} bytes spilt, {made.metadata.shared} bytes of shared memory"


if __name__ == "__main__":
    main()
