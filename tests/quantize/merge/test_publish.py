"""The model card, the printed commands, and the push, tested against a small hub of our own."""

import ast
import json
import re
import shlex
import shutil
import threading
from base64 import b64decode
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from qerl.base.errors import CheckpointError, ConfigError
from qerl.checkpoint.export import check_push
from quantize.export.card import base_on_hub, datasets_of, licence_of, loading_lines, read_results, write_card
from quantize.export.options import ExportOptions, chat_line, serve_adapter_line, serve_model_line
from quantize.export.report import MergeReport
from quantize.export.run import export
from quantize.report import made_by

ROOT = Path(__file__).parents[3]
DATA = ROOT / "tests" / "data" / "tiny_run"
RESULT = {
    "task": "arith",
    "questions": 300,
    "samples": 1,
    "accuracy": {"value": 0.967, "low": 0.94, "high": 0.982},
    "truncated_share": 0.01,
}


@pytest.fixture
def run(tmp_path):
    """The trained run with an evaluation, but without its base, which an adapter folder does not need."""
    folder = tmp_path / "runs" / "tiny_run"
    shutil.copytree(DATA, folder)
    for name, content in {"arith-1": json.dumps(RESULT), "cut": '{"task": "gs'}.items():
        (folder / "eval" / name).mkdir(parents=True)
        (folder / "eval" / name / "result.json").write_text(content)
    return folder


def test_the_card_states_base_recipe_metrics_and_evaluation_with_its_interval(run, tmp_path):
    from huggingface_hub import ModelCard

    report = export(ExportOptions(str(run), "adapter", tmp_path / "out", base_name="Qwen/Qwen2.5-7B-Instruct"))
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.base_model == "Qwen/Qwen2.5-7B-Instruct"
    assert card.data.library_name == "peft"
    assert card.data.datasets is None  # the task makes its own rows
    assert card.data.eval_results[0].metric_value == 0.967
    assert "| arith | 96.7% | 94.0% to 98.2% | 300 | 1 | 1.0% |" in card.text
    assert "Recipe `tiny`, 30 steps." in card.text
    assert "| reward | 0.3177 -> 0.8021 |" in card.text
    assert "rank: 4" in card.text
    assert report.commands["vllm"] in card.text
    assert len(read_results(run)) == 1  # the truncated one does not count


def test_what_is_made_of_a_checkpoint_is_named_after_its_run(run):
    for folder, name in (
        (".", "tiny_run"),
        ("adapter", "tiny_run"),
        ("best", "tiny_run-best"),
        ("checkpoints/step-000004", "tiny_run-step-000004"),
    ):
        (run / folder).mkdir(parents=True, exist_ok=True)
        assert ExportOptions(str(run / folder), "bf16").folder() == Path("exported") / f"{name}-bf16"
    assert ExportOptions("me/of-the-hub", "bf16").named() == "of-the-hub"


@pytest.mark.parametrize(("section", "tag"), [("sft", "sft"), ("distill", "distillation"), ("other", "grpo")])
def test_the_card_s_tag_says_how_it_was_trained(run, tmp_path, section, tag):
    (run / "run.json").unlink()
    with (run / "config.yaml").open("a") as file:
        file.write(f"{section}: {{}}\n")
    export(ExportOptions(str(run), "adapter", tmp_path / "out", base_name="a/b"))
    assert f"- qerl\n- {tag}\n- lora" in (tmp_path / "out" / "README.md").read_text()


def test_the_card_names_the_data_sets_on_the_hub(run, tmp_path):
    recipe = (run / "config.yaml").read_text()
    for task, source, expected in (
        ("gsm8k", "null", ["openai/gsm8k"]),
        ("gsm8k", "me/rows:hard", ["me/rows"]),
        ("own", str(tmp_path), []),
        ("nothing", "null", []),
    ):
        changed = recipe.replace("task: arith\n  source: null", f"task: {task}\n  source: {source}")
        (run / "config.yaml").write_text(changed)
        assert datasets_of(run) == expected


