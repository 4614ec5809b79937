"""The Trainer's own step, whole runs of the command, exact resume, and several processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from training_golden import CASES_BY_LAYOUT, HEAD, assert_gradients_match, inputs_of, load_case, model_of
from training_models import assert_same_gradients, gradients, sample, small_model
from transformers import TrainingArguments

from modeling_mrp import MRPForCausalLM
from modeling_mrp.noising import IGNORED
from modeling_mrp.training.config import config_from, load_config
from modeling_mrp.training.data import Collator
from modeling_mrp.training.errors import TrainingError
from modeling_mrp.training.run import refuse_unsupported_parallelism, train
from modeling_mrp.training.trainer import HeadTrainer
from modeling_mrp.training_objective import TrainingObjective

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "accelerate"


@pytest.mark.parametrize(("name", "layout"), CASES_BY_LAYOUT)
def test_golden_cases_through_the_trainers_step(name, layout, tmp_path):
    case, tensors = load_case(name)
    model, inputs = model_of(case), inputs_of(case, tensors, layout)
    objective = TrainingObjective.of(inputs.pop("objective"))
    arguments = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, remove_unused_columns=False, report_to="none",
        gradient_accumulation_steps=1,
    )  # fmt: skip
    trainer = HeadTrainer(model=model, args=arguments, objective=objective)
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.training_step(model, inputs)
    assert abs(loss.item() - case["loss"]) <= case["tolerance"]["loss_rtol"] * abs(case["loss"])
    found = {
        HEAD + key.removeprefix("mrp."): parameter.grad
        for key, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    assert_gradients_match(case, tensors, found)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with a small model and data of ready ids."""
    folder = tmp_path_factory.mktemp("train")
    small_model().save_pretrained(folder / "model")
    # The last sample of every four has nothing to supervise but its last token.
    rows = [sample(9 + n % 7, (3, 1, 5, 8)[n % 4], n) for n in range(24)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def configuration(workplace, output, **trainer):
    return {
        "output": str(output),
        "model": {"path": str(workplace / "model")},
        "head": {"layers": 1, "final_norm": 0.1},
        "data": {"train": str(workplace / "rows.jsonl"), "packing": False, "max_length": 32},
        "objective": {"steps": 2, "reveals": [1, 2]},
        "trainer": {
            "per_device_train_batch_size": 4, "max_steps": 6, "logging_steps": 3, "use_cpu": True,
            "dataloader_pin_memory": False, "disable_tqdm": True, "save_steps": 3, **trainer,
        },
    }  # fmt: skip


def head_of(folder):
    return load_file(folder / "mrp_head.safetensors")


def assert_same(one, other, atol=0.0):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert float((value - other[name]).abs().max()) <= atol, name


@pytest.fixture(scope="module")
def finished(workplace):
    output = workplace / "whole"
    train(config_from(configuration(workplace, output)))
    return output


def test_a_run_writes_a_folder_that_loads(finished, workplace):
    model = MRPForCausalLM.from_pretrained(finished)
    assert model.config.num_nextn_predict_layers == 1
    start = load_file(workplace / "model" / "model.safetensors")
    config = json.loads((finished / "config.json").read_text())
    assert set(config["auto_map"]) == {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}
    assert (finished / "residual_objective.py").exists()
    for name, value in model.model.state_dict().items():
        assert torch.equal(value, start[f"model.{name}"]), f"the backbone moved: {name}"
    logs = json.loads((finished / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
    for name in ("loss_1", "loss_2", "kl_before_1", "kl_1", "kl_explained_1", "top1_1", "next_pick_1"):
        assert name in logs[0]


def test_resume_is_exact(finished, workplace):
    resumed = workplace / "resumed"
    resumed.mkdir()
    shutil.copytree(finished / "checkpoint-3", resumed / "checkpoint-3")
    train(config_from(configuration(workplace, resumed)), resume=True)
    assert_same(head_of(finished), head_of(resumed))


def test_muon_resumes_exactly_too(workplace):
    values = {**configuration(workplace, workplace / "muon", learning_rate=0.02), "optimizer": "muon"}
    train(config_from(values))
    resumed = workplace / "muon_resumed"
    resumed.mkdir()
    shutil.copytree(workplace / "muon" / "checkpoint-3", resumed / "checkpoint-3")
    train(config_from({**values, "output": str(resumed)}), resume=True)
    assert_same(head_of(workplace / "muon"), head_of(resumed))
    logs = json.loads((resumed / "checkpoint-6" / "trainer_state.json").read_text())["log_history"]
    assert logs[-1]["learning_rate"] < 0.02


def test_accumulation_and_evaluation_run(workplace):
    output = workplace / "accumulated"
    values = configuration(
        workplace, output, gradient_accumulation_steps=2, max_steps=2, eval_strategy="steps", eval_steps=1,
        metric_for_best_model="eval_loss", load_best_model_at_end=True, save_steps=1,
    )  # fmt: skip
    values["data"]["evaluation_size"] = 4
    metrics = train(config_from(values))
    assert {"eval_loss", "eval_kl_1", "eval_kl_before_2"} <= metrics.keys()
    again = train(config_from({**values, "output": str(output) + "2"}))
    assert metrics["eval_loss"] == again["eval_loss"]


def test_overrides_and_their_errors(workplace, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(configuration(workplace, tmp_path / "out")))
    config = load_config(file, ["objective.steps=3", "objective.reveals=[2, 4]", "head.prediction=direct"])
    assert (config.objective.steps, config.objective.reveals, config.head.prediction) == (3, (2, 4), "direct")
    for override, message in {
        "objective.stepz=3": "unknown objective.stepz; allowed: steps, layout",
        "steps": "section.name=value",
        "objective.steps=0": "steps=0",
        "model.path=": "model.path is empty",
        "save=half": "head, model, both",
    }.items():
        with pytest.raises(TrainingError, match=message):
            load_config(file, [override])
    with pytest.raises(TrainingError, match="per_device_batch"):
        train(load_config(file, ["trainer.per_device_batch=3"]))
    with pytest.raises(TrainingError, match="cannot be loaded"):
        train(load_config(file, ["model.path=/nowhere/at/all"]))


def test_what_won_is_the_default_under_the_users_own(workplace, tmp_path):
    values = configuration(workplace, tmp_path)
    for section, expected in {
        "{}": (3, 1.0, 0.3),
        "{steps: 1, certainty_weight: 0.5}": (1, 0.5, 0.3),
        "{loss: reverse_kl}": (3, 0.0, 0.3),
    }.items():
        objective = config_from({**values, "objective": yaml.safe_load(section)}).objective
        assert (objective.steps, objective.certainty_weight, objective.supervise_revealed) == expected


@pytest.mark.parametrize(
    ("trainer", "steps", "message"),
    [
        ({"fsdp": "full_shard"}, 1, "FSDP is refused"),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, 2, "uses it K times"),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, 1, "shards the LM head"),
        ({"deepspeed": str(EXAMPLES / "zero1.json")}, 3, "uses it K times"),
    ],
)
def test_sharding_is_refused_with_its_reason(trainer, steps, message):
    with pytest.raises(TrainingError, match=message):
        refuse_unsupported_parallelism(trainer, steps)


# A configuration of several GPUs is what makes accelerate start several processes, on a CPU too.
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29631"],
    "accelerate": [
        "-m", "accelerate.commands.launch", f"--config_file={EXAMPLES / 'ddp.yaml'}", "--num_processes=2",
        "--main_process_port=29632",
    ],
}  # fmt: skip


