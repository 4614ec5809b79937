"""The head stage of the tiny recipe: a residual head and a direct-MTP head of the same size, on recorded states.

`heads.yaml` trains the same kind of head by `mrp-train`, as one would on a real model; `ablation.py` compares its
variants.
"""

import json
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from ..head_artifact import load_head, save_head
from ..modeling_mrp import MRPForCausalLM, MRPHead
from ..training.record import record_trajectories
from .head_states import load_or_record
from .head_training import STEPS, train_head
from .task import problems

RECIPE = Path(__file__).with_name("heads.yaml")
TRAJECTORIES = 4000
PROBLEMS = 1600
LAYERS = 2
# The backbone's training stream counts its steps from 0; no step of it ever reaches this seed.
_SEED = 10_000_000
_DIRECT_HEAD = "direct_head"


def train_heads(
    model_folder: Path,
    work: Path,
    steps: int = STEPS,
    seed: int = 0,
    count: int = PROBLEMS,
    compile_step: bool = True,
) -> None:
    """Trains both heads on the backbone in `model_folder` and puts them there.

    The residual head goes into `model.safetensors` (keys `mrp.*`) and `config.json`; the direct head into
    `direct_head.safetensors` and `.json`, for `from_pretrained(..., mrp_head=".../direct_head.safetensors")`.

    Args:
        model_folder: backbone, tokenizer and config.
        work: folder for recorded states and finished heads; a stage that is there is not run again.
        steps: training steps of each head.
        seed: of data and initialisation.
        count: problems whose states are recorded.
        compile_step: whether the training step goes through `torch.compile`.
    """
    for prediction in ("residual", "direct"):
        folder = work / f"{prediction}_head"
        if (folder / "mrp_head.safetensors").exists():
            continue
        torch.manual_seed(seed)
        # Without its own head, if one was installed before: the head trained here must not begin from it.
        model = MRPForCausalLM.from_pretrained(model_folder, dtype=torch.float32, head_prediction=prediction).eval()
        fresh_head(model)
        tokenizer = AutoTokenizer.from_pretrained(model_folder)
        states = load_or_record(work / "states.pt", model, tokenizer, count, seed, {"mrp_mode": "none"})
        # Under torch.compile plain batched products are faster than sdpa on a CPU.
        model.set_attn_implementation("eager")
        train_head(model, states, steps, seed, compile_step=compile_step)
        model.config.draft_calibration = None
        save_head(model, folder, "sdar-tiny-mrp")
    install_heads(model_folder, work)


def fresh_head(model: MRPForCausalLM) -> None:
    """Gives `model` an untrained head of `LAYERS` layers."""
    model.config.num_nextn_predict_layers = LAYERS
    model.mrp = MRPHead(model.config)
    model.mrp.apply(model._init_weights)
    for layer in model.mrp.layers:
        layer.self_attn.is_causal = False


def write_trajectories(model_folder: Path, output: Path, count: int = TRAJECTORIES) -> None:
    """Lets the backbone answer `count` problems of the training stream, and keeps the order of its reveals."""
    output.parent.mkdir(parents=True, exist_ok=True)
    prompts = output.with_name("prompts.jsonl")
    chosen = islice(problems("train", _SEED), count)
    prompts.write_text("".join(json.dumps({"prompt": problem.question}) + "\n" for problem in chosen))
    part = output.with_suffix(".part")
    record_trajectories(str(model_folder), str(prompts), part, max_new_tokens=72, batch_size=128)
    part.replace(output)


def install_heads(model_folder: Path, work: Path) -> None:
    """Writes both heads into `model_folder`, in the precision of its weights."""
    weights = load_file(model_folder / "model.safetensors")
    dtype = weights["model.norm.weight"].dtype
    # A head of another depth may be there from an earlier run.
    backbone = {name: value for name, value in weights.items() if not name.startswith("mrp.")}
    head = load_file(work / "residual_head" / "mrp_head.safetensors")
    backbone.update({f"mrp.{name}": value.to(dtype) for name, value in head.items()})
    save_file(backbone, model_folder / "model.safetensors", metadata={"format": "pt"})
    description = json.loads((work / "residual_head" / "mrp_head.json").read_text())["head"]
    config = json.loads((model_folder / "config.json").read_text())
    config.update({name: description[name] for name in ("num_nextn_predict_layers", "head_prediction")})
    (model_folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    model = MRPForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    load_head(model, work / "direct_head")
    save_head(model, model_folder, "sdar-tiny-mrp", name=_DIRECT_HEAD, dtype=dtype)
