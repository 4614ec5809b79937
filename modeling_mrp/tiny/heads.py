"""The tiny recipe's heads: `heads.yaml` run by `mrp-train`, once as it is and once as the direct-MTP control.

`ablation.py` compares the recipe's variants.
"""

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
PROBLEMS = 1600
_MAX_NEW_TOKENS = 72
_BATCH = 64
# The backbone's training stream counts its steps from 0; no step of it ever reaches this seed.
_SEED = 10_000_000
_DIRECT_HEAD = "direct_head"


def train_heads(
    model_folder: Path, work: Path, steps: int | None = None, seed: int = 0, count: int = PROBLEMS
) -> None:
    """Trains both heads on the backbone in `model_folder` and puts them there.

    The residual head goes into `model.safetensors` (keys `mrp.*`) and `config.json`; the direct head into
    `direct_head.safetensors` and `.json`, for `from_pretrained(..., mrp_head=".../direct_head.safetensors")`.

    Args:
        model_folder: backbone, tokenizer and config.
        work: folder for the recording, checkpoints and finished heads; what is there is used or continued.
        steps: training steps of each head, default as in `heads.yaml`.
        seed: of data and initialisation.
        count: problems whose trajectories are recorded.
    """
    data = write_trajectories(model_folder, work / "trajectories.jsonl", count)
    for prediction in ("residual", "direct"):
        folder = work / f"{prediction}_head"
        if (folder / "mrp_head.safetensors").exists():
            continue
        overrides = [*recipe_overrides(model_folder, data, folder), f"head.prediction={prediction}"]
        overrides += [f"trainer.seed={seed}"] + ([] if steps is None else [f"trainer.max_steps={steps}"])
        train(load_config(RECIPE, overrides), resume=True)
    install_heads(model_folder, work)


def recipe_overrides(model_folder: Path, data: Path, output: Path) -> list[str]:
    """Overrides of `heads.yaml` that name the files."""
    names = {"output": output, "model.path": model_folder, "data.train": data, "data.recorded_states": states_of(data)}
    return [f"{name}={path}" for name, path in names.items()]


def states_of(data: Path) -> Path:
    """The folder of hidden states beside a file of trajectories."""
    return data.with_name(data.name + ".states")


def write_trajectories(model_folder: Path, output: Path, count: int = PROBLEMS) -> Path:
    """Lets the backbone answer `count` problems of the training stream, unless `output` is there; returns it."""
    if output.exists():
        return output
    output.parent.mkdir(parents=True, exist_ok=True)
    prompts = output.with_name("prompts.jsonl")
    write_prompts(prompts, count)
    record_trajectories(
        str(model_folder), str(prompts), output, _MAX_NEW_TOKENS, _BATCH, hidden_states=states_of(output)
    )
    return output


def write_prompts(output: Path, count: int) -> None:
    """Writes `count` problems of the training stream, one `prompt` a row."""
    chosen = islice(problems("train", _SEED), count)
    output.write_text("".join(json.dumps({"prompt": problem.question}) + "\n" for problem in chosen))


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
