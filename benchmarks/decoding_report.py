"""Turns the rows of `benchmarks.decoding` into a page with its targets, and a plot."""

from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.report import RESULTS, provenance, table, write
from benchmarks.workload import Workload, standard_error

# Issue 3's targets: (what, states or None, factor over the reference schedule's best K).
TARGET_8, TARGET_16, TARGET_8_STABLE = 1.6, 1.85, 1.9
TARGET_NONE = {16: 1.06, 8: 1.12, 4: 1.25}


def write_report(workload: Workload, rows: dict[str, Any], count: int) -> None:
    """Writes `decoding.md` and `decoding.png`."""
    best_name = max((n for n in rows if n.startswith("reference speculative")), key=lambda n: rows[n]["tpf"])
    best = rows[best_name]["tpf"]
    text = [
        "# Decoding: tokens per backbone forward",
        "",
        provenance(
            f"{workload.path.name} (float32)",
            f"{count} held-out problems of the tiny task, seed {workload.seed}, greedy",
        ),
        "",
        "Tokens are those returned (up to and with the end token); every backbone forward counts, prefill apart. The "
        "reference schedule is this project's re-implementation of the public one, whose counters it reproduces "
        "(`tests/test_reference_schedule.py`): it stores every finished block by a forward of its own, seeds every "
        "block, and finishes the block that holds the end token. Head passes are counted beside, not as forwards.",
        "",
        "## Targets",
        "",
        _targets(rows, best, best_name, count),
        "",
        "## All configurations",
        "",
        _rows(rows, best, count),
        "",
        "## Quality over speed",
        "",
        "![accuracy over tokens per forward](decoding.png)",
        "",
        _frontier(rows),
    ]
    write("decoding.md", "\n".join(text))
    _plot(rows, count)


def _targets(rows: dict[str, Any], best: float, best_name: str, count: int) -> str:
    def line(what: str, value: float, target: float) -> list[object]:
        return [what, f"{value:.2f}", f"{target:.2f}", "yes" if value >= target else "**no**"]

    stable = max(rows["lattice 8 head stable"]["tpf"], rows["chain K=7 head stable"]["tpf"])
    lines = [
        line("lattice of 8 states, head, over the reference's best", rows["lattice 8 head"]["tpf"] / best, TARGET_8),
        line(
            "lattice of 16 states, head, over the reference's best", rows["lattice 16 head"]["tpf"] / best, TARGET_16
        ),
        line(
            "8 states in the stable order, over the reference's best (published order)", stable / best, TARGET_8_STABLE
        ),
    ]
    for block, target in TARGET_NONE.items():
        ratio = rows[f"none block {block}"]["tpf"] / rows[f"reference static block {block}"]["tpf"]
        lines.append(line(f"none over the reference's static schedule, block {block}", ratio, target))
    for states in (4, 8, 16, 32):
        for order in ("", " stable"):
            ratio = rows[f"lattice {states} head{order}"]["tpf"] / rows[f"lattice {states} zero{order}"]["tpf"]
            lines.append(line(f"head over zero drafter, lattice of {states}{order}", ratio, 1.0))
    for k in (2, 3):
        for order in ("", " stable"):
            ratio = rows[f"lattice 8 head, {k} passes{order}"]["tpf"] / rows[f"lattice 8 zero{order}"]["tpf"]
            lines.append(line(f"head of {k} passes over zero drafter, lattice of 8{order}", ratio, 1.15))
    ratio = rows["chain K=7 head stable"]["tpf"] / rows["chain K=7 zero stable"]["tpf"]
    lines.append(line("head over zero drafter, chain of 8 stable", ratio, 1.15))
    for k in (1, 2, 3, 4, 5, 6):
        ratio = rows[f"chain K={k} head"]["tpf"] / rows[f"chain K={k} zero"]["tpf"]
        lines.append(line(f"head over zero drafter, chain K={k}", ratio, 1.0))
    lossless = [n for n in rows if n.startswith(("lattice", "chain", "reference s")) and "stable" not in n]
    lossless = [n for n in lossless if "block" not in n]
    equal = sum(rows[n]["equal_to_none"] for n in lossless)
    note = (
        f"\n\nThe reference's best is {best_name}: {best:.3f}. Lossless configurations equal mode `none` in "
        f"{equal} of {count * len(lossless)} decodings (published order). Accuracy of `none`: "
        f"{rows['none']['accuracy']:.1%}; in the stable order {rows['none stable']['accuracy']:.1%}."
    )
    return table(["what", "measured", "target", "holds"], lines) + note


def _rows(rows: dict[str, Any], best: float, count: int) -> str:
    lines = []
    for name, row in rows.items():
        error = standard_error(row["accuracy"], count)
        per = row["segments"] / row["forwards"] if row["segments"] else 0
        lines.append([
            name, f"{row['tpf']:.3f}", f"{row['tpf'] / best:.2f}", f"{row['accuracy']:.1%} ± {error:.1%}",
            f"{per:.1f}" if per else "", f"{row['head_passes'] / row['forwards']:.2f}", row["taken_back"] or "",
            f"{row['equal_to_none']}/{count}",
        ])  # fmt: skip
    header = ["configuration", "tokens / forward", "over reference's best", "accuracy", "segments / forward",
              "head passes / forward", "reveals taken back", "equal to none"]  # fmt: skip
    return table(header, lines)


def _frontier(rows: dict[str, Any]) -> str:
    """Where lossless decoding lies beside plain thresholds, up to the forwards that it reaches."""
    reach = max(rows[f"lattice {states} head"]["tpf"] for states in (4, 8, 16, 32))
    accuracy = rows["none"]["accuracy"]
    lines = []
    for name, row in rows.items():
        if name.startswith("dynamic"):
            within = row["tpf"] <= reach
            verdict = "yes" if accuracy >= row["accuracy"] else "**no**"
            lines.append([name, f"{row['tpf']:.2f}", f"{row['accuracy']:.1%}", verdict if within else "beyond reach"])
    head = f"Lossless decoding reaches {reach:.2f} tokens per forward at {accuracy:.1%}.\n\n"
    return head + table(["plain threshold", "tokens / forward", "accuracy", "lossless at or above it"], lines)


def _plot(rows: dict[str, Any], count: int) -> None:
    figure, axes = plt.subplots(figsize=(8, 5))
    groups = {
        "plain dynamic thresholds": ("dynamic", "o-"),
        "lossless lattice, head": ("lattice", "s-"),
        "reference schedule": ("reference speculative", "x"),
        "direct, head": ("direct", "^-"),
        "remask, confidence": ("remask confidence", "v:"),
        "remask, veto": ("remask veto", "<:"),
        "remask, cross": ("remask cross", ">:"),
    }
    for label, (prefix, style) in groups.items():
        names = [n for n in rows if n.startswith(prefix) and "zero" not in n and "stable" not in n]
        points = sorted((rows[n]["tpf"], rows[n]["accuracy"]) for n in names)
        axes.plot([p[0] for p in points], [100 * p[1] for p in points], style, label=label)
    axes.set_xlabel("tokens per backbone forward")
    axes.set_ylabel("accuracy, %")
    axes.set_title(f"Tiny model, {count} held-out problems")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(RESULTS / "decoding.png", dpi=120)