def command(*arguments, launcher=None):
    start = [] if launcher is None else LAUNCHERS[launcher]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    line = [sys.executable, *start, "-m", "modeling_mrp.train", *map(str, arguments)]
    return line, environment


def test_the_deepspeed_example_is_accepted_for_one_step():
    from accelerate.commands.config.config_args import load_config_from_file

    assert load_config_from_file(str(EXAMPLES / "deepspeed_zero1.yaml")).deepspeed_config["zero3_init_flag"] is False
    refuse_unsupported_parallelism({"deepspeed": str(EXAMPLES / "zero1.json")}, 1)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_two_processes_equal_one(workplace, tmp_path, launcher):
    for name, batch in ((None, 4), (launcher, 2)):
        backend = {"ddp_backend": "gloo"} if name else {}
        values = configuration(
            workplace, tmp_path / str(name), per_device_train_batch_size=batch, max_steps=5, **backend
        )
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(values))
        line, environment = command(file, launcher=name)
        done = subprocess.run(line, env=environment, capture_output=True, timeout=300, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
    assert_same(head_of(tmp_path / "None"), head_of(tmp_path / launcher), atol=1e-5)


def _gradients_of_rank(rank, port, folder):
    """One of two processes: rank 0 has answers, rank 1 prompts alone."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    model = small_model()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    batch = batch_with_answers() if rank == 0 else batch_without_answers()
    wrapped(**batch, objective=OBJECTIVE, noise_seed=3).loss.backward()
    torch.save(gradients(model), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


OBJECTIVE = {"steps": 2, "supervise_revealed": 0.3, "certainty_weight": 0.5}


def batch_with_answers():
    return Collator(0)([sample(13, 3, 1), sample(9, 5, 2)])


def batch_without_answers():
    batch = Collator(0)([sample(11, 0, 3)])
    batch["labels"].fill_(IGNORED)
    return batch


@pytest.mark.slow
def test_a_rank_without_anything_to_supervise(tmp_path):
    torch.multiprocessing.spawn(_gradients_of_rank, (29633, tmp_path), nprocs=2)
    model = small_model()
    model(**batch_with_answers(), objective=OBJECTIVE, noise_seed=3).loss.backward()
    alone = gradients(model)
    for rank in (0, 1):
        assert_same_gradients(alone, torch.load(tmp_path / f"{rank}.pt"))


@pytest.mark.slow
def test_kill_and_resume_repeats_the_uninterrupted_run(workplace, tmp_path):
    values = configuration(workplace, tmp_path / "whole", max_steps=60, save_steps=5)
    for name in ("whole", "killed"):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({**values, "output": str(tmp_path / name)}))
    line, environment = command(tmp_path / "whole.yaml")
    subprocess.run(line, env=environment, check=True, capture_output=True, timeout=300)
    line, environment = command(tmp_path / "killed.yaml")
    process = subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 200
    while not (tmp_path / "killed" / "checkpoint-10" / "trainer_state.json").exists() and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed" / "mrp_head.safetensors").exists(), "the run ended before it was killed"
    line, environment = command(tmp_path / "killed.yaml", "--resume")
    subprocess.run(line, env=environment, check=True, capture_output=True, timeout=300)
    assert_same(head_of(tmp_path / "whole"), head_of(tmp_path / "killed"))
