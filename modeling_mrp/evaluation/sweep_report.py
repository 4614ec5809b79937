"""The table and the quality/speed plot of a sweep, from the rows of its CSV."""

from collections import defaultdict
from pathlib import Path

Row = dict[str, str]

# The curve that every other one has to beat (`expand` in `sweep.py` names series by their settings).
BASELINE = "none low_confidence_dynamic"
_TABLE = (
    ("series", "{}"), ("label", "{}"), ("quality", "{:.4f}"), ("quality_stderr", "{:.4f}"), ("documents", "{}"),
    ("tokens_per_forward", "{:.3f}"), ("tokens_per_second", "{:.1f}"),
)  # fmt: skip


def write_table(rows: list[Row], path: Path) -> None:
    """A Markdown table, with the hardware and versions that the figures come from."""
    lines = ["| " + " | ".join(name for name, _ in _TABLE) + " |", "|" + " --- |" * len(_TABLE)]
    for row in rows:
        lines.append("| " + " | ".join(_cell(row[name], form) for name, form in _TABLE) + " |")
    lines += ["", *_origin(rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_plot(rows: list[Row], path: Path) -> None:
    """Quality over tokens per forward and over tokens per second; one curve a series, plain thresholds dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    series = defaultdict(list)
    for row in rows:
        series[row["series"]].append(row)
    figure, axes = plt.subplots(1, 2, figsize=(13, 5.5), sharey=True)
    for axis, speed in zip(axes, ("tokens_per_forward", "tokens_per_second"), strict=True):
        for name, points in series.items():
            ordered = sorted(points, key=lambda row: float(row[speed]))
            x = [float(row[speed]) for row in ordered]
            y = [float(row["quality"]) for row in ordered]
            errors = [float(row["quality_stderr"]) if _is_number(row["quality_stderr"]) else 0.0 for row in ordered]
            is_baseline = name == BASELINE
            axis.errorbar(
                x, y, yerr=errors, label=f"{name} (baseline)" if is_baseline else name, marker="o", capsize=2,
                linestyle="--" if is_baseline else "-", color="black" if is_baseline else None,
            )  # fmt: skip
            for row, left, height in zip(ordered, x, y, strict=True):
                axis.annotate(row["label"], (left, height), textcoords="offset points", xytext=(4, 4), fontsize=7)
        axis.set_xlabel(speed.replace("_", " "))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(rows[0]["metric"].partition(",")[0].replace("_", " ") if rows else "quality")
    axes[1].legend(fontsize=8)
    figure.suptitle("\n".join(_origin(rows)), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _origin(rows: list[Row]) -> list[str]:
    """Where the figures were measured: one line per distinct origin."""
    origins = dict.fromkeys(
        f"{row['model']}; task {row['task']}; batch {row['batch_size']}; {row['device']}; {row['dtype']}; "
        f"{row['versions']}"
        for row in rows
    )
    return list(origins)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _cell(text: str, form: str) -> str:
    return form.format(float(text)) if form != "{}" and _is_number(text) else text