def test_with_a_damaged_log_the_card_lacks_the_training_but_the_merge_succeeds(run, tmp_path, caplog):
    metrics = run / "metrics.jsonl"
    metrics.write_text('{"step": 1, }\n' + metrics.read_text())
    export(ExportOptions(str(run), "adapter", tmp_path / "out"))
    text = (tmp_path / "out" / "README.md").read_text()
    assert "## Training" not in text
    assert "## Evaluation" in text
    assert "line 1 of" in caplog.text
    assert "goes without the training" in caplog.text


def test_the_licence_is_that_of_the_base_or_is_left_out(tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    assert licence_of(str(folder)) is None
    (folder / "LICENSE").write_text("          Apache License\n     Version 2.0")
    assert licence_of(str(folder)) == "apache-2.0"
    (folder / "README.md").write_text("---\nlicense: other\n---\n# x")
    assert licence_of(str(folder)) == "other"
    assert licence_of("owner/name") is None


def test_the_base_on_the_hub_comes_from_the_quantization_report(tmp_path):
    assert base_on_hub("owner/name") == "owner/name"
    assert base_on_hub("tiny") is None
    assert base_on_hub(str(tmp_path)) is None
    (tmp_path / "quantize_report.json").write_text('{"source": "Qwen/Qwen2.5-7B-Instruct"}')
    assert base_on_hub(str(tmp_path)) == "Qwen/Qwen2.5-7B-Instruct"


@pytest.mark.parametrize(("rank", "limit"), [(1, 1), (4, 8), (8, 8), (9, 16), (512, 512)])
def test_the_vllm_command_has_a_rank_that_vllm_accepts(tmp_path, rank, limit):
    words = shlex.split(serve_adapter_line(tmp_path / "my adapter", "base folder", rank, has_norms=False))
    assert words[:3] == ["vllm", "serve", "base folder"]
    assert words[words.index("--max-lora-rank") + 1] == str(limit)
    assert words[words.index("--lora-modules") + 1] == f"my adapter={tmp_path / 'my adapter'}"


@pytest.mark.parametrize("name", ["a=b", "a,b", 'a, "b" = ü'])
def test_a_name_that_vllm_would_split_is_written_as_json(tmp_path, name):
    line = serve_adapter_line(tmp_path / name, "base", 4, has_norms=False)
    assert json.loads(shlex.split(line)[-1]) == {"name": name, "path": str(tmp_path / name)}


def test_no_command_is_printed_that_vllm_would_refuse(tmp_path):
    assert serve_adapter_line(tmp_path, "base", 4, has_norms=True) is None
    assert serve_adapter_line(tmp_path, "base", 513, has_norms=False) is None
    assert shlex.split(serve_model_line(Path("a b/c"))) == ["vllm", "serve", "a b/c", "--served-model-name", "c"]
    assert shlex.split(chat_line(Path("a b"))) == ["qerl", "chat", "--model", "a b"]


def test_a_push_that_cannot_work_is_refused_first(run, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="write owner/name"):
        check_push("name")
    with pytest.raises(CheckpointError, match="the hub does not answer"):
        export(ExportOptions(str(run), "adapter", tmp_path / "out", base_name="a/b", push_to_hub="me/model"))
    assert not (tmp_path / "out").exists()


@pytest.fixture
def hub(here, tmp_path, monkeypatch, server):
    """Run `qerl merge --push-to-hub me/model` against the small hub."""
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.address)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
    monkeypatch.chdir(tmp_path)

    def run(base, *options, token="hf_test"):
        monkeypatch.setenv("HF_TOKEN", token)
        arguments = ["merge", "--adapter", base, "--to", "adapter", "--out", tmp_path / "out", *options]
        code, _, stderr = here(*arguments, "--push-to-hub", "me/model")
        return code, stderr

    return run


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's HTTP interface that an upload of small files needs."""

    def do_GET(self):
        self.answer(200 if self.server.accept else 401, {"name": "me", "type": "user", "orgs": []})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/repos/create"):
            self.server.created = json.loads(body)
            self.answer(200, {"url": f"{self.server.address}/me/model", "id": "me/model"})
        elif "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            files = [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in asked]
            self.answer(200, {"files": files})
        elif "/commit/" in self.path and self.server.commits:
            lines = [json.loads(line) for line in body.splitlines()]
            files = {x["value"]["path"]: b64decode(x["value"]["content"]) for x in lines if x["key"] == "file"}
            self.server.files |= files
            self.answer(
                200, {"commitUrl": f"{self.server.address}/me/model/commit/1", "commitOid": "1", "success": True}
            )
        elif "/validate-yaml" in self.path:
            self.answer(200, {"errors": [], "warnings": []})
        else:
            self.answer(403, {"error": "read-only token"})

    def answer(self, status, value):
        raw = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.address = f"http://127.0.0.1:{server.server_port}"
    server.files, server.created, server.accept, server.commits = {}, None, True, True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def test_a_push_uploads_the_folder_and_its_card(run, hub, tmp_path, server):
    code, stderr = hub(run, "--base-name", "Qwen/Qwen2.5-7B-Instruct")
    assert code == 0, stderr
    assert server.created.get("visibility") == "private" or server.created["private"] is True
    out = tmp_path / "out"
    assert set(server.files) == {path.name for path in out.iterdir()}
    assert all(server.files[path.name] == path.read_bytes() for path in out.iterdir())
    assert "me/model" in stderr
    text = server.files["README.md"].decode()
    assert "from_pretrained('me/model')" in text
    assert "qerl chat --model me/model\n" in text
    assert "=me/model\n" in text
    assert str(out) not in text


