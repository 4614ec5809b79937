"""The tiny tasks: data file, scores, and (slow) the stock harness and two processes over the tiny model."""

import json
import os
import socket
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from evaluation_models import TASKS
from lm_eval.tasks import TaskManager

from modeling_mrp.evaluation import tiny_data
from modeling_mrp.tiny.task import Problem, is_correct, problems
from modeling_mrp.tiny.tokenizer import build_tokenizer

DATA = TASKS / "tiny" / "data" / "problems.jsonl"
TINY_MODEL = TASKS.parent / "hub_configs" / "sdar-tiny-mrp"


def shipped():
    return [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]


def test_the_data_file_is_what_the_command_writes():
    rows = shipped()
    assert len(rows) >= 300
    again = list(islice(tiny_data.rows(), 40))
    assert rows[:40] == again, "the tiny task has changed: run python -m modeling_mrp.evaluation.tiny_data"


def test_problems_are_different_and_from_their_own_stream():
    rows = shipped()
    assert len({row["question"] for row in rows}) == len(rows)
    training = {problem.question for problem in islice(problems("train", 0), 2000)}
    assert sum(row["question"] in training for row in rows) < len(rows) / 100


def test_choices_hold_the_solution_s_result():
    for row in shipped():
        assert len(set(row["choices"])) == 4
        assert row["solution"].startswith(f"{row['started']} {row['choices'][row['label']]}")


def load(name):
    task = TaskManager(include_path=str(TASKS), include_defaults=False).load([name])["tasks"][name]
    task.set_fewshot_seed(1)
    return task


def test_scores_are_those_of_the_tiny_task():
    task = load("mrp_tiny")
    for doc in list(task.test_docs())[:20]:
        assert task.process_results(doc, [doc["solution"]]) == {"exact_match": 1, "answered": 1}
        assert task.process_results(doc, [doc["solution"] + "9"])["exact_match"] == 0
        assert task.process_results(doc, [doc["solution"].split("####")[0]]) == {"exact_match": 0, "answered": 0}
        assert is_correct(doc["solution"], Problem(doc["question"], doc["solution"], doc["answer"]))


@pytest.mark.parametrize("name", ["mrp_tiny", "mrp_tiny_choice"])
def test_prompts_are_the_same_with_and_without_the_chat_template(name):
    tokenizer = build_tokenizer()

    def chat(history, add_generation_prompt=True):
        return tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=add_generation_prompt)

    prompts = []
    for applied in (False, True):
        task = load(name)
        task.build_all_requests(
            limit=3, rank=0, world_size=1, apply_chat_template=applied, chat_template=chat if applied else None
        )
        prompts.append([instance.args[:2] for instance in task.instances])
    assert prompts[0] == prompts[1]
    row = shipped()[0]
    prompt = f"<|user|>{row['question']}<|im_end|><|assistant|>"
    if name == "mrp_tiny":
        assert prompts[0][0][0] == prompt
    else:
        wanted = [(prompt + row["started"], f" {choice}") for choice in row["choices"]]
        assert prompts[0][:4] == wanted


def run(module: list[str], *arguments: str, **variables: str) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [sys.executable, *module, *arguments], env=environment, capture_output=True, text=True, timeout=3000
    )
    assert done.returncode == 0, done.stderr[-3000:]


def results_in(folder: Path) -> dict:
    (file,) = folder.rglob("results_*.json")
    return json.loads(file.read_text())


@pytest.mark.slow
@pytest.mark.skipif(not (TINY_MODEL / "model.safetensors").exists(), reason="no trained tiny model here")
def test_the_stock_command_gives_the_same_accuracy_in_none_and_speculative(tmp_path):
    """The unpatched harness over the shipped folder, in a process that never imports this package."""
    accuracy = {}
    for mode in ("none", "speculative"):
        for batch in ("1", "8", "auto"):
            out = tmp_path / f"{mode}-{batch}"
            run(
                ["-m", "lm_eval"], "--model", "hf",
                "--model_args", f"pretrained={TINY_MODEL},trust_remote_code=True", "--device", "cpu",
                "--include_path", str(TASKS), "--tasks", "mrp_tiny", "--batch_size", batch, "--limit", "60",
                "--gen_kwargs", f"mrp_mode={mode}", "--output_path", str(out), "--max_batch_size", "16",
            )  # fmt: skip
            accuracy[mode, batch] = results_in(out)["results"]["mrp_tiny"]["exact_match,none"]
    assert len(set(accuracy.values())) == 1, accuracy
    assert min(accuracy.values()) >= 0.8


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_two_processes_give_the_result_of_one(model_folder, tmp_path, launcher):
    """Seven documents, so one rank has four and the other three."""
    arguments = [
        "--model", "mrp", "--model_args", f"pretrained={model_folder},dtype=float32", "--device", "cpu",
        "--include_path", str(TASKS), "--tasks", "mrp_tiny,mrp_tiny_choice", "--limit", "7", "--batch_size", "2",
        "--gen_kwargs", "mrp_mode=speculative,draft_states=4,max_gen_toks=12", "--log_samples",
    ]  # fmt: skip
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    run(["-m", "modeling_mrp.evaluation.cli"], *arguments, "--output_path", str(tmp_path / "one"), **hidden)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launch = {
        "torchrun": ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port],
        # Without --multi_gpu accelerate starts a single process on a machine without GPUs.
        "accelerate": ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
                       "--num_machines", "1", "--main_process_port", port, "--mixed_precision", "no",
                       "--dynamo_backend", "no"],
    }[launcher]  # fmt: skip
    run([*launch, "-m", "modeling_mrp.evaluation.cli"], *arguments, "--output_path", str(tmp_path / "two"), **hidden)
    one, two = results_in(tmp_path / "one"), results_in(tmp_path / "two")
    for task in ("mrp_tiny", "mrp_tiny_choice"):
        for name, value in one["results"][task].items():
            if name.split(",")[1:] != ["decoding"]:
                assert two["results"][task][name] == pytest.approx(value), name
    # How many drafts are evaluated may depend on a row's neighbours; what comes out may not.
    exact = ("requests", "documents", "new_tokens")
    for name in exact:
        assert two["decoding"]["tasks"]["mrp_tiny"][name] == one["decoding"]["tasks"]["mrp_tiny"][name]
    assert two["decoding"]["environment"]["processes"] == 2
    texts = []
    for part in ("one", "two"):
        (file,) = (tmp_path / part).rglob("samples_mrp_tiny_2*.jsonl")
        rows = sorted((json.loads(line) for line in file.read_text().splitlines()), key=lambda row: row["doc_id"])
        texts.append([row["filtered_resps"] for row in rows])
    assert len(texts[0]) == 7
    assert texts[0] == texts[1]
