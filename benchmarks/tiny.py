"""The shipped tiny model on held-out problems: what `hub_configs/sdar-tiny-mrp` can do in every mode.

    python -m benchmarks.tiny [--count 400]

Writes `benchmarks/results/tiny.md`. The held-out seed is one that neither training nor any choice of settings used.
"""

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm

from benchmarks.report import provenance, table, write
from benchmarks.workload import TINY_MODEL, Measurement, Workload, standard_error
from modeling_mrp import MRPForCausalLM

SEED = 1
TAUS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
RULES = ("confidence", "veto", "cross")


def direct_mtp_model(folder: Path) -> MRPForCausalLM:
    """The tiny backbone with the direct-MTP control head of the same size."""
    head = str(folder / "direct_head.safetensors")
    return MRPForCausalLM.from_pretrained(folder, mrp_head=head, dtype=torch.float32).eval()


def main(
    count: Annotated[int, typer.Option(min=1, help="Held-out problems.")] = 400,
    model: Annotated[Path, typer.Option(help="Folder of the model.")] = TINY_MODEL,
) -> None:
    """Measures and writes the report."""
    workload = Workload(model, count, SEED)
    runs: dict[str, dict[str, Any]] = {"static": {"mrp_mode": "none"}, "speculative": {"mrp_mode": "speculative"}}
    for k in (1, 2, 3, 4):
        runs[f"no head K={k}"] = {"mrp_mode": "direct", "mrp_steps": k, "drafter": "zero"}
        runs[f"MRP K={k}"] = {"mrp_mode": "direct", "mrp_steps": k}
        runs[f"direct MTP K={k}"] = {"mrp_mode": "direct", "mrp_steps": k, "direct_head": True}
    for tau in TAUS:
        runs[f"dynamic tau={tau}"] = {
            "mrp_mode": "none", "remasking_strategy": "low_confidence_dynamic", "confidence_threshold": tau,
        }  # fmt: skip
        for rule in RULES:
            extra = {"remask_delta": 1.0} if rule == "veto" else {}
            runs[f"remask {rule} tau={tau}"] = {
                "mrp_mode": "remask", "remask_rule": rule, "confidence_threshold": tau, **extra,
            }  # fmt: skip
    control = direct_mtp_model(model)
    rows: dict[str, Measurement] = {}
    for name, options in tqdm(runs.items(), desc="runs"):
        use_control = options.pop("direct_head", False)
        rows[name] = workload.run(control if use_control else workload.model, **options)
    write("tiny.md", _report(workload, rows, count))


def _report(workload: Workload, rows: dict[str, Measurement], count: int) -> str:
    static = rows["static"]
    same = sum(a == b for a, b in zip(static.ids, rows["speculative"].ids, strict=True))
    loss = static.accuracy - rows["no head K=3"].accuracy
    gain = rows["MRP K=3"].accuracy - rows["no head K=3"].accuracy
    best = max(RULES, key=lambda rule: rows[f"remask {rule} tau=0.5"].accuracy)
    remask = rows[f"remask {best} tau=0.5"].accuracy - rows["dynamic tau=0.5"].accuracy
    points = 100.0
    targets = [
        ["static accuracy", f"{static.accuracy:.1%}", "at least 88 %", static.accuracy >= 0.88],
        ["speculative identical to static", f"{same} of {count}", "all", same == count],
        ["static minus no head at K=3", f"{points * loss:+.1f} points", "at least 15", loss >= 0.15],
        ["MRP head minus no head at K=3", f"{points * gain:+.1f} points", "at least 8", gain >= 0.08],
        [f"remask ({best}) minus dynamic at tau 0.5", f"{points * remask:+.1f} points", "above 0", remask > 0],
    ]
    text = [
        "# The tiny model on held-out problems",
        "",
        provenance(f"{workload.path.name} (float32)", f"{count} held-out problems, seed {SEED}, greedy"),
        "",
        table(["what", "measured", "target", "holds"], [[*t[:3], "yes" if t[3] else "**no**"] for t in targets]),
        "",
        "## K unverified tokens per forward",
        "",
        "Difference: MRP minus direct MTP on the same problems, with its 95 % confidence interval (paired).",
        "",
        table(
            ["K", "tokens / forward", "no head", "direct MTP", "MRP", "MRP - direct MTP"],
            [_direct_row(rows, k, count) for k in (1, 2, 3, 4)],
        ),
        "",
        "## Thresholds and remasking",
        "",
        "`at equal speed` compares a rule with plain dynamic decoding interpolated at the same tokens per forward.",
        "",
        table(
            ["tau", "dynamic", *(f"{rule}: accuracy (tokens / forward), at equal speed" for rule in RULES)],
            [_remask_row(rows, tau) for tau in TAUS],
        ),
    ]
    return "\n".join(text)


def _direct_row(rows: dict[str, Measurement], k: int, count: int) -> list[str]:
    mrp, control, none = rows[f"MRP K={k}"], rows[f"direct MTP K={k}"], rows[f"no head K={k}"]
    paired = torch.tensor(mrp.right).float() - torch.tensor(control.right).float()
    error = 1.96 * float(paired.std()) / count**0.5
    accuracies = [f"{m.accuracy:.1%} ± {standard_error(m.accuracy, count):.1%}" for m in (none, control, mrp)]
    return [
        str(k),
        f"{mrp.tokens_per_forward:.2f}",
        *accuracies,
        f"{100 * float(paired.mean()):+.1f} ± {100 * error:.1f}",
    ]


def _remask_row(rows: dict[str, Measurement], tau: float) -> list[str]:
    plain = rows[f"dynamic tau={tau}"]
    cells = [str(tau), f"{plain.accuracy:.1%} ({plain.tokens_per_forward:.2f})"]
    for rule in RULES:
        row = rows[f"remask {rule} tau={tau}"]
        equal = interpolate(rows, row.tokens_per_forward)
        difference = "beyond" if equal is None else f"{100 * (row.accuracy - equal):+.1f}"
        cells.append(f"{row.accuracy:.1%} ({row.tokens_per_forward:.2f}), {difference}")
    return cells


def interpolate(rows: dict[str, Measurement], speed: float) -> float | None:
    """Accuracy of plain dynamic decoding at `speed` tokens per forward, linear between its measured thresholds."""
    points = sorted((rows[f"dynamic tau={t}"].tokens_per_forward, rows[f"dynamic tau={t}"].accuracy) for t in TAUS)
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= speed <= x1:
            return y0 + (y1 - y0) * (speed - x0) / max(x1 - x0, 1e-9)
    return None


if __name__ == "__main__":
    typer.run(main)
