"""Calibrates the draft model of `modeling_mrp/draft_lattice.py` on decoding traces of a model.

    python -m benchmarks.calibrate_drafts [--model FOLDER] [--drafter head] [--passes 1] [--write-default]

Fits what `mrp-train calibrate` fits (`modeling_mrp/training/draft_traces.py`) on held-out problems of the tiny task
and writes a report; `--write-default` makes it the package's default.
"""

import pprint
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from benchmarks.report import provenance, table, write
from benchmarks.workload import MAX_NEW_TOKENS, TINY_MODEL, Workload
from modeling_mrp.training.draft_traces import LEVELS, QUANTILES, collect_traces, fit_calibration

SEED = 3
DEFAULT = Path(__file__).resolve().parent.parent / "modeling_mrp" / "draft_calibration.py"
_DEFAULT_HEADER = '''"""Calibration of the drafts on the tiny model, for models that bring none of their own.

Written by `python -m benchmarks.calibrate_drafts --write-default`; see `DraftCalibration` in `draft_lattice.py`.
"""

# fmt: off
'''


def main(
    model: Annotated[Path, typer.Option(help="Folder of the model.")] = TINY_MODEL,
    count: Annotated[int, typer.Option(min=1, help="Problems to trace.")] = 100,
    drafter: Annotated[str, typer.Option(help="head or zero.")] = "head",
    passes: Annotated[int, typer.Option(min=1, help="Head passes per draft to fit.")] = 3,
    write_default: Annotated[bool, typer.Option(help="Make them the package's default.")] = False,
) -> None:
    """Fits and reports."""
    workload = Workload(model, count, SEED)
    prompts = [workload.prompt(problem) for problem in workload.problems]
    traces = collect_traces(workload.model, tqdm(prompts, desc="traces"), MAX_NEW_TOKENS, drafter, passes)
    fitted = fit_calibration(traces)
    bins = [f"up to {level:g}" for level in LEVELS] + [f"above {LEVELS[-1]:g}"]
    middle = QUANTILES // 2
    rows = [
        [number + 1, distance, name]
        + [f"{values[i]:+.2f}" for i in (2, middle // 2, middle, -1 - middle // 2, -3)]
        + [f"{flip:.1%}"]
        for number, (tables, rates) in enumerate(zip(fitted["quantiles"], fitted["flips"], strict=True))
        for distance, (table_, shares) in enumerate(zip(tables, rates, strict=True))
        for name, values, flip in zip(bins, table_, shares, strict=True)
    ]
    text = [
        f"# Calibration of the drafts ({drafter})",
        "",
        provenance(workload.path.name, f"{count} held-out problems, seed {SEED}, plain static decoding"),
        "",
        f"Share of the head in the drafted log-odds, by pass: {fitted['head_weights']}.",
        "",
        "Quantiles of (backbone's - drafted) log-odds, by head pass, by reveals behind the state that it predicts, "
        "and by drafted log-odds, "
        "and how often the backbone chooses another token.",
        "",
        table(
            ["head pass", "reveals on", "drafted log-odds", "12.5 %", "25 %", "50 %", "75 %", "87.5 %", "other token"],
            rows,
        ),
    ]
    write("calibration.md", "\n".join(text))
    if write_default:
        body = pprint.pformat(fitted, width=115, compact=True, sort_dicts=False)
        DEFAULT.write_text(_DEFAULT_HEADER + f"TINY_CALIBRATION: dict = {body}\n")


if __name__ == "__main__":
    typer.run(main)
