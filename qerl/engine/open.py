"""Choose the engine that runs on this machine and open it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from qerl.base.devices import has_driver
from qerl.base.errors import ENGINE, ConfigError, EngineError
from qerl.engine.options import EngineOptions
from qerl.engine.update import AdapterUpdate, deliver

if TYPE_CHECKING:
    from qerl.checkpoint.resolve import ModelRef
    from qerl.engine.interface import Engine


def open_engine(base: str, format: str, options: EngineOptions) -> Engine:
    """Open the base weights (folder or hub id) for sampling and scoring; an adapter comes by `sync`.

    Raises EngineError or CheckpointError.
    """
    if choose_engine(options.engine, options.device) == "vllm":
        from qerl.engine.vllm.engine import VLLMEngine as Chosen
    else:
        from qerl.engine.transformers.engine import TransformersEngine as Chosen

    engine = Chosen(base, format, options)
    for opened in _opened:
        opened.append(engine)
    return engine


_opened: list[list[Engine]] = []  # for each `engines_closed_on_error` around, the engines that were opened in it


@contextmanager
def engines_closed_on_error() -> Iterator[None]:
    """Close the engines that were opened within it if it is left by an exception.

    A command ends with its engine. A program goes on, and an engine holds the card's memory.
    """
    opened: list[Engine] = []
    _opened.append(opened)
    try:
        yield
    except BaseException:
        for engine in opened:
            engine.close()
        raise
    finally:
        _opened.pop()


def choose_engine(engine: str, device: str = "auto") -> Literal["transformers", "vllm"]:
    """Which engine "auto" stands for on this machine: vllm where there is a CUDA device and vllm is installed, else
    transformers. Raises EngineError for a vllm that cannot run here."""
    refuse_without_driver(engine)
    import torch

    has_gpu = torch.cuda.is_available() and device in ("auto", "cuda")
    if engine == "auto":
        return "vllm" if has_gpu and find_spec("vllm") else "transformers"
    if engine == "vllm" and not has_gpu:
        raise _no_device()
    if engine not in ("transformers", "vllm"):
        raise EngineError(f"engine {engine!r} is not known: write auto, transformers or vllm")
    return engine


def refuse_without_driver(engine: str) -> None:
    """Raise EngineError for vllm on a machine without NVIDIA's driver, which needs no torch to find out."""
    if engine == "vllm" and not has_driver():
        raise _no_device()


def _no_device() -> EngineError:
    return EngineError("%s is vllm, but there is no CUDA device here: write transformers or auto", ENGINE)


def with_chosen_engine(options: EngineOptions) -> EngineOptions:
    """The options with the engine that "auto" stands for here. Raises ConfigError for a command's option of vllm where
    another engine runs, and EngineError as `choose_engine`."""
    engine = choose_engine(options.engine, options.device)
    given = [name for name in ("memory", "cap_gib", "kernel") if getattr(options, name) != getattr(EngineOptions, name)]
    if engine != "vllm" and given:
        option = "--" + given[0].replace("_", "-")
        raise ConfigError(f"{option} is vllm's, and the engine here is {engine}: leave it out, or write --engine vllm")
    return replace(options, engine=engine)


def open_model(ref: ModelRef, options: EngineOptions) -> Engine:
    """Open what `resolve_model` found, with its start and its adapter acting, whatever rank `options` name."""
    from qerl.checkpoint.adapter import read_fitting_adapter

    options = replace(options, start=ref.start)
    if ref.adapter is None:
        return open_engine(ref.base, ref.format, options)
    tensors, scaling = read_fitting_adapter(ref.adapter, ref.base)
    engine = open_engine(ref.base, ref.format, options.for_adapter(tensors))
    try:
        deliver(AdapterUpdate(tensors, scaling), engine)
    except BaseException:
        engine.close()
        raise
    return engine
