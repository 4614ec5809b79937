"""The command `mrp-train`."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from transformers.utils import logging

from .errors import TrainingError

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False, no_args_is_help=True)


@app.command("run")
def run(
    config: Annotated[Path, typer.Argument(help="YAML file: output, model, head, objective, data, trainer, save.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.name=value, e.g. objective.steps=2 trainer.max_steps=100")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Continue from the last checkpoint in the output folder.")] = False,
) -> None:
    """Train a head. `mrp-train CONFIG ...` is short for `mrp-train run CONFIG ...`.

    Starts under python, torchrun and accelerate launch alike. All names and values of the configuration are listed in
    docs/training.md, and `mrp-train options` prints them.
    """
    from .config import load_config
    from .run import train

    logging.set_verbosity_info() if resume else None
    train(load_config(config, overrides or []), resume)


@app.command("record")
def record(
    model: Annotated[str, typer.Argument(help="Backbone: folder or Hub id.")],
    data: Annotated[str, typer.Argument(help="jsonl or parquet with prompts (columns prompt, or messages).")],
    output: Annotated[Path, typer.Argument(help="jsonl file to write: input_ids, labels, reveal_order.")],
    max_new_tokens: Annotated[int, typer.Option(help="Per sample.")] = 512,
    batch_size: Annotated[int, typer.Option(help="Rows decoded together.")] = 32,
    limit: Annotated[int | None, typer.Option(help="Use only so many rows.")] = None,
    hidden_states: Annotated[
        bool, typer.Option(help="Also keep the backbone's hidden states, in OUTPUT.states, for layout: recorded.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
) -> None:
    """Let the backbone write the answers itself and note the order of its reveals, to train on what decoding meets."""
    from .record import record_trajectories

    states = output.with_name(output.name + ".states") if hidden_states else None
    record_trajectories(model, data, output, max_new_tokens, batch_size, limit, states, dtype, device)


@app.command("calibrate")
def calibrate(
    model: Annotated[
        Path, typer.Argument(help="Folder of a model with a head, or with a head-only artefact (--head).")
    ],
    data: Annotated[str, typer.Argument(help="jsonl or parquet with prompts (columns prompt, or messages).")],
    head: Annotated[Path | None, typer.Option(help="Folder of a head-only artefact, to calibrate instead.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Per prompt.")] = 256,
    limit: Annotated[int, typer.Option(help="Prompts to use.")] = 100,
    passes: Annotated[
        int, typer.Option(min=1, help="Head passes per draft to fit (up to a lattice's mrp_steps).")
    ] = 3,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
) -> None:
    """Fit how far drafts fall from the backbone, and write it into config.json (or mrp_head.json): better lattices."""
    from .calibrate import calibrate_folder

    calibrate_folder(model, data, head, max_new_tokens, limit, passes, dtype, device)


@app.command("ablate")
def ablate(
    model: Annotated[Path, typer.Argument(help="Folder of the tiny model.")],
    output: Annotated[Path, typer.Option(help="Folder for heads, results, table and plot; continues what is there.")],
    steps: Annotated[int, typer.Option(help="Training steps per variant.")] = 200,
    problems: Annotated[int, typer.Option(help="Held-out problems.")] = 200,
    variant: Annotated[list[str] | None, typer.Option(help="Only this variant; may be repeated.")] = None,
) -> None:
    """Compare residual and direct heads, depths, K, reveal rules and initialisations on the tiny task."""
    from ..tiny.ablation import ablate as run_ablation

    run_ablation(model, output, steps, problems, variant)


@app.command("options")
def options() -> None:
    """Print every name of the configuration with its default and meaning."""
    from .config import describe_options

    Console(soft_wrap=True, markup=False, highlight=False).print(describe_options())


def main() -> None:
    """Entry point; a `TrainingError` becomes its message and exit status 1."""
    names = {command.name for command in app.registered_commands}
    if len(sys.argv) > 1 and sys.argv[1] not in names and not sys.argv[1].startswith("-"):
        sys.argv.insert(1, "run")
    try:
        app()
    except TrainingError as error:
        Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(f"error: {error}")
        sys.exit(1)
