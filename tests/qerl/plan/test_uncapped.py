"""A model that caps its logits (Gemma 2) is refused at once, with the reason."""

import json

import pytest

GEMMA2 = {
    **{"model_type": "gemma2", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4},
    **{"num_hidden_layers": 2, "vocab_size": 128, "attn_logit_softcapping": 50.0},
}


@pytest.mark.parametrize("command", ["plan", "quantize"])
def test_gemma_2_is_refused_once_and_names_the_reason(here, command, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA2))
    (tmp_path / "model.safetensors").write_bytes(b"")
    code, _, stderr = here(command, "--model", tmp_path)
    assert code == 2
    assert stderr.count("gemma2 caps its logits (attn_logit_softcapping: 50.0)") == 1
    assert stderr.count("error:") == 1
