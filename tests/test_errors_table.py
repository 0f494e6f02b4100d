"""Mistakes that users make: each gives one line that names mistake and remedy, exit code 2, and no file."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import qerl.cli.main
from qerl.config.recipe import load_recipe, save_config
from tests.helpers.bases import write_base
from tests.helpers.checkpoint_factory import fake_checkpoint, layout_tensors

DATA = Path(__file__).parent / "data" / "tiny_run"
TRAIN = "train --recipe tiny --model tiny --set model.format=bf16"
SUMS = "--data data/sums.jsonl"  # few rows, for mistakes that show only after the data were read
PLAIN = "eval arith --model tiny --engine transformers --limit 2"

# name: (arguments of `qerl`, two regular expressions: how the line has to state the mistake, and the remedy)
CASES = {
    # the command line itself
    "unknown command": ("trian --recipe tiny", "'trian'", "'train'"),
    "unknown subcommand": ("recipes shwo", "'shwo'", "'show'"),
    "unknown option": ("train --recipe tiny --stpes 3", "--stpes", "--steps"),
    "option without value": ("quantize --model", "'--model' requires an argument", "--help"),
    "missing option": ("quantize", "missing option '--model'", "quantize --help"),
    "missing argument": ("compare evals/a", "missing argument 'second'", "compare --help"),
    "argument too many": ("doctor now", "now", "doctor --help"),
    "no integer": ("train --recipe tiny --steps many", "'--steps'.*integer.*'many'", "train --help"),
    "no such method": ("quantize --model base --method int4", "'int4'", "'rtn', 'awq', 'gptq'"),
    "no such load": ("eval arith --load fp8 --model base", "'fp8'", "'nvfp4'"),
    "top-p too large": ("chat --model tiny --top-p 3", "'--top-p'.*'3'", "less than or equal to 1"),
    # models
    "no such folder": ("quantize --model ./missing", "./missing", "existing folder"),
    "no such run": ("eval arith --model runs/dune", "no folder runs/dune", "did you mean runs/done"),
    "an adapter of itself": (
        "eval arith --model loop", "loop/adapter_config.json names .*loop, which is the adapter", "write there",
    ),
    "no such home": ("eval arith --model ~nobody-here/base", "there is no folder ~nobody-here/base", "existing folder"),
    "a name too long": (f"eval arith --model {'x' * 300}", "neither a folder here nor a hub id", "existing folder"),
    "no such run of sizes": ("plan --recipe tiny --model runs/dune", "no folder runs/dune", "give a folder"),
    "no model in the folder": ("quantize --model empty", "empty has no config.json", "give"),
    "a file for a folder": ("quantize --model rows.jsonl", "rows.jsonl is a file", "give the folder"),
    "quantized twice": ("quantize --model nvfp4", "nvfp4 .*quantized", "16-bit"),
    "an adapter to quantize": (
        "quantize --model runs/done/adapter", "is an adapter", "qerl merge --adapter runs/done/adapter --to nvfp4",
    ),
    "a run to quantize": ("quantize --model runs/done", "is a run", "qerl merge --adapter runs/done --to nvfp4"),
    "gptq quantized model": ("quantize --model gptq", "gptq", "made from"),
    "mixture of experts": ("quantize --model experts", "mixture of experts", "give a model of one of these"),
    "config is no JSON": ("quantize --model torn-config", "config.json", "JSON"),
    "shard is missing": ("quantize --model no-shard", "model-00002-of-00002", "copy or download"),
    "shard is cut short": ("quantize --model short-shard", "truncated", "copy or download"),
    "tokenizer is torn": ("quantize --model torn-tokenizer", "tokenizer.json is not valid JSON", "copy or download"),
    "no tokenizer": ("quantize --model no-tokenizer", "has no tokenizer", "copy the tokenizer files"),
    "out is the model": ("quantize --model base --out base", "own folder", "elsewhere"),
    "out is taken": ("quantize --model base --out nvfp4", "nvfp4 exists", "--overwrite"),
    "out is another's folder": ("quantize --model base --out data --overwrite", "data holds something else", "another"),
    "out is a file": ("quantize --model base --out rows.jsonl", "is a file", "give a folder"),
    "ignore matches nothing": (
        "quantize --model base --ignore re:.*attention.*", "re:.*attention.*' matches no layer", "self_attn",
    ),
    "ignore is no pattern": ("quantize --model base --ignore re:([", "re:\\(\\[.*regular expression", "correct it"),
    "awq without rows": ("quantize --model base --method awq --calibration none", "awq needs .*rows", "--calibration"),
    "rows that are too few": (
        "quantize --model base --calibration rows.jsonl --sequence-length 9999", "9999", "--sequence-length",
    ),
    "data in no home": (f"{TRAIN} --data ~nobody-here/a.csv", "no file or folder '~nobody-here/a.csv'", "write a path"),
    "data of too long a name": (f"{TRAIN} --data {'x' * 300}", "neither a file nor a hub id", "write a path"),
    "no calibration rows": (
        "quantize --model base --method awq --sequence-length 64 --calibration no.jsonl",
        "no file or folder 'no.jsonl'", "write a path",
    ),
    "calibration of zero rows": (
        "quantize --model base --method awq --calibration rows.jsonl --calibration-size 0", "calibration", "at least 1",
    ),
    "size of no calibration": (
        "quantize --model base --calibration none --calibration-size 8", "-size 8 needs", "leave it out",
    ),
    "no such device": (
        "quantize --model base --device tpu", "tpu cannot be used here .torch knows no such", "auto or cpu",
    ),
    "no GPU": ("quantize --model base --device cuda", "cuda cannot be used", "auto or cpu"),
    # recipes and --set
    "no such recipe": ("train --recipe dapo_8b", "'dapo_8b'", "dapo_7b"),
    "no recipe at all": ("train", "--recipe", "qerl recipes"),
    "recipe file is missing": ("train --recipe mine.yaml", "mine.yaml: no such file", "dapo_7b"),
    "recipe with a tab": ("train --recipe tab.yaml", "tab.yaml:3: not YAML: found character", "write spaces"),
    "recipe is a list": ("train --recipe list.yaml", "list.yaml: holds the list", "sections such as"),
    "key twice": ("train --recipe twice.yaml", "twice.yaml:4: run.steps stands twice", "keep one"),
    "unknown key in a file": (
        "train --recipe unknown.yaml", "unknown.yaml:3: optim.learning_rte", "optim.learning_rate",
    ),
    "wrong type in a file": ("train --recipe type.yaml", "type.yaml:3: run.steps: got 'many'", "whole number >= 1"),
    "extends nothing": ("train --recipe orphan.yaml", "orphan.yaml:1: .*no recipe is named 'nowhere'", "shipped are"),
    "extends itself": ("train --recipe loop.yaml", "loop.yaml:1: extends", "write it out"),
    "unknown key in --set": ("train --recipe tiny --set loss.clip_hihg=0.3", "clip_hihg", "clip_high"),
    "--set without value": ("train --recipe tiny --set run.steps", "run.steps: is not KEY=VALUE", "section.key=value"),
    "--set of another type": ("train --recipe tiny --set run.steps=ten", "run.steps: got 'ten'", "whole number >= 1"),
    "steps below one": ("train --recipe tiny --steps 0", "run.steps: got 0", "whole number >= 1"),
    "temperature below zero": ("train --recipe tiny --set rollout.temperature=-1", "temperature: got -1", ">= 0.01"),
    "learning rate is not finite": (
        "train --recipe tiny --set optim.learning_rate=nan",
        "learning_rate: got 'nan'", "number > 0 and < 1; the default",
    ),
    "group of one": ("train --recipe tiny --set rollout.group_size=1", "group_size: got 1", "whole number >= 2"),
    "no such loss": ("train --recipe tiny --set loss.type=ppo", "ppo", "dapo"),
    "noise grows": (
        "train --recipe tiny --set noise.sigma_end=0.1", "sigma_end 0.1 with noise.sigma_start", "at most 0.01",
    ),
    "more stages than steps": ("train --recipe tiny --steps 3", "num_stages 5", "run.steps: 5 or more"),
    "no such format": ("train --recipe tiny --set model.format=int8", "model.format: got 'int8'", "fp8_block, bf16"),
    "no such reward": (f"{TRAIN} --set rewards=[{{name: acuracy}}]", "acuracy", "accuracy"),
    "no such argument of a reward": (
        f"{TRAIN} --set rewards=[{{name: format,args: {{styl: tags}}}}]",
        "reward format takes no argument 'styl'", "did you mean 'style'",
    ),
    "no such value of a reward": (
        f"{TRAIN} --set rewards=[{{name: format,args: {{style: tag}}}}]",
        "has no style 'tag'", "write one of boxed, tags, think",
    ),
    "no such file of a reward": (f"{TRAIN} --set rewards=[{{name: 'no.py:f'}}]", "'no.py' does not exist", "no.py"),
    "rank of zero": ("train --recipe tiny --set adapter.rank=0", "rank: got 0", "whole number >= 1"),
    "no such target": ("train --recipe tiny --set adapter.targets=[q_prj]", "q_prj", "q_proj"),
    "memory is negative": ("train --recipe tiny --set rollout.memory=-2", "memory: got -2", "number > 0 or null"),
    # training
    "not quantized yet": ("train --recipe tiny", "checkpoints/tiny-NVFP4A16", "qerl quantize"),
    "a run that exists": (f"{TRAIN} --out runs/done", "runs/done already exists", "--resume"),
    "a file as run": (f"{TRAIN} --out rows.jsonl", "rows.jsonl already exists", "another --out"),
    "a run in a file": (f"{TRAIN} --out rows.jsonl/run", "rows.jsonl is a file", "another --out"),
    "a run of too long a name": (f"{TRAIN} --out {'x' * 300}", "File name too long", "give another"),
    "a run of an odd name": (f"{TRAIN} --out a\x01b", "cannot be printed", "write another"),
    "more tokens than positions": (
        f"{TRAIN} {SUMS} --set rollout.max_new_tokens=100000", "positions", "max_new_tokens: ",
    ),
    "more rank than width": (f"{TRAIN} {SUMS} --set adapter.rank=5000", "adapter.rank 5000 is more", "128 or less"),
    "weights are torn": (
        f"train --recipe tiny --set model.format=bf16 --model short {SUMS}", "short/.*truncated", "copy or download",
    ),
    "config of wrong types": ("train --recipe tiny --set model.format=bf16 --model odd-config", "hidden_size", "copy"),
    "vllm without a GPU": (
        f"{TRAIN} {SUMS} --set rollout.engine=vllm", "vllm, but there is no CUDA device", "transformers or auto",
    ),
    "data are missing": (f"{TRAIN} --data no.jsonl", "no file or folder 'no.jsonl'", "write a path"),
    "data are empty": (f"{TRAIN} --data data/empty.jsonl", "empty.jsonl holds no rows", "the right file"),
    "data are torn": (
        f"{TRAIN} --data data/torn.jsonl", "1 usable examples are fewer than the 8 prompts", "give more rows",
    ),
    "column is missing": (
        f"{TRAIN} --data data/columns.jsonl", "no column 'question'.*problem, solution", "--columns question=",
    ),
    "columns of nothing": (
        f"{TRAIN} --data rows.jsonl --columns question=prompt",
        "no column 'prompt'.*question, answer", "--columns question=",
    ),
    "columns without =": (
        f"{TRAIN} --data rows.jsonl --columns question", "'question' is not of the form", "question=problem",
    ),
    "answers are missing": (f"{TRAIN} --data data/answers.jsonl", "no column 'answer'", "map them"),
    "fewer rows than prompts": (
        f"{TRAIN} --data data/one.jsonl", "1 usable examples", "lower rollout.prompts_per_step",
    ),
    "no such task": (f"{TRAIN} --task gms8k", "gms8k", "gsm8k"),
    "resume nothing": ("train --resume runs/none", "there is no folder runs/none", "the directory that"),
    "resume a step that is not there": ("train --resume 7", "step 7", "step"),
    "resume with another recipe": ("train --resume runs/done --recipe tiny", "--resume", "--recipe"),
    # evaluation
    "no such benchmark": ("eval gsm9k --model tiny", "gsm9k", "gsm8k"),
    "no run yet": ("eval arith", "no --model was given", "qerl quantize"),
    "greedy samples": (f"{PLAIN} --samples 4", "--samples 4 at temperature 0", "--sampled"),
    "pass@k of too few": (f"{PLAIN} --sampled --samples 2 --pass-k 4", "--pass-k 4", "--samples 4"),
    "limit of zero": (f"{PLAIN} --limit 0", "--limit 0", "1 or more"),
    "temperature is no number": (f"{PLAIN} --sampled --temperature nan", "--temperature nan", "0 .greedy. or more"),
    "memory for transformers": (f"{PLAIN} --memory 4", "--memory is vllm's", "--engine vllm"),
    "vllm for an evaluation without a GPU": (
        "eval arith --model tiny --engine vllm", "--engine is vllm, but there is no CUDA", "transformers or auto",
    ),
    "vllm for a chat without a GPU": (
        "chat --model tiny --engine vllm", "--engine is vllm, but there is no CUDA", "transformers or auto",
    ),
    "memory of a chat on transformers": ("chat --model tiny --memory 4", "--memory is vllm's", "leave it out"),
    "kernel for transformers": (f"{PLAIN} --kernel marlin", "--kernel is vllm's", "leave it out"),
    "weights of an evaluation are torn": ("eval arith --model short", "short/.*truncated", "copy or download"),
    "tools of no environment": (
        f"{PLAIN} --environment none --tools a.py:f", "--tools a.py:f and --environment none contradict", "leave one",
    ),
    "no server of an environment": (
        f"{TRAIN} {SUMS} --environment http://127.0.0.1:9", "http://127.0.0.1:9 cannot be reached", "start its server",
    ),
    "no such environment": (f"{PLAIN} --environment wordgame", "'wordgame' names no environment", "word_game"),
    "time of no grader": (f"{PLAIN} --grader-timeout-s 3", "--grader-timeout-s 3 is of a grader", "--grader FILE.py"),
    "adapter of another base": (
        "eval arith --model base --adapter runs/done", "is of another base", "it was trained on",
    ),
    "adapter is a model": ("eval arith --model tiny --adapter base", "base is a model", "adapter_config.json"),
    "checkpoints without a run": ("eval arith --model tiny --checkpoints all", "--checkpoints", "--run"),
    "template without a question": (f"{PLAIN} --prompt-template Hello", "'Hello' has no", "{question}"),
    "train into another folder": (f"{TRAIN} --out data", "data already exists and is no run", "another --out"),
    "compare with a run": ("compare runs/done runs/none", "runs/done holds no evaluation", "`qerl eval` ended"),
    "resume too long a name": (f"train --resume {'x' * 300}", "there is no folder xxx", "the directory that"),
    "resume in no home": ("train --resume ~nobody-here/run", "there is no folder ~nobody", "the directory that"),
    "compare into a folder": ("compare evals/a evals/b --out data", "--out data is a folder", "data/comparison.json"),
    "compare in no home": ("compare ~nobody-here/a evals/b", "there is no folder ~nobody-here/a", "`qerl eval` ended"),
    "compare too long a name": (f"compare {'x' * 300} evals/b", "there is no folder xxx", "`qerl eval` ended"),
    "compare with nothing": ("compare evals/gsm8k runs/done", "there is no folder evals/gsm8k", "`qerl eval` ended"),
    # plan, report, merge, chat, grade, init
    "init from an empty folder": ("init empty", "empty holds no data file", "pass the path of one"),
    "an environment for given rows": ("sft --recipe sft_tiny --environment calculator", "--environment", "sft --help"),
    "no such card": ("plan --recipe dapo_7b --gpu rtx9090", "rtx9090", "4090"),
    "no card": ("plan --recipe dapo_7b --gpu=", "--gpu '' is not known", "4090"),
    "card of no memory": ("plan --recipe dapo_7b --gpu -3", "-3 is not a size", "write GiB"),
    "report of nothing": ("report runs/dnoe", "no folder runs/dnoe .did you mean runs/done", "the directory that"),
    "report of a model": ("report base", "base is not a run: it has no metrics.jsonl", "the directory that"),
    "merge a model": ("merge --adapter base --to bf16", "base is a model, not an adapter", "adapter_config.json"),
    "merge to another format": ("merge --adapter runs/done --to fp8", "'fp8'", "'bf16'"),
    "merge an adapter of another base": (
        "merge --adapter runs/done --to bf16 --model base", "runs/done/adapter changes", "base that it was trained on",
    ),
    "hub id without a name": ("merge --adapter runs/done --to adapter --push-to-hub mine", "mine", "owner/name"),
    "chat without a model": ("chat --model ./missing", "there is no folder ./missing", "existing folder"),
    "grade without a file": ("grade no.jsonl --task gsm8k", "no file or folder 'no.jsonl'", "write a path"),
    "grade rows without completions": ("grade rows.jsonl --task gsm8k", "rows.jsonl, row 1", "`completion`"),
    "copy a recipe over a file": ("recipes copy tiny --out mine/tiny.yaml", "tiny.yaml exists", "--out FILE"),
    "show no recipe": ("recipes show dapo", "dapo", "dapo_7b"),
}  # fmt: skip


def write_workspace(folder):
    """Files that a user's folder may hold: complete and broken models, a finished run, data, recipes."""
    write_base(folder / "base")
    fake_checkpoint(folder / "nvfp4", quantization_config={
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {},
    })  # fmt: skip
    fake_checkpoint(folder / "gptq", quantization_config={"quant_method": "gptq", "bits": 4})
    fake_checkpoint(folder / "experts", model_type="qwen2_moe", num_experts=8, shared_expert_intermediate_size=64)
    fake_checkpoint(folder / "torn-config")
    (folder / "torn-config" / "config.json").write_text('{"model_type": "llama",')
    fake_checkpoint(folder / "no-tokenizer", tokenizer=False)
    shards = fake_checkpoint(folder / "no-shard")
    (shards / "model.safetensors").rename(shards / "model-00001-of-00002.safetensors")
    names = [*layout_tensors()]
    where = {name: f"model-0000{1 + (name == names[-1])}-of-00002.safetensors" for name in names}
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    cut = fake_checkpoint(folder / "short-shard") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    (fake_checkpoint(folder / "torn-tokenizer") / "tokenizer.json").write_text("{")
    short = shutil.copytree(folder / "base", folder / "short")
    first = min(short.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-100])
    odd = shutil.copytree(folder / "base", folder / "odd-config")
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps({**config, "hidden_size": "big"}))
    (folder / "empty").mkdir()
    (folder / "loop").mkdir()
    (folder / "loop" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(folder / "loop")}))
    shutil.copytree(DATA, folder / "runs" / "done")
    settings = ["adapter.rank=4", "adapter.alpha=8", "run.steps=30"]
    # The recipe is saved anew, so that its keys are those of this version.
    save_config(load_recipe("tiny", settings), folder / "runs" / "done" / "config.yaml")
    write_data(folder)
    write_recipes(folder)
    (folder / "mine").mkdir()
    (folder / "mine" / "tiny.yaml").write_text("extends: tiny\n")


