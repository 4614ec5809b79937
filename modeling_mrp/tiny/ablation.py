"""What matters in training a head, measured on the tiny task: `mrp-train ablate` writes a table and a plot.

Every variant changes one thing of the recipe in `heads.yaml` and is trained for the same number of steps on the same
recorded trajectories; all are measured on the same held-out problems.
"""

import json
import platform
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from ..head_artifact import load_head
from ..modeling_mrp import MRPForCausalLM
from ..training.config import load_config
from ..training.draft_traces import collect_traces, fit_calibration
from ..training.run import train
from .heads import RECIPE, recipe_overrides, write_trajectories
from .task import Problem, is_correct, problems
from .tokenizer import build_tokenizer

# The backbone runs where the states of a variant are not those of the recording.
_LIVE = ["objective.layout=shared", "data.recorded_states=null"]
VARIANTS: dict[str, list[str]] = {
    "recipe": [],
    "direct MTP": ["head.prediction=direct"],
    "K = 1": ["objective.steps=1"],
    "K = 2": ["objective.steps=2"],
    "depth 1": ["head.layers=1"],
    "depth 2": ["head.layers=2"],
    "depth 4": ["head.layers=4"],
    "init: identity": ["head.initialization=identity"],
    "init: backbone": ["head.initialization=backbone"],
    "no certainty loss": ["objective.certainty_weight=0"],
    "revealed places unsupervised": ["objective.supervise_revealed=0"],
    "1 to 3 reveals per step": ["objective.reveals=[1, 3]"],
    "reveals: ground truth": [*_LIVE, "objective.reveal_rule=ground_truth"],
    "reveals: confident": [*_LIVE, "objective.reveal_rule=confident"],
    "reveals: drafted": [*_LIVE, "objective.reveal_rule=drafted"],
    "published": [
        *_LIVE, "objective.steps=1", "objective.reveal_rule=ground_truth", "objective.noise_level=sample",
        "objective.weighting=inverse_rate", "objective.supervise_revealed=0", "objective.certainty_weight=0",
        "head.deviation=0.2",
    ],
}  # fmt: skip
_DRAFT_STATES = 8
_RULES = ("confidence", "cross")
_ORDERS = {"published": 0.0, "stable": 0.01}
_BATCH = 50
_MAX_NEW_TOKENS = 80
_CALIBRATION_SEED, _CALIBRATION_PROBLEMS = 3, 30


def ablate(
    model_folder: Path, work: Path, steps: int, count: int, only: list[str] | None = None
) -> list[dict[str, Any]]:
    """Trains and measures the variants, skipping those that `work` already holds; writes `ablation.md` and `.png`.

    Args:
        model_folder: the tiny model's folder.
        work: folder for everything that is written.
        steps: of training, per variant.
        count: held-out problems.
        only: names of variants, default all.
    """
    write_trajectories(model_folder, work / "trajectories.jsonl")
    results = work / "results.jsonl"
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    done = {row["variant"] for row in rows}
    chosen = [name for name in VARIANTS if not only or name in only]
    bar = tqdm([name for name in ["no head", *chosen] if name not in done], desc="variants")
    for name in bar:
        bar.set_postfix_str(name)
        row = {"variant": name, **_measure_variant(name, model_folder, work, steps, count)}
        rows.append(row)
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
    _write_table(rows, work / "ablation.md", model_folder, steps, count)
    _write_plot(rows, work / "ablation.png")
    return rows


def _measure_variant(name: str, model_folder: Path, work: Path, steps: int, count: int) -> dict[str, Any]:
    model = MRPForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    if name == "no head":
        return measure_head(model, count, drafter="zero")
    folder = work / name.replace(" ", "_").replace(":", "").replace("=", "").replace(",", "")
    if not (folder / "mrp_head.safetensors").exists():
        paths = recipe_overrides(model_folder, work / "trajectories.jsonl", folder)
        quiet = [f"trainer.max_steps={steps}", "trainer.save_strategy='no'", "trainer.disable_tqdm=true"]
        train(load_config(RECIPE, [*paths, *quiet, *VARIANTS[name]]))
    load_head(model, folder)
    # Every head drafts by what its own drafts are worth.
    tokenizer = build_tokenizer()
    traced = islice(problems("held-out", _CALIBRATION_SEED), _CALIBRATION_PROBLEMS)
    prompts = [_inputs([problem], tokenizer)["input_ids"][0] for problem in traced]
    model.config.draft_calibration = fit_calibration(collect_traces(model.eval(), prompts, _MAX_NEW_TOKENS))
    return measure_head(model, count, drafter="head")


@torch.no_grad()
def measure_head(model: Any, count: int, drafter: str = "head", seed: int = 0) -> dict[str, Any]:
    """Accuracy in direct mode at K = 1..4, lossless tokens per forward in both orders, and remasking at tau 0.5, 0.6.

    Args:
        model: with a head, or any with `drafter="zero"`.
        count: held-out problems of stream `seed`.
    """
    model.eval()
    chosen = list(islice(problems("held-out", seed), count))
    row: dict[str, Any] = {}
    for k in (1, 2, 3, 4):
        result = _decode(model, chosen, mrp_mode="direct", mrp_steps=k, drafter=drafter)
        row[f"direct_{k}"], row[f"direct_{k}_tokens_per_forward"] = result
    for name, resolution in _ORDERS.items():
        speculative = _decode(
            model, chosen, mrp_mode="speculative", draft_states=_DRAFT_STATES, drafter=drafter,
            confidence_resolution=resolution,
        )  # fmt: skip
        row[f"{name}_accuracy"], row[f"{name}_tokens_per_forward"] = speculative
    if drafter == "zero":
        for tau in (0.5, 0.6, 0.7, 0.8, 0.9):
            row[f"dynamic_{tau}"] = _decode(
                model, chosen, mrp_mode="none", remasking_strategy="low_confidence_dynamic", confidence_threshold=tau
            )
        return row
    for rule in _RULES:
        for tau in (0.5, 0.6):
            row[f"remask_{rule}_{tau}"] = _decode(
                model, chosen, mrp_mode="remask", remask_rule=rule, confidence_threshold=tau
            )
    return row


