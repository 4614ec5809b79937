"""`mrp-trace`: shows in which backbone forward each token was revealed, and by what.

mrp-trace "Mia has 12 apples. Mia buys 5 more. How many apples does Mia have now?" --mode direct --steps 2
mrp-trace "..." --picture trace.png
"""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .demo import TINY_MODEL

_COLOURS = ("red", "yellow", "green", "cyan", "blue", "magenta")


def trace(
    prompt: Annotated[str, typer.Argument(help="A question; rendered by the model's chat template.")],
    model: Annotated[str, typer.Option(help="Folder or repository id of an MRP model.")] = str(TINY_MODEL),
    mode: Annotated[str, typer.Option(help="none, speculative, direct or remask.")] = "speculative",
    steps: Annotated[int | None, typer.Option(help="mrp_steps.")] = None,
    threshold: Annotated[float | None, typer.Option(help="confidence_threshold.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 80,
    picture: Annotated[Path | None, typer.Option(help="Also write a PNG (needs matplotlib).")] = None,
) -> None:
    """Decodes one prompt and prints its tokens by the forward that revealed them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, trust_remote_code=True, dtype=torch.float32).eval()
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    options = {"mrp_mode": mode, "mrp_steps": steps, "confidence_threshold": threshold, "output_trace": True}
    output = network.generate(**inputs, max_new_tokens=max_new_tokens, return_dict_in_generate=True, **options)
    begin = inputs["input_ids"].shape[1]
    tokens = tokenizer.convert_ids_to_tokens(output.sequences[0, begin:].tolist())
    step, source = output.reveal_step[0, begin:].tolist(), output.reveal_source[0, begin:].tolist()
    console = Console()
    console.print(_text(tokens, step))
    console.print(_table(tokens, step, source, output))
    if picture is not None:
        _draw(tokens, step, source, network.config.block_size, begin, picture)
        console.print(f"written to {picture}")


def _text(tokens: list[str], step: list[int]) -> Text:
    text = Text()
    for token, forward in zip(tokens, step, strict=True):
        text.append(token, style=_COLOURS[forward % len(_COLOURS)])
    return text


def _table(tokens: list[str], step: list[int], source: list[int], output: Any) -> Table:
    """One row per forward: what it revealed, from left to right; head picks carry their step."""
    title = f"{output.total_forwards} backbone forwards, {output.tokens_per_forward[0]:.2f} tokens per forward"
    table = Table(title=title)
    table.add_column("forward", justify="right")
    table.add_column("revealed")
    for forward in range(output.total_forwards):
        shown = [
            repr(token) + (f" (head {k})" if k > 0 else "")
            for token, at, k in zip(tokens, step, source, strict=True)
            if at == forward
        ]
        table.add_row(str(forward), "  ".join(shown))
    return table


def _draw(tokens: list[str], step: list[int], source: list[int], block: int, begin: int, path: Path) -> None:
    """Position against forward; block borders are lines, head picks triangles."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(max(6, 0.22 * len(tokens)), 5))
    for marker, chosen in (("o", [k == 0 for k in source]), ("^", [k > 0 for k in source])):
        places = [i for i, wanted in enumerate(chosen) if wanted]
        axes.scatter(places, [step[i] for i in places], marker=marker, label="backbone" if marker == "o" else "head")
    for position in range(len(tokens)):
        if (begin + position) % block == 0:
            axes.axvline(position - 0.5, color="grey", linewidth=0.5)
    axes.set_xticks(range(len(tokens)), [token.replace("\n", "\\n") for token in tokens], rotation=90, fontsize=7)
    axes.set_ylabel("backbone forward")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Entry point of `mrp-trace`."""
    typer.run(trace)


if __name__ == "__main__":
    main()