def write_data(folder):
    row = {"question": "What is 2 + 3?", "answer": "5"}
    (folder / "data").mkdir()
    (folder / "data" / "empty.jsonl").write_text("")
    (folder / "data" / "torn.jsonl").write_text(json.dumps(row) + '\n{"question": "What')
    (folder / "data" / "columns.jsonl").write_text('{"problem": "1 + 1", "solution": "2"}\n')
    (folder / "data" / "answers.jsonl").write_text('{"question": "1 + 1"}\n')
    (folder / "data" / "one.jsonl").write_text(json.dumps(row) + "\n")
    sums = [{"question": f"What is {n} + 3?", "answer": str(n + 3)} for n in range(10)]
    (folder / "data" / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(20)))


def write_recipes(folder):
    recipes = {
        "tab": "extends: tiny\nrun:\n\tsteps: 3\n",
        "list": "- extends: tiny\n",
        "twice": "extends: tiny\nrun:\n  steps: 3\n  steps: 4\n",
        "unknown": "extends: tiny\noptim:\n  learning_rte: 1.0e-3\n",
        "type": "extends: tiny\nrun:\n  steps: many\n",
        "orphan": "extends: nowhere\n",
        "loop": "extends: loop.yaml\n",
    }
    for name, text in recipes.items():
        (folder / f"{name}.yaml").write_text(text)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workspace")
    write_workspace(folder)
    return folder


