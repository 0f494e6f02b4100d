"""A VLLMEngine on a stand-in for vLLM: whatever its opening asks of vLLM or of a card is answered here."""

from types import SimpleNamespace

from qerl.checkpoint.experts import Decoder, decoder_of
from qerl.engine.options import EngineOptions
from qerl.engine.vllm import engine, opening
from qerl.engine.vllm.engine import Found, VLLMEngine
from qerl.engine.vllm.sync import Gains

CONTEXT, VOCABULARY = 100, 1000


def no_vllm(monkeypatch, folder, open_llm, find, config=None):
    """Let VLLMEngine open what `open_llm()` returns, and find in it what `find(llm)` returns.

    `config` is the model's, of transformers; None: of one decoder layer.
    """
    settings = SimpleNamespace(
        base=str(folder),
        format="bf16",
        stop_token_ids=tuple,
        context=CONTEXT,
        model_len=CONTEXT + 1,
        config=config or SimpleNamespace(vocab_size=VOCABULARY),
        decoder=Decoder(1) if config is None else decoder_of(config.to_dict(), str(folder)),
    )
    for name, stand_in in {
        "check_vllm": lambda: None,
        "check_device": lambda dtype: 0,
        "check_kv_cache_dtype": lambda kind: None,
        "Settings": lambda *_: settings,
        "import_vllm": lambda: None,
        "open_llm": lambda *_: open_llm(),
    }.items():
        monkeypatch.setattr(opening, name, stand_in)
    monkeypatch.setattr(opening, "choose_kernel", lambda *_: "qerl")
    monkeypatch.setattr(opening, "compile_ahead", lambda *_: None)
    monkeypatch.setattr(engine, "find", lambda llm, options: find(llm))


def vllm_parts():
    """The `llm_engine` of a stand-in for vLLM's LLM."""
    worker = SimpleNamespace(startup_seconds=dict, reader=lambda: None)
    cache = SimpleNamespace(num_gpu_blocks=10, block_size=100)
    return SimpleNamespace(
        model_executor=SimpleNamespace(driver_worker=worker), vllm_config=SimpleNamespace(cache_config=cache)
    )


def opened_engine(monkeypatch, folder, llm, model=None, config=None):
    """An engine on `llm`, of which it keeps the only reference if the caller lets go of its own."""
    given = [llm]
    no_vllm(monkeypatch, folder, given.pop, lambda llm: Found(model, Gains({}), {}, "qerl", "qerl"), config)
    return VLLMEngine(str(folder), "bf16", EngineOptions(max_sequences=4))
