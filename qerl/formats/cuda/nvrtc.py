"""Compile a CUDA source of this package for the card at hand, cache the result, and launch its kernels.

torch's CUDA builds bring NVRTC and the bindings of the driver (`cuda-bindings` is a dependency of torch 2.11), so no
compiler has to be installed. Compiled sources are cached in the user's cache folder, under a hash of everything that
they depend on. NVRTC releases the GIL, so `compile_ahead` can compile several sources at once, as `Jobs`. A
`tensor_map` describes a matrix to Hopper's copy engine, which copies it tile by tile.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import logging
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from qerl.base.devices import BF16_CAPABILITY
from qerl.base.errors import KERNEL, EngineError
from qerl.base.files import write_shared
from qerl.formats.cuda import FOLDER, cache_folder, source_texts

logger = logging.getLogger(__name__)

Name, Result = TypeVar("Name"), TypeVar("Result")


class Jobs(Generic[Name, Result]):
    """Jobs by name. A job runs once, in whichever thread or caller gets to it first; other callers wait for it to end.

    Its result, or its error, is kept until somebody asks for it. Asking for it again runs the job again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[Name, _Job[Result]] = {}

    def begin(self, works: Mapping[Name, Callable[[], Result]]) -> None:
        """Start these in threads, one per core, in this order; those that are already under way are left alone."""
        with self._lock:
            new = {name: _Job(work) for name, work in works.items() if name not in self._jobs}
            self._jobs |= new
        waiting = deque(new.values())
        count = min(os.cpu_count() or 1, len(new))
        threads = [threading.Thread(target=_run_all, args=(waiting,), daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        if threads:
            atexit.register(_end, waiting, threads)

    def result(self, name: Name, work: Callable[[], Result]) -> Result:
        """The result of the job `name`, run here as `work` unless another thread has begun it.

        Raises whatever the job raised.
        """
        with self._lock:
            job = self._jobs.setdefault(name, _Job(work))
        try:
            return job.run().result()
        finally:
            with self._lock:
                if self._jobs.get(name) is job:
                    del self._jobs[name]


class _Job(Generic[Result]):
    def __init__(self, work: Callable[[], Result]) -> None:
        self._work, self._lock = work, threading.Lock()
        self._done: Future[Result] = Future()

    def run(self) -> Future[Result]:
        """Run the job, or wait until the thread that is running it is done."""
        with self._lock:
            if not self._done.done():
                try:
                    self._done.set_result(self._work())
                except BaseException as error:  # handed to whoever asks for the result
                    self._done.set_exception(error)
        return self._done


def _run_all(waiting: deque[_Job]) -> None:
    with suppress(IndexError):  # raised when none is left
        while True:
            waiting.popleft().run()


def _end(waiting: deque[_Job], threads: list[threading.Thread]) -> None:
    """Start nothing more, and wait for what is under way.

    NVRTC aborts the process if its compiler still runs while the libraries are unloaded (seen with 13.0: "LLVM ERROR",
    or a segmentation fault).
    """
    waiting.clear()
    for thread in threads:
        thread.join()


Variant = tuple[str, tuple[str, ...]]  # a source in `FOLDER`, and the macros it is compiled with ("TILES=2")


def capability(device: torch.device | None = None) -> tuple[int, int]:
    """The compute capability that our kernels are chosen and compiled for: that of `device`, or of the current one.

    QERL_CAPABILITY=8.0 has a Hopper run what a card of 8.0 would, as code that the driver translates: for trying what
    cards that are not at hand get.
    """
    return stood_for(os.environ["QERL_CAPABILITY"]) if stands_in() else torch.cuda.get_device_capability(device)


def stands_in() -> bool:
    """Whether the card runs what another one would."""
    return bool(os.environ.get("QERL_CAPABILITY"))


@cache
def stood_for(text: str) -> tuple[int, int]:
    """Raises EngineError for what is no compute capability."""
    if (found := re.fullmatch(r"(\d+)\.(\d)", text)) is None:
        raise EngineError("QERL_CAPABILITY=%s is no compute capability: write one such as 8.0, or unset it", text)
    logger.warning("QERL_CAPABILITY=%s: our kernels are those of such a card, which are slower here", text)
    return int(found[1]), int(found[2])


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether our CUDA kernels run on `device`: it must be a Hopper card, with the CUDA bindings that torch brings."""
    return device.type == "cuda" and capability(device)[0] == 9 and _has_bindings()


@cache
def has_portable_kernels(device: torch.device) -> bool:
    """Whether the kernels for every card from Ampere on run on `device`; they also need torch's CUDA bindings."""
    return device.type == "cuda" and capability(device) >= BF16_CAPABILITY and _has_bindings()


@cache
def early(device: torch.device) -> dict[str, bool]:
    """Let a launch of Triton's start before the one before it has ended, and wait for its results, where cards can."""
    return {"EARLY": True, "launch_pdl": True} if has_kernels(device) else {"EARLY": False}


def _has_bindings() -> bool:
    return find_spec("cuda") is not None and find_spec("cuda.bindings") is not None


@dataclass(frozen=True)
class Launch:
    """How a kernel is started."""

    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)  # blocks of a cluster
    early: bool = False  # may start while the launch before it is finishing; the kernel waits for its results itself
    together: int = 1  # blocks that have to be on a multiprocessor at the same time, as they wait for one another


class Kernel:
    """One entry function of a compiled source, for the current device."""

    def __init__(self, function: Any, name: str) -> None:
        self.name = name
        self._function = function
        self._shared_limit = 48 * 1024
        self._together = 1

    def __call__(self, launch: Launch, *arguments: torch.Tensor | int | float | ctypes.Structure | None) -> None:
        """Start the kernel on torch's current stream.

        A tensor is passed as a pointer, None as a null pointer, int as int32, float as float32, a structure by value.
        """
        from cuda.bindings import driver

        _bind_context_()
        self._allow(launch.shared_bytes)
        if launch.together > self._together:
            self._check_together(launch)
        values, kinds = zip(*(_argument(value) for value in arguments), strict=True)
        _check(driver.cuLaunchKernelEx(self._config(launch), self._function, (values, kinds), 0), self.name)

    def _allow(self, shared_bytes: int) -> None:
        from cuda.bindings import driver

        if shared_bytes > self._shared_limit:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(driver.cuFuncSetAttribute(self._function, attribute, shared_bytes), self.name)
            self._shared_limit = shared_bytes

    def _config(self, launch: Launch) -> Any:
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.threads, 1, 1
        config.sharedMemBytes = launch.shared_bytes
        config.hStream = torch.cuda.current_stream().cuda_stream
        config.attrs = _attributes(launch)
        config.numAttrs = len(config.attrs)
        return config

    def clusters_at_once(self, launch: Launch) -> int:
        """How many clusters of such a launch the card holds at once."""
        from cuda.bindings import driver

        _bind_context_()
        self._allow(launch.shared_bytes)
        return _check(driver.cuOccupancyMaxActiveClusters(self._function, self._config(launch)), self.name)

    def _check_together(self, launch: Launch) -> None:
        """Give the kernel all shared memory of a multiprocessor. Raises EngineError if its blocks do not fit there."""
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        _check(driver.cuFuncSetAttribute(self._function, attribute, 100), self.name)
        sizes = launch.threads, launch.shared_bytes
        blocks = _check(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._function, *sizes), self.name)
        if blocks < launch.together:
            raise EngineError(
                "%s needs room for %d blocks on a multiprocessor, and this card has it for %d: write %s, and report it",
                *(self.name, launch.together, blocks, KERNEL.set_to("marlin")),
            )
        self._together = launch.together


