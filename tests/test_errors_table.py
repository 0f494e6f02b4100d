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
    "another trainer's option": ("train --recipe tiny --learning-rate 1e-4",
        "--learning-rate", "write --set optim.learning_rate=1e-4"),
    "an option unlike any": ("train --recipe tiny --nonsense 1", "no such option: --nonsense: see", "train --help"),
    "a key without --set": ("train --recipe tiny num_generations=8",
        r"extra argument.* .num_generations=8", "write --set rollout.group_size=8"),
    "a model without its option": ("eval arith tiny", "extra argument.* .tiny", "did you mean --model tiny"),
    "tuning without a card": ("tune --model tiny", "no card here that runs them", "qerl doctor"),
    "tuning for an unknown model": ("tune --model runs/dune", "no folder runs/dune", "did you mean runs/done"),
    "a command unlike any": ("serve", "'serve'; there are doctor", "qerl --help"),
    "missing argument": ("compare evals/a", "missing argument 'second'", "write `.*compare FIRST SECOND`"),
    # models
    "no such folder": ("quantize --model ./missing", "./missing", "existing folder"),
    "no such run": ("eval arith --model runs/dune", "no folder runs/dune", "did you mean runs/done"),
    "an adapter of itself": ("eval arith --model loop",
        "loop names itself as its base, or one that rests on it", "write there"),
    "no such home": ("eval arith --model ~nobody-here/base", "there is no folder ~nobody-here/base", "existing folder"),
    "a name too long": (f"eval arith --model {'x' * 300}", "neither a folder here nor a hub id", "existing folder"),
    "no model in the folder": ("quantize --model empty", "empty has no config.json", "give"),
    "a file for a folder": ("quantize --model rows.jsonl", "rows.jsonl is a file", "give the folder"),
    "quantized twice": ("quantize --model nvfp4", "nvfp4 .*quantized", "16-bit"),
    "an adapter to quantize": ("quantize --model runs/done/adapter",
        "is an adapter", "qerl merge --adapter runs/done/adapter --to nvfp4"),
    "a run to quantize": ("quantize --model runs/done", "is a run", "qerl merge --adapter runs/done --to nvfp4"),
    "gptq quantized model": ("quantize --model gptq", "gptq", "made from"),
    "mixture of experts": ("quantize --model experts", "mixture of experts", "give a model of one of these"),
    "shard is missing": ("quantize --model no-shard", "model-00002-of-00002", "copy or download"),
    "shard is cut short": ("quantize --model short-shard", "truncated", "copy or download"),
    "tokenizer is torn": ("quantize --model torn-tokenizer", "tokenizer.json is not valid JSON", "copy or download"),
    "no tokenizer": ("quantize --model no-tokenizer", "has no tokenizer", "copy the tokenizer files"),
    "out is the model": ("quantize --model base --out base", "own folder", "elsewhere"),
    "out is taken": ("quantize --model base --out nvfp4", "nvfp4 exists", "--overwrite"),
    "out is another's folder": ("quantize --model base --out data --overwrite", "data holds something else", "another"),
    "ignore matches nothing": ("quantize --model base --ignore re:.*attention.*",
        "re:.*attention.*' matches no layer", "self_attn"),
    "rows that are too few": ("quantize --model base --calibration rows.jsonl --sequence-length 9999",
        "9999", "--sequence-length"),
    # recipes and --set
    "no such recipe": ("train --recipe dapo_8b", "'dapo_8b'", "dapo_7b"),
    "no recipe at all": ("train", "--recipe", "qerl recipes"),
    "unknown key in --set": ("train --recipe tiny --set loss.clip_hihg=0.3", "clip_hihg", "clip_high"),
    "noise grows": ("train --recipe tiny --set noise.sigma_end=0.1",
        "sigma_end 0.1 with noise.sigma_start", "at most 0.01"),
    "no such argument of a reward": (f"{TRAIN} --set rewards=[{{name: format,args: {{styl: tags}}}}]",
        "reward format takes no argument 'styl'", "did you mean 'style'"),
    "no such file of a reward": (f"{TRAIN} --set rewards=[{{name: 'no.py:f'}}]", "'no.py' does not exist", "no.py"),
    # training
    "not quantized yet": ("train --recipe tiny", "checkpoints/tiny-NVFP4A16", "qerl quantize"),
    "a run that exists": (f"{TRAIN} --out runs/done", "runs/done already exists", "--resume"),
    "a file as run": (f"{TRAIN} --out rows.jsonl", "rows.jsonl already exists", "another --out"),
    "a run of too long a name": (f"{TRAIN} --out {'x' * 300}", "File name too long", "give another"),
    "a run of an odd name": (f"{TRAIN} --out a\x01b", "cannot be printed", "write another"),
    "more tokens than positions": (f"{TRAIN} {SUMS} --set rollout.max_new_tokens=100000",
        "positions", "max_new_tokens: "),
    "more rank than width": (f"{TRAIN} {SUMS} --set adapter.rank=5000", "adapter.rank 5000 is more", "128 or less"),
    "weights are torn": (f"train --recipe tiny --set model.format=bf16 --model short {SUMS}",
        "short/.*truncated", "copy or download"),
    "config of wrong types": ("train --recipe tiny --set model.format=bf16 --model odd-config", "hidden_size", "copy"),
    "vllm without a GPU": (f"{TRAIN} {SUMS} --set rollout.engine=vllm",
        "vllm, but there is no CUDA device", "transformers or auto"),
    "data are missing": (f"{TRAIN} --data no.jsonl", "no file or folder 'no.jsonl'", "write a path"),
    "data are torn": (f"{TRAIN} --data data/torn.jsonl",
        "1 usable examples are fewer than the 8 prompts", "give more rows"),
    "column is missing": (f"{TRAIN} --data data/columns.jsonl",
        "no column 'question'.*problem, solution", "--columns question="),
    "fewer rows than prompts": (f"{TRAIN} --data data/one.jsonl",
        "1 usable examples", "lower rollout.prompts_per_step"),
    "resume nothing": ("train --resume runs/none", "there is no folder runs/none", "the directory that"),
    "resume a step that is not there": ("train --resume 7", "step 7", "step"),
    "resume with another recipe": ("train --resume runs/done --recipe tiny", "--resume", "--recipe"),
    # evaluation
    "no such benchmark": ("eval gsm9k --model tiny", "gsm9k", "gsm8k"),
    "no run yet": ("eval arith", "no --model was given", "qerl quantize"),
    "memory for transformers": (f"{PLAIN} --memory 4", "--memory is vllm's", "--engine vllm"),
    "vllm for a chat without a GPU": ("chat --model tiny --engine vllm",
        "--engine is vllm, but there is no CUDA", "transformers or auto"),
    "tools of no environment": (f"{PLAIN} --environment none --tools a.py:f",
        "--tools a.py:f and --environment none contradict", "leave one"),
    "no server of an environment": (f"{TRAIN} {SUMS} --environment http://127.0.0.1:9",
        "http://127.0.0.1:9 cannot be reached", "start its server"),
    "no such environment": (f"{PLAIN} --environment wordgame", "'wordgame' names no environment", "word_game"),
    "adapter of another base": ("eval arith --model base --adapter runs/done",
        "is of another base", "it was trained on"),
    "adapter is a model": ("eval arith --model tiny --adapter base", "base is a model", "adapter_config.json"),
    "train into another folder": (f"{TRAIN} --out data", "data already exists and is no run", "another --out"),
    "compare with a run": ("compare runs/done runs/none", "runs/done holds no evaluation", "`qerl eval` ended"),
    "compare into a folder": ("compare evals/a evals/b --out data", "--out data is a folder", "data/comparison.json"),
    # plan, report, merge, chat, grade, init
    "init from an empty folder": ("init empty", "empty holds no data file", "pass the path of one"),
    "an environment for given rows": ("sft --recipe sft_tiny --environment calculator", "--environment", "sft --help"),
    "no such card": ("plan --recipe dapo_7b --gpu rtx9090", "rtx9090", "4090"),
    "report of nothing": ("report runs/dnoe", "no folder runs/dnoe .did you mean runs/done", "the directory that"),
    "report of a model": ("report base", "base is not a run: it has no metrics.jsonl", "the directory that"),
    "compare what was not evaluated": ("compare runs/done runs/done",
        "runs/done holds no evaluation", "write `qerl eval TASK --model runs/done` first"),
    "merge a model": ("merge --adapter base --to bf16", "base is a model, not an adapter", "adapter_config.json"),
    "merge into nothing": ("merge --adapter runs/done", "can become several things", "write --to, and one"),
    "merge to another format": ("merge --adapter runs/done --to fp8", "'fp8'", "'bf16'"),
    "merge an adapter of another base": ("merge --adapter runs/done --to bf16 --model base",
        "runs/done/adapter changes", "base that it was trained on"),
    "chat without a model": ("chat --model ./missing", "there is no folder ./missing", "existing folder"),
    "grade rows without completions": ("grade rows.jsonl --task gsm8k", "rows.jsonl, row 1", "`completion`"),
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


def write_data(folder):
    row = {"question": "What is 2 + 3?", "answer": "5"}
    (folder / "data").mkdir()
    (folder / "data" / "torn.jsonl").write_text(json.dumps(row) + '\n{"question": "What')
    (folder / "data" / "columns.jsonl").write_text('{"problem": "1 + 1", "solution": "2"}\n')
    (folder / "data" / "one.jsonl").write_text(json.dumps(row) + "\n")
    sums = [{"question": f"What is {n} + 3?", "answer": str(n + 3)} for n in range(10)]
    (folder / "data" / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(20)))


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


def test_the_installed_script_does_the_same(workspace):
    line, mistake, _ = CASES["no such folder"]
    command = [sys.executable, "-c", "import qerl.cli.main; qerl.cli.main.main()", *arguments_of(line)]
    result = subprocess.run(command, cwd=workspace, capture_output=True, text=True, timeout=240)
    assert result.returncode == 2
    assert re.fullmatch(f"error: .*{mistake}.*\n", result.stderr)