@pytest.mark.parametrize("out", ["m", "chat", "serve", "model", "a-bf16", "my run"])
def test_the_card_s_lines_for_a_pushed_model_do_not_depend_on_the_folder_s_name(tmp_path, out):
    out, card = Path(out), tmp_path / "README.md"
    adapter = serve_adapter_line(out, "base folder", 4, has_norms=False)
    for to, line, expected in (
        ("bf16", serve_model_line(out), "vllm serve me/x --served-model-name x"),
        ("adapter", adapter, "vllm serve 'base folder' --enable-lora --max-lora-rank 8 --lora-modules x=me/x"),
    ):
        report = MergeReport(
            out=out, to=to, adapter="a", base="me/base", onto="me/base", rank=4, scaling=1.0, trained_norms=0, bytes=0,
            **made_by(), repo="me/x", commands={"chat": chat_line(out), "vllm": line},
        )  # fmt: skip
        write_card(report, None, card)
        assert f"\n    qerl chat --model me/x\n    {expected}\n" in card.read_text()
        assert ("base_model_relation: finetune" in card.read_text()) == (to != "adapter")
    write_card(replace(report, to="gguf", commands={}), None, card)
    ollama = "ollama create x -f x/Modelfile && ollama run x"
    assert f"    hf download me/x --local-dir x && {ollama}\n    llama-server -hf me/x --jinja\n" in card.read_text()


def test_a_failed_push_leaves_the_folder_and_says_how_to_go_on(run, hub, tmp_path, server):
    server.commits = False
    code, stderr = hub(run, "--base-name", "a/b")
    assert code == 2
    line = stderr.strip().splitlines()[-1]
    assert "is complete, but could not be pushed to me/model" in line
    assert f"hf upload me/model {tmp_path / 'out'}" in line
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


def test_without_a_valid_token_nothing_is_written(run, hub, tmp_path, server):
    server.accept = False
    code, stderr = hub(run, token="hf_bad")
    assert code == 2
    assert "does not take the token" in stderr
    assert not (tmp_path / "out").exists()


def test_a_pushed_adapter_of_a_local_base_says_that_others_cannot_load_it(run, hub, tmp_path, server):
    (base := tmp_path / "base").mkdir()
    (base / "config.json").write_text("{}")
    code, stderr = hub(run, "--base-name", base)
    assert code == 0, stderr
    assert f"names the folder {base} as its base" in stderr
    assert "--base-name ID" in server.files["README.md"].decode()


@pytest.mark.parametrize("name", ["my model", 'a"); open("PWN', "it's\n```\nopen(1)", "\\N{x}"])
def test_the_name_of_a_folder_is_a_literal_in_the_lines_that_load_it(name):
    code = re.search(r"```python\n(.*?)\n```", loading_lines(name, ()), re.DOTALL)[1]
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    assert [ast.literal_eval(call.args[0]) for call in calls] == [name, name]