@cache
def kernel(source: str, name: str, defines: tuple[str, ...] = (), architecture: str = "") -> Kernel:
    """The kernel `name` of `sources/<source>`, compiled with the macros `defines` ("TILES=2").

    It is compiled for `architecture`, or for the current card if that is empty. "compute_80" is code that the driver
    translates for the card. Raises EngineError if it cannot be compiled or loaded.
    """
    from cuda.bindings import driver

    binary = BINARIES.get(source, defines, architecture)
    _bind_context_()
    library = _check(driver.cuLibraryLoadData(binary, [], [], 0, [], [], 0), source)
    function = _check(driver.cuKernelGetFunction(_check(driver.cuLibraryGetKernel(library, name.encode()), name)), name)
    return Kernel(function, name)


@cache
def version() -> tuple[int, int]:
    """The version of NVRTC. The first call loads its library, so that this happens before any thread compiles."""
    from cuda.bindings import nvrtc

    result = nvrtc.nvrtcVersion()
    _check(result, "nvrtc")
    return result[1:]


def compile_source(text: str, source: str, options: list[str]) -> bytes:
    """The binary of `text`, the content of the file `source`; PTX if the options ask for a virtual architecture.

    Raises EngineError with the compiler's log.
    """
    from cuda.bindings import nvrtc

    program = _check(nvrtc.nvrtcCreateProgram(text.encode(), source.encode(), 0, [], []), source)
    options = [option.encode() for option in ("--std=c++17", "-default-device", f"--include-path={FOLDER}", *options)]
    if nvrtc.nvrtcCompileProgram(program, len(options), options)[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program), source)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise EngineError(f"NVRTC cannot compile {source} for {options}: {log.decode(errors='replace').strip()}")
    virtual = any(option.startswith(b"--gpu-architecture=compute") for option in options)
    size, get = (
        (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX) if virtual else (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    )
    binary = b" " * _check(size(program), source)
    _check(get(program, binary), source)
    nvrtc.nvrtcDestroyProgram(program)
    return binary


class Binaries:
    """The compiled sources of `FOLDER` for the current card, each kept in a file of `cache_folder()`.

    `compile_` makes the binary of (text, name of the source, options), and the files' names depend on `version_`.
    """

    def __init__(
        self,
        compile_: Callable[[str, str, list[str]], bytes] = compile_source,
        version_: Callable[[], tuple[int, int]] = version,
    ) -> None:
        self._compile, self._compiler_version = compile_, version_
        self._jobs: Jobs[Path, bytes] = Jobs()  # by cache file

    def begin(self, variants: Iterable[Variant]) -> None:
        """Start compiling, in threads, what has no file yet. `get` takes the results, and raises the errors."""
        works = dict(self._work(source, defines) for source, defines in variants)
        self._jobs.begin({path: work for path, work in works.items() if not path.exists()})

    def get(self, source: str, defines: tuple[str, ...], architecture: str = "") -> bytes:
        """The binary, from its file or compiled now, for the current card unless told otherwise. Raises EngineError."""
        return self._jobs.result(*self._work(source, defines, architecture))

    def _work(self, source: str, defines: tuple[str, ...], architecture: str = "") -> tuple[Path, Callable[[], bytes]]:
        """The cache file of a variant, and a function that reads it, or compiles the source and writes it."""
        text, headers = source_texts(source)
        architecture = architecture or _architecture(capability())
        key = hashlib.sha256(
            repr((text, headers, defines, architecture, self._compiler_version())).encode()
        ).hexdigest()[:24]
        options = [f"--gpu-architecture={architecture}", *(f"-D{define}" for define in defines)]
        path = cache_folder() / f"{Path(source).stem}-{key}.cubin"
        return path, partial(self._read_or_compile, path, text, source, options)

    def _read_or_compile(self, path: Path, text: str, source: str, options: list[str]) -> bytes:
        if path.exists():
            return path.read_bytes()
        binary = self._compile(text, source, options)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_shared(path, binary)  # another process may write the same
        return binary


def _architecture(of: tuple[int, int]) -> str:
    return f"{'compute' if stands_in() else 'sm'}_{of[0]}{of[1]}{'a' if of >= (9, 0) else ''}"


BINARIES = Binaries()


def compile_ahead(variants: Iterable[Variant]) -> None:
    """Start compiling, in threads, what the cache lacks. `kernel` takes the results, and raises the errors."""
    BINARIES.begin(variants)


_thread = threading.local()


def _bind_context_() -> None:
    """Make torch's CUDA context current in this thread, which the driver's calls require.

    torch binds its context lazily: a thread of autograd has none until it launches its first kernel through torch.
    """
    from cuda.bindings import driver

    if getattr(_thread, "bound", False):
        return
    if int(_check(driver.cuCtxGetCurrent(), "context")) == 0:
        device = _check(driver.cuDeviceGet(torch.cuda.current_device()), "device")
        _check(driver.cuCtxSetCurrent(_check(driver.cuDevicePrimaryCtxRetain(device), "context")), "context")
    _thread.bound = True


def _attributes(launch: Launch) -> list[Any]:
    from cuda.bindings import driver

    kinds, attributes = driver.CUlaunchAttributeID, []
    if launch.cluster != (1, 1, 1):
        attribute = driver.CUlaunchAttribute()
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attribute.value.clusterDim
        size.x, size.y, size.z = launch.cluster
        attributes.append(attribute)
    if launch.early:
        attribute = driver.CUlaunchAttribute()
        attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    return attributes


def _argument(value: torch.Tensor | int | float | ctypes.Structure | None) -> tuple[Any, Any]:
    if value is None:
        return 0, ctypes.c_void_p
    if isinstance(value, ctypes.Structure):
        return value, None
    if isinstance(value, torch.Tensor):
        return value.data_ptr(), ctypes.c_void_p
    return (value, ctypes.c_float) if isinstance(value, float) else (value, ctypes.c_int)


def _check(result: tuple[Any, ...], what: str) -> Any:
    """Return the value of a call of the CUDA bindings. Raises EngineError with the driver's name for a failure."""
    if int(result[0]) != 0:
        raise EngineError(f"CUDA refused {what}: {result[0]!r}")
    return result[1] if len(result) > 1 else None


BFLOAT16, SIZE = 9, 2  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, and bytes per value
ALIGNMENT = 64


class TensorMap(ctypes.Structure):
    """The 128 bytes of a map, passed to a kernel by value."""

    _fields_ = [("opaque", ctypes.c_uint64 * 16)]


@lru_cache(maxsize=8192)
def tensor_map(address: int, shape: tuple[int, int], tile: tuple[int, int], swizzled: bool = False) -> TensorMap:
    """The map of a contiguous bfloat16 matrix of `shape` (rows, columns) at `address`, copied in tiles (rows, columns).

    Rows must be aligned to 16 bytes. A tile that reaches beyond the matrix is filled with zeros. `swizzled` permutes
    the 16-byte chunks within each 128 bytes by row % 8. Raises EngineError if the driver refuses the map.
    """
    buffer = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + ALIGNMENT)
    aligned = -(-ctypes.addressof(buffer) // ALIGNMENT) * ALIGNMENT
    sizes, steps = (ctypes.c_uint64 * 2)(shape[1], shape[0]), (ctypes.c_uint64 * 1)(shape[1] * SIZE)
    box, ones = (ctypes.c_uint32 * 2)(tile[1], tile[0]), (ctypes.c_uint32 * 2)(1, 1)
    no_interleave, promotion, zeros = 0, 2, 0  # promotion 2: 128 bytes are fetched into L2 at a time
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        BFLOAT16,
        2,
        ctypes.c_void_p(address),
        sizes,
        steps,
        box,
        ones,
        no_interleave,
        3 if swizzled else 0,
        promotion,
        zeros,
    )
    if code:
        raise EngineError(f"CUDA refused a tensor map of {shape} by {tile} at {address:#x}: error {code}")
    return TensorMap.from_buffer_copy(ctypes.string_at(aligned, ctypes.sizeof(TensorMap)))


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
