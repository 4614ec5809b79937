"""The head stage of the tiny recipe: a residual head and a direct-MTP head of the same size, by `mrp-train`."""

import json
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ..head_artifact import load_head, save_head
from ..modeling_mrp import MRPForCausalLM
from ..training.config import load_config
from ..training.record import record_trajectories
from ..training.run import train
from .task import problems

RECIPE = Path(__file__).with_name("heads.yaml")
TRAJECTORIES = 4000
# The backbone's training stream counts its steps from 0; no step of it ever reaches this seed.
_SEED = 10_000_000
_DIRECT_HEAD = "direct_head"


def train_heads(model_folder: Path, work: Path, overrides: list[str] | None = None) -> None:
    """Trains both heads on the backbone in `model_folder` and puts them there.

    The residual head goes into `model.safetensors` (keys `mrp.*`) and `config.json`; the direct head into
    `direct_head.safetensors` and `.json`, for `from_pretrained(..., mrp_head=".../direct_head.safetensors")`.

    Args:
        model_folder: backbone, tokenizer and config.
        work: folder for data and checkpoints; an interrupted stage continues from what is there.
        overrides: further overrides of the recipe, as on the command line.
    """
    data = work / "trajectories.jsonl"
    if not data.exists():
        write_trajectories(model_folder, data)
    for prediction in ("residual", "direct"):
        folder = work / f"{prediction}_head"
        if not (folder / "mrp_head.safetensors").exists():
            paths = [f"output={folder}", f"model.path={model_folder}", f"data.train={data}"]
            train(load_config(RECIPE, [*paths, f"head.prediction={prediction}", *(overrides or [])]), resume=True)
    install_heads(model_folder, work)


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
