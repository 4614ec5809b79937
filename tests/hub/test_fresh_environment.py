"""By repository id from an offline cache, where only torch and transformers are installed; once with lm_eval."""

import json
import os
import subprocess
from pathlib import Path

import hub_checkpoints as official
import pytest
import torch
from fresh_environment import fill_cache, make_environment
from transformers import AutoTokenizer

from modeling_mrp.hub.convert import convert_checkpoint
from modeling_mrp.hub.export import export_model
from modeling_mrp.modeling_mrp import MRPForCausalLM

MODES = ("none", "speculative", "direct", "remask")
SCRIPT = """
import importlib.util, json, sys
for name in ("modeling_mrp", "mrp_kernels", "peft", "accelerate", "triton", "lm_eval"):
    assert importlib.util.find_spec(name) is None, name
from transformers import AutoModelForCausalLM, AutoTokenizer
result = {}
for name in sys.argv[1:]:
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True, dtype="auto")
    model.config._experts_implementation = "eager"
    prompt = tokenizer("3+4=", return_tensors="pt")
    result[name] = {
        mode: model.generate(**prompt, mrp_mode=mode, max_new_tokens=12)[0].tolist()
        for mode in ("none", "speculative", "direct", "remask")
    }
print("RESULT" + json.dumps(result))
"""
TASK = """
task: tiny_words
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
output_type: generate_until
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["@@"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


def run(python: Path, arguments: list[str], home: Path) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "PYTHON"))}
    settings = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [str(python), *arguments],
        cwd=home,
        env={**kept, **settings},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_every_layout_in_every_mode_gives_the_ids_of_its_source(tmp_path):
    """Dense and mixture of experts, one file and sharded, float32 and bfloat16, a wrong block_size overridden."""
    layouts = {
        "dense": {"dtype": torch.float32},
        "dense-bf16-sharded": {"shards": 3},
        "moe": {"dtype": torch.float32, "experts": True, "shards": 2},
        "misdeclared": {"dtype": torch.float32, "config": {"block_size": 2}},
    }
    home = tmp_path / "home"
    for name, layout in layouts.items():
        official.write_checkpoint(tmp_path / name / "source", **layout)
        convert_checkpoint(
            tmp_path / name / "source",
            tmp_path / name / "ours",
            max_shard_size="40KB",
            block_length=4 if name == "misdeclared" else None,
        )
        fill_cache(home, f"somebody/{name}", export_model(tmp_path / name / "ours", tmp_path / name / "exported"))
    python = make_environment(tmp_path / "environment", ["torch", "transformers"])
    names = [f"somebody/{name}" for name in layouts]
    loaded = json.loads(run(python, ["-c", SCRIPT, *names], home).split("RESULT")[1])
    for name in layouts:
        # The source: the official files, read by this package without conversion, as their weights are stored (which
        # "auto" would not do: their configs say bfloat16).
        dtype = layouts[name].get("dtype", torch.bfloat16)
        model = MRPForCausalLM.from_pretrained(tmp_path / name / "source", dtype=dtype).eval()
        model.config._experts_implementation = "eager"
        prompt = AutoTokenizer.from_pretrained(tmp_path / name / "ours")("3+4=", return_tensors="pt")
        for mode in MODES:
            ids = model.generate(**prompt, mrp_mode=mode, max_new_tokens=12, block_length=4, do_sample=False)[
                0
            ].tolist()
            assert loaded[f"somebody/{name}"][mode] == ids, (name, mode)


@pytest.mark.slow
def test_the_harness_runs_it_by_id(exported, converted, tmp_path):
    pytest.importorskip("lm_eval")
    home, tasks = tmp_path / "home", tmp_path / "tasks"
    fill_cache(home, "somebody/tiny", exported)
    tasks.mkdir()
    model = MRPForCausalLM.from_pretrained(converted).eval()
    tokenizer = AutoTokenizer.from_pretrained(converted)
    rows = []
    for question in ("3+4=", "Hi", "Add:"):
        ids = tokenizer(question, return_tensors="pt")["input_ids"]
        said = model.generate(ids, mrp_mode="none", max_new_tokens=12)[0, ids.shape[1] :]
        rows.append({"question": question, "answer": tokenizer.decode(said, skip_special_tokens=True)})
    (tasks / "rows.json").write_text(json.dumps(rows))
    (tasks / "task.yaml").write_text(TASK.replace("DATA", str(tasks / "rows.json")))
    python = make_environment(tmp_path / "environment", ["torch", "transformers", "lm_eval", "accelerate", "peft"])
    arguments = ["-m", "lm_eval", "--model", "hf", "--tasks", "tiny_words", "--include_path", str(tasks)]
    arguments += ["--model_args", "pretrained=somebody/tiny,trust_remote_code=True,dtype=float32", "--device", "cpu"]
    output = run(python, [*arguments, "--batch_size", "2", "--output_path", str(tmp_path / "results")], home)
    assert "tiny_words" in output
    results = json.loads(next((tmp_path / "results").rglob("results*.json")).read_text())
    # Every answer is the one that this package gives.
    assert results["results"]["tiny_words"]["exact_match,none"] == 1.0