def _decode(model: Any, chosen: list[Problem], **options: Any) -> tuple[float, float]:
    """(accuracy, tokens per backbone forward) over the problems."""
    tokenizer = build_tokenizer()
    right, tokens, forwards = 0, 0, 0
    for begin in range(0, len(chosen), _BATCH):
        part = chosen[begin : begin + _BATCH]
        inputs = _inputs(part, tokenizer)
        output = model.generate(**inputs, max_new_tokens=_MAX_NEW_TOKENS, return_dict_in_generate=True, **options)
        texts = tokenizer.batch_decode(output.sequences[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(is_correct(text, problem) for text, problem in zip(texts, part, strict=True))
        tokens += int(output.new_tokens.sum())
        forwards += int(output.backbone_forwards.sum())
    return right / len(chosen), tokens / forwards


def _inputs(chosen: list[Problem], tokenizer: Any) -> Any:
    chats = [[{"role": "user", "content": problem.question}] for problem in chosen]
    return tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )


def at_equal_speed(tokens_per_forward: float, dynamic: dict[float, tuple[float, float]]) -> float:
    """Accuracy of plain dynamic decoding at so many tokens per forward, interpolated between its thresholds."""
    points = sorted((speed, accuracy) for accuracy, speed in dynamic.values())
    for (speed0, accuracy0), (speed1, accuracy1) in pairwise(points):
        if speed0 <= tokens_per_forward <= speed1:
            share = (tokens_per_forward - speed0) / (speed1 - speed0)
            return accuracy0 + share * (accuracy1 - accuracy0)
    return points[0][1] if tokens_per_forward < points[0][0] else points[-1][1]


def _write_table(rows: list[dict[str, Any]], file: Path, model_folder: Path, steps: int, count: int) -> None:
    base = next(row for row in rows if row["variant"] == "no head")
    dynamic = {tau: base[f"dynamic_{tau}"] for tau in (0.5, 0.6, 0.7, 0.8, 0.9)}
    lines = [
        "# Ablation of head training on the tiny task",
        "",
        f"{steps} training steps per variant, {count} held-out problems, static accuracy "
        f"{base['published_accuracy']:.1%} (standard error about {(0.09 / count) ** 0.5:.1%} near 90 %). Speculative: "
        f"lossless tokens per forward, lattice of {_DRAFT_STATES} states, every forward counted, in the published and "
        "in the stable order (confidence_resolution 0.01), and what the head adds over drafting without one. Remask: "
        "points of accuracy against plain dynamic decoding at equal tokens per forward (interpolated between its "
        "thresholds). Each variant changes one thing of `modeling_mrp/tiny/heads.yaml`; `published` sets the "
        "published objective and start. "
        f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}; made by "
        f"`mrp-train ablate {model_folder} --output {file.parent} --steps {steps} --problems {count}`.",
        "",
        "| variant | direct K=1 | K=2 | K=3 | K=4 | published order | stable order "
        "| confidence .5 / .6 | cross .5 / .6 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        direct = [f"{100 * row[f'direct_{k}']:.1f}" for k in (1, 2, 3, 4)]
        speeds = []
        for order in _ORDERS:
            speed, plain = (r[f"{order}_tokens_per_forward"] for r in (row, base))
            speeds.append(f"{speed:.2f} ({100 * (speed / plain - 1):+.1f} %)")
        remask = ["", ""]
        if row is not base:
            remask = [" / ".join(_remask_gain(row, rule, tau, dynamic) for tau in (0.5, 0.6)) for rule in _RULES]
        lines.append(f"| {' | '.join([row['variant'], *direct, *speeds, *remask])} |")
    file.write_text("\n".join([*lines, ""]))


def _remask_gain(row: dict[str, Any], rule: str, tau: float, dynamic: dict[float, tuple[float, float]]) -> str:
    accuracy, speed = row[f"remask_{rule}_{tau}"]
    return f"{100 * (accuracy - at_equal_speed(speed, dynamic)):+.1f}"


def _write_plot(rows: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 0.35 * len(rows) + 2), sharey=True)
    names = [row["variant"] for row in rows][::-1]
    for k in (1, 2, 3, 4):
        left.plot([100 * row[f"direct_{k}"] for row in rows][::-1], names, "o", label=f"K = {k}")
    left.set_xlabel("accuracy in direct mode, %")
    left.legend()
    for order in _ORDERS:
        right.plot([row[f"{order}_tokens_per_forward"] for row in rows][::-1], names, "o", label=f"{order} order")
    right.legend()
    right.set_xlabel(f"lossless tokens per forward, {_DRAFT_STATES} states")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
