"""What an adapter's folder needs so that plain PEFT opens it: the name of a 16-bit base, a tokenizer, and a card.

PEFT loads the base that adapter_config.json names. Over a quantized folder that fails, because transformers keeps the
weights packed and PEFT asks for `.weight`. So the folder names the 16-bit model that the base was quantized from, where
that is known, and trained_on.json remembers the base that was trained on, which qerl goes by.

An adapter can have been trained with a start of its base (`qerl.checkpoint.base_start`), which repairs what rounding
took. Beside a frozen start it fits the 16-bit model as it is. One that was trained from the start holds that repair,
which the 16-bit model does not need: no 16-bit base is named for it.
"""

import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path

from qerl import formats
from qerl.base.errors import CheckpointError
from qerl.base.files import replace_text
from qerl.base.hub import HUB_ID
from qerl.checkpoint.base_start import START, TrainedStart
from qerl.checkpoint.experts import decoder_of
from qerl.checkpoint.folder import (
    EMBEDDED,
    REPORT,
    TRAINED_ON,
    embedded_folder,
    format_of,
    is_text_part,
    quantized_from,
    whole_path,
)
from qerl.checkpoint.hub import config_folder
from qerl.checkpoint.output import copy_tokenizer
from qerl.checkpoint.shards import read_config, read_json
from qerl.formats.base import METHOD

CARD, CONFIG = "README.md", "adapter_config.json"
RESCALING = ("awq",)  # these methods change the weights, so that the adapter does not fit the model they began from


@dataclass(frozen=True)
class TrainedOn:
    """The base that an adapter was trained on, its number format, and the start that acted in the training."""

    base: str
    format: str
    start: TrainedStart | None = None

    @property
    def quantized(self) -> bool:
        return formats.get(self.format).quantized

    @property
    def holds_start(self) -> bool:
        """Whether the adapter repairs the rounding of the base too, so that it does not fit the 16-bit model."""
        return self.start is not None and self.start.kind == "trained"


def trained_on(base: str) -> TrainedOn:
    """The base of a run; one that is not a folder here is a 16-bit model of the hub."""
    folder = embedded_folder(base)
    return TrainedOn(base, (format_of(folder) if folder.is_dir() else formats.BF16).name)


def plain_base(base: TrainedOn) -> str | None:
    """The 16-bit model that plain PEFT can load under the adapter; None if it is not known, or does not fit."""
    name = base.base
    if base.quantized:
        name = None if base.holds_start else _source(base)
    return name and str(EMBEDDED.get(name, name))


def _source(base: TrainedOn) -> str | None:
    """The 16-bit model that a quantized base was made from; None if it is not known or has other weights."""
    return None if _rescaled(base) else quantized_from(Path(base.base))


def on_hub(name: str | None) -> str | None:
    """The name, if it is a hub id."""
    return name if name and HUB_ID.fullmatch(name) and not Path(name).is_dir() else None


def complete_(
    folder: Path, shown: str, base: TrainedOn, trust_remote_code: bool = False, note: str = "", tag: str = "grpo"
) -> None:
    """Make an adapter's folder in a run one that plain PEFT opens.

    `shown` is the path by which its card loads it, beside the run's start/, and `note` what else the card says. Raises
    CheckpointError if the base, whose tokenizer is added, is not here.
    """
    name_bases_(folder, base, plain_base(base) or base.base)
    add_tokenizer_(folder, base.base, trust_remote_code)
    replace_text(folder / CARD, card_text(shown, base, note, tag))


def add_tokenizer_(folder: Path, model: str, trust_remote_code: bool = False) -> None:
    """Put a model's tokenizer beside an adapter: its files as they are, since every reader of the base reads those.

    Files that do not name the tokenizer's class are saved anew by transformers. Raises CheckpointError without any.
    """
    from qerl.checkpoint.load import load_tokenizer, local_folder

    tokenizer = load_tokenizer(model, trust_remote_code)
    if not copy_tokenizer(local_folder(model, trust_remote_code), folder):
        tokenizer.save_pretrained(folder)


def name_bases_(folder: Path, base: TrainedOn, for_peft: str) -> None:
    """Let the folder name one base for PEFT, a local one by its full path, and the one that was trained on for qerl."""
    config = read_json(folder / CONFIG) | {"base_model_name_or_path": whole_path(for_peft)}
    replace_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")
    replace_text(folder / TRAINED_ON, json.dumps(asdict(base), indent=1) + "\n")


def card_text(shown: str, base: TrainedOn, note: str = "", tag: str = "grpo") -> str:
    """The card of an adapter in a run, with a `note` and the hub's `tag` of how it was trained."""
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        base_model=on_hub(plain_base(base)),
        library_name="peft",
        pipeline_tag="text-generation",
        tags=["qerl", tag, "lora"],
    )
    label = formats.get(base.format).folder_label
    trained = f"Trained by qerl on `{base.base}` ({label}). {note}".strip()
    text = f"# LoRA adapter\n\n{trained}\n\n{loading(shown, base, str(Path(shown).parent / START))}\n"
    return f"---\n{data.to_yaml().strip()}\n---\n\n{text}"