def listing(folder):
    """Every path, and for files their size and time of change."""
    return {path: path.is_file() and (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def arguments_of(line):
    """Split at spaces, except inside `name: value` of YAML."""
    return [word.replace("\0", " ") for word in line.replace(": ", ":\0").split()]


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_gives_one_line_and_writes_no_file(name, workspace, monkeypatch, capfd):
    line, mistake, remedy = CASES[name]
    monkeypatch.chdir(workspace)
    monkeypatch.setattr(sys, "argv", ["qerl", *arguments_of(line)])
    before = listing(workspace)
    with pytest.raises(SystemExit) as stopped:
        qerl.cli.main.main()
    output = capfd.readouterr()
    assert stopped.value.code == 2
    lines = output.err.strip().splitlines()
    assert [text.startswith("error: ") for text in lines] == [True], output.err
    assert re.search(mistake, lines[0]), lines[0]
    assert re.search(remedy, lines[0]), lines[0]
    assert listing(workspace) == before


def test_the_table_has_the_stated_length():
    assert len(CASES) >= 60
    assert len({line for line, _, _ in CASES.values()}) == len(CASES)


@pytest.mark.parametrize("name", ["unknown option", "no such folder", "unknown key in --set"])
def test_the_installed_script_does_the_same(name, workspace):
    line, mistake, _ = CASES[name]
    command = [sys.executable, "-c", "import qerl.cli.main; qerl.cli.main.main()", *arguments_of(line)]
    result = subprocess.run(command, cwd=workspace, capture_output=True, text=True, timeout=240)
    assert result.returncode == 2
    assert re.fullmatch(f"error: .*{mistake}.*\n", result.stderr)
