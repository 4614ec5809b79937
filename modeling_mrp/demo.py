"""`make demo`: the shipped tiny model in every decoding mode, side by side.

python -m modeling_mrp.demo                      a few held-out problems
python -m modeling_mrp.demo --prompt "..."       your own question
"""

import time
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from .tiny.task import is_correct, problems

MODES: dict[str, dict[str, Any]] = {
    "none (plain SDAR)": {"mrp_mode": "none"},
    "speculative (lossless)": {"mrp_mode": "speculative", "draft_states": 8},
    "direct, K = 1": {"mrp_mode": "direct", "mrp_steps": 1},
    "direct, K = 3": {"mrp_mode": "direct", "mrp_steps": 3},
    "dynamic, tau = 0.5": {
        "mrp_mode": "none",
        "remasking_strategy": "low_confidence_dynamic",
        "confidence_threshold": 0.5,
    },
    "remask, tau = 0.5": {"mrp_mode": "remask", "confidence_threshold": 0.5},
}
TINY_MODEL = Path(__file__).resolve().parent.parent / "hub_configs" / "sdar-tiny-mrp"
_HELD_OUT_SEED = 1


def main(
    prompt: Annotated[str | None, typer.Option(help="Your own question instead of held-out problems.")] = None,
    model: Annotated[str, typer.Option(help="Folder or repository id of an MRP model.")] = str(TINY_MODEL),
    count: Annotated[int, typer.Option(min=1, max=100, help="Held-out problems to solve.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 80,
) -> None:
    """Generates in every mode and shows text, correctness, backbone forwards, tokens per forward and time."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if model == str(TINY_MODEL):
        # So small that a second thread only waits for the first.
        torch.set_num_threads(1)
    console = Console()
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, trust_remote_code=True, dtype=torch.float32).eval()
    chosen = [] if prompt is not None else list(islice(problems("held-out", _HELD_OUT_SEED), count))
    questions = [prompt] if prompt is not None else [problem.question for problem in chosen]
    runs = [(name, options, index) for index in range(len(questions)) for name, options in MODES.items()]
    generate(network, tokenizer, questions[0], MODES["speculative (lossless)"], 8)  # warm-up, not shown
    results: dict[tuple[int, str], tuple[str, Any, float]] = {}
    for name, options, index in track(runs, description="Decoding", console=console, transient=True):
        results[index, name] = generate(network, tokenizer, questions[index], options, max_new_tokens)
    for index, question in enumerate(questions):
        table = Table(title=question, title_justify="left", show_lines=True)
        for column in ("mode", "text", "right", "forwards", "tokens / forward", "seconds", "same as none"):
            table.add_column(column, justify="left" if column in ("mode", "text") else "right")
        plain = results[index, next(iter(MODES))][1].sequences
        for name in MODES:
            text, output, seconds = results[index, name]
            right = "" if prompt is not None else ("yes" if is_correct(text, chosen[index]) else "no")
            same = output.sequences.shape == plain.shape and bool((output.sequences == plain).all())
            table.add_row(
                name, text.strip(), right, str(output.total_forwards), f"{output.tokens_per_forward[0]:.2f}",
                f"{seconds:.2f}", "yes" if same else "no",
            )  # fmt: skip
        console.print(table)
    total = {name: sum(results[i, name][1].total_forwards for i in range(len(questions))) for name in MODES}
    tokens = {name: sum(int(results[i, name][1].new_tokens[0]) for i in range(len(questions))) for name in MODES}
    summary = ", ".join(f"{name}: {tokens[name] / total[name]:.2f}" for name in MODES)
    console.print(f"Tokens per backbone forward over all of the above: {summary}")


def generate(
    network: Any, tokenizer: Any, question: str, options: dict[str, Any], max_new_tokens: int
) -> tuple[str, Any, float]:
    """Text, `MRPGenerateOutput` and seconds of one question under one decoding mode."""
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    begin = time.perf_counter()
    output = network.generate(**inputs, max_new_tokens=max_new_tokens, return_dict_in_generate=True, **options)
    seconds = time.perf_counter() - begin
    new = output.sequences[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True), output, seconds


if __name__ == "__main__":
    typer.run(main)