def loading(shown: str, base: TrainedOn, start: str) -> str:
    """How to load the folder with PEFT, as Markdown; each code block runs as it stands.

    `start` is the path of the start that a frozen one is loaded from.
    """
    exact = f"## On the base that was trained on\n\n{_on_base(shown, base, start)}"
    if base.quantized and base.holds_start:
        return _without_16_bit(shown, base, exact)
    plain = plain_base(base)
    if plain is None:
        rescaled = "was rescaled when it was quantized, so that the adapter does not fit" if _rescaled(base) else ""
        why = f"Its 16-bit model {rescaled or 'is not known: the folder of the base does not name it'}."
        return f"{why} PEFT needs the decoded weights of the base:\n\n{exact}"
    parts = [f"## With PEFT\n\n```python\n{_plain(shown, plain, is_text_part(base.base))}\n```"]
    if base.quantized:
        beside = ", beside the frozen start that repairs a part of the rounding" if base.start else ""
        parts[0] += (
            f"\n\nThis loads the 16-bit `{plain}`, from which the base was quantized. What was trained is the adapter "
            f"on the rounded weights{beside}, and the two differ slightly:"
        )
        parts.append(exact)
    return "\n\n".join(parts)


def _without_16_bit(shown: str, base: TrainedOn, exact: str) -> str:
    """The same for an adapter that holds the start of its base."""
    source = _source(base)
    whole = f"the 16-bit `{source}`" if source else "a 16-bit model"
    text = (
        f"The adapter holds a repair of what rounding took from the weights (the start of its base, rank "
        f"{base.start.rank}), which {whole} does not need: it fits its base alone. PEFT needs the decoded weights:"
        f"\n\n{exact}"
    )
    if source is None:
        return text
    line = f"qerl merge --adapter {shlex.quote(shown)} --to adapter --onto original"
    return (
        f"{text}\n\n## On the 16-bit model\n\nThis writes what was trained, without that repair, as an adapter for "
        f"`{source}`. Its rank is larger by that of the start:\n\n```bash\n{line}\n```"
    )


def _on_base(shown: str, base: TrainedOn, start: str) -> str:
    """How to load it on the base itself, as Markdown."""
    if not base.quantized or _is_decoded(base.base):
        return f"```python\n{_exact(shown, base, start)}\n```"
    return (
        "transformers does not decode this base rightly: it leaves out the global scales of experts, and knows no "
        "layout but llm-compressor's, so that PEFT on it fails or gives text without sense. qerl loads the adapter on "
        "its base as it is. For other programs this writes what was trained as a 16-bit model:\n\n"
        f"```bash\nqerl merge --adapter {shlex.quote(shown)} --to {formats.BF16.name}\n```"
    )


def _is_decoded(base: str) -> bool:
    """Whether transformers 5.17 decodes a quantized base; one that is nowhere to be found is taken for such."""
    folder = embedded_folder(base)
    try:
        folder = folder if folder.is_dir() else config_folder(base)
        own = read_json(folder / "config.json").get("quantization_config") or {}
        return own.get("quant_method") == METHOD and not decoder_of(read_config(folder), base).has_experts
    except CheckpointError:
        return True


def _rescaled(base: TrainedOn) -> bool:
    return (Path(base.base) / REPORT).is_file() and read_json(Path(base.base) / REPORT).get("method") in RESCALING


def _plain(shown: str, base: str, whole: bool) -> str:
    if whole:
        return f"""\
from peft import PeftModel
from transformers import AutoModelForImageTextToText, AutoTokenizer

base = AutoModelForImageTextToText.from_pretrained({base!r}, dtype="bfloat16")
model = PeftModel.from_pretrained(base, {shown!r})
tokenizer = AutoTokenizer.from_pretrained({shown!r})
{_ASK}"""
    return f"""\
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained({shown!r})
tokenizer = AutoTokenizer.from_pretrained({shown!r})
{_ASK}"""


def _exact(shown: str, base: TrainedOn, start: str) -> str:
    here = ', key_mapping={"model.language_model.": "model."}' if is_text_part(base.base) else ""
    loaded = f"model = PeftModel.from_pretrained(base, {shown!r}{here})"
    if base.start is not None and not base.holds_start:
        loaded += f"""
model.load_adapter({start!r}, adapter_name="start")  # what acts beside the base, whatever is trained
model.base_model.set_adapter(["start", "default"])"""
    return f"""\
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig

base = AutoModelForCausalLM.from_pretrained(
    {whole_path(base.base)!r}, dtype="bfloat16", quantization_config=CompressedTensorsConfig(dequantize=True)
)
{loaded}
tokenizer = AutoTokenizer.from_pretrained({shown!r})
{_ASK}"""


_ASK = """
messages = [{"role": "user", "content": "What is 3 times 4?"}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
completion = model.generate(**prompt, max_new_tokens=32)[0, prompt["input_ids"].shape[1] :]
print(tokenizer.decode(completion, skip_special_tokens=True))"""
