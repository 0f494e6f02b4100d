"""close() collects the references that vLLM's shutdown leaves, in the right order.

Here it is tested in plain Python; the rest needs a card (tests/qerl/engine/vllm/test_vllm_engine_gpu.py -k
closed_engine).
"""

import gc
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from qerl.base.errors import EngineError
from qerl.engine.options import EngineOptions
from qerl.engine.vllm import closing
from qerl.engine.vllm.engine import VLLMEngine
from tests.helpers.vllm_stand_in import no_vllm, opened_engine, vllm_parts


class Thing:
    """A large object that can be watched. It is part of a reference cycle, as every module is."""

    def __init__(self, **held):
        self.__dict__.update(held, me=self)


@pytest.fixture
def by_hand():
    """Only the test itself collects garbage."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def finalized_engine():
    """Like vLLM's LLMEngine, whose finalizer refers to the model until the engine is collected."""
    model = Thing()
    engine = Thing(model=model)
    vars(engine)[closing.FINALIZER] = weakref.finalize(engine, lambda model: None, model)
    return engine, weakref.ref(model)


def test_a_single_collection_leaves_the_model_to_the_finalizer_and_repeated_ones_do_not(by_hand):
    engine, model = finalized_engine()
    del engine
    gc.collect()
    assert model() is not None  # therefore close() collects more than once
    closing.collect_()
    assert model() is None
    assert closing.collect_() < closing.MOST_COLLECTIONS


def test_the_finalizer_runs_at_once_even_if_the_engine_is_still_referred_to(by_hand):
    engine, model = finalized_engine()
    engine.model = None
    closing.run_finalizer_(engine)
    closing.run_finalizer_(SimpleNamespace())  # an engine without one
    closing.collect_()
    assert model() is None


def test_layers_lose_their_cache_and_the_scales_in_it():
    attention = SimpleNamespace(**dict.fromkeys(closing.SCALE_CACHES, torch.ones(2)), scale=1.0)
    layers = {
        "attention": SimpleNamespace(kv_cache=torch.ones(4), impl=attention),
        "mamba": SimpleNamespace(kv_cache=[torch.ones(4)]),
        "none": SimpleNamespace(weight=1),
    }
    closing.drop_kv_cache_(layers)
    assert layers["attention"].kv_cache.numel() == 0
    assert vars(attention) == {**dict.fromkeys(closing.SCALE_CACHES), "scale": 1.0}
    assert layers["mamba"].kv_cache == []
    assert vars(layers["none"]) == {"weight": 1}


def fail_holding(refs, cause=None):
    held = Thing()
    refs.append(weakref.ref(held))
    if cause is None:
        raise ValueError("no memory")
    try:
        cause(refs)
    except ValueError as error:
        raise EngineError("vLLM cannot open it") from error


def test_a_kept_error_does_not_keep_the_variables_of_frames():
    refs, kept = [], None
    try:
        fail_holding(refs, fail_holding)
    except EngineError as error:
        kept = error
    gc.collect()
    assert all(ref() is not None for ref in refs)
    assert len(refs) == 2
    closing.clear_frames_(kept)
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_nothing_is_imported_to_abandon_an_engine_that_never_began(monkeypatch):
    monkeypatch.delitem(sys.modules, "qerl.engine.vllm.worker", raising=False)
    before = set(sys.modules)
    closing.abandon_()
    assert set(sys.modules) == before


@pytest.mark.parametrize("asleep", [False, True])
def test_close_refers_to_nothing_when_memory_is_freed_and_may_be_called_twice(monkeypatch, tmp_path, asleep):
    llm, seen = Thing(name="llm", sleep=lambda level: None, llm_engine=vllm_parts()), []
    there = weakref.ref(llm)
    monkeypatch.setattr(closing, "shut_down_", lambda llm: seen.append(llm.name))
    monkeypatch.setattr(closing, "give_back_", lambda: (gc.collect(), seen.append(there())))
    engine = opened_engine(monkeypatch, tmp_path, llm, Thing())
    del llm
    if asleep:
        engine.sleep()
    engine.close()
    engine.close()
    assert seen == ["llm", None]
    with pytest.raises(EngineError, match="closed"):
        engine.score([[1]], [[1]])


def test_an_engine_that_goes_to_sleep_empties_torchs_cache_after_the_kv_cache_is_freed(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append("emptied"))
    llm = Thing(sleep=lambda level: seen.append("asleep"), llm_engine=vllm_parts())
    engine = opened_engine(monkeypatch, tmp_path, llm)
    engine.sleep()
    engine.sleep()
    assert seen == ["asleep", "emptied"]


def test_a_failed_shutdown_is_a_warning_and_memory_is_still_freed(monkeypatch, tmp_path, caplog):
    given = []

    def fail(llm):
        raise RuntimeError("process group")

    monkeypatch.setattr(closing, "shut_down_", fail)
    monkeypatch.setattr(closing, "give_back_", lambda: given.append(True))
    engine = opened_engine(monkeypatch, tmp_path, Thing(llm_engine=vllm_parts()))
    for _ in range(2):
        engine.close()
    assert "could not be shut down" in caplog.text
    assert "process group" in caplog.text
    assert given == [True]
    VLLMEngine.__new__(VLLMEngine).close()  # as one that never opened


@pytest.mark.parametrize("where", ["in vLLM", "after it"])
def test_an_opening_that_fails_half_way_leaves_nothing(monkeypatch, tmp_path, where):
    """Although the error is still held, everything that vLLM built is gone when memory is freed."""
    refs, closed, abandoned = [], [], []

    def open_llm():
        llm = Thing(name="llm", llm_engine=vllm_parts(), model=Thing())
        refs.append(weakref.ref(llm))
        if where == "in vLLM":
            raise EngineError("vLLM cannot open it")
        return llm

    def refuse(llm):
        raise EngineError("not qerl's linears")

    no_vllm(monkeypatch, tmp_path, open_llm, refuse)
    monkeypatch.setattr(closing, "shut_down_", lambda llm: closed.append(llm.name))
    monkeypatch.setattr(closing, "give_back_", lambda: None)
    monkeypatch.setattr(closing, "abandon_", lambda: (gc.collect(), abandoned.append(refs[0]())))
    kept = None
    try:
        VLLMEngine(str(tmp_path), "nvfp4", EngineOptions())
    except EngineError as error:
        kept = error
    assert str(kept) == ("vLLM cannot open it" if where == "in vLLM" else "not qerl's linears")
    assert closed == ([] if where == "in vLLM" else ["llm"])
    assert abandoned == [None]
