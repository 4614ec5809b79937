"""Rebuilds the tiny model: tokenizer, backbone, heads, and the folder that ships them.

    python -m modeling_mrp.tiny build --out build/sdar-tiny-mrp

Every stage leaves a checkpoint in `OUT/work` and is skipped or continued when it is run again.
"""

import os
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import save_file

from ..generation_config_mrp import MRPGenerationConfig
from ..hub.remote_code import AUTO_MAP, code_files, copy_code
from .backbone import STEPS, accuracy, tiny_config, train_backbone
from .heads import PROBLEMS, train_heads, write_prompts
from .tokenizer import build_tokenizer

app = typer.Typer(add_completion=False, help="The tiny model's recipe.")


@app.callback()
def recipe() -> None:
    """The tiny model's recipe."""


@app.command()
def build(
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    steps: Annotated[int, typer.Option(min=1, help="Training steps of the backbone.")] = STEPS,
    head_steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps of each head; default as in heads.yaml.")
    ] = None,
    count: Annotated[int, typer.Option(min=24, help="Problems whose states the heads train on.")] = PROBLEMS,
    seed: Annotated[int, typer.Option(help="Seed of everything.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    compiled: Annotated[bool, typer.Option(help="Use torch.compile, which pays after some hundred steps.")] = True,
    copy: Annotated[bool, typer.Option(help="Copy the modelling code into the folder.")] = True,
) -> None:
    """Trains backbone and heads (about an hour on two cores) and writes a folder that loads as it stands."""
    torch.set_num_threads(threads)
    work = out / "work"
    model = train_backbone(work, steps, seed, compiled)
    write_backbone(model, out)
    if copy:
        copy_code(out)
    typer.echo(f"static accuracy on 100 held-out problems: {accuracy(model, 100):.1%}")
    train_heads(out, work, head_steps, seed, count)


@app.command()
def link(
    folder: Annotated[Path, typer.Option(help="Model folder inside this repository.")] = Path(
        "hub_configs/sdar-tiny-mrp"
    ),
) -> None:
    """Makes the links from a model folder to the modelling code, so that there is one source of it."""
    for file in code_files():
        target = folder / file.name
        target.unlink(missing_ok=True)
        target.symlink_to(os.path.relpath(file, folder.resolve()))


@app.command()
def prompts(
    output: Annotated[Path, typer.Argument(help="jsonl file to write, with the column prompt.")],
    count: Annotated[int, typer.Option(min=1, help="Problems of the training stream.")] = 400,
) -> None:
    """Writes problems of the tiny task, to try mrp-train on."""
    write_prompts(output, count)


def write_backbone(model: torch.nn.Module, out: Path) -> None:
    """Writes tokenizer, configs and the backbone's weights in half precision; the heads' stage adds the head."""
    out.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save_pretrained(out)
    config = tiny_config()
    config.architectures = ["MRPForCausalLM"]
    config.auto_map = AUTO_MAP
    config.dtype = torch.float16
    config.save_pretrained(out)
    generation = MRPGenerationConfig(
        mrp_mode="speculative", do_sample=False, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    generation.save_pretrained(out)
    weights = {
        name: parameter.detach().to(torch.float16).contiguous()
        for name, parameter in model.state_dict().items()
        if not name.startswith("mrp.") and name != "lm_head.weight"
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """Entry point."""
    app()
