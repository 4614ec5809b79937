"""Tokens per backbone forward and accuracy of every decoding mode, beside the public reference's schedule.

    python -m benchmarks.decoding [--count 200] [--model FOLDER]

Writes `decoding.md`, `decoding.csv` and `decoding.png` into `benchmarks/results`. Every backbone forward counts,
prefill apart, for all of them. Interrupted, it continues from `decoding.partial.json`.
"""

import csv
import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm

from benchmarks.decoding_report import write_report
from benchmarks.reference_schedule import ReferenceSchedule
from benchmarks.report import RESULTS
from benchmarks.workload import MAX_NEW_TOKENS, TINY_MODEL, Measurement, Workload
from modeling_mrp.tiny.task import is_correct

TAUS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
STATES = (4, 8, 16, 32)
CHAIN_STEPS = (1, 2, 3, 4, 5, 6)
# Head passes per round of a lattice; one is the default.
PASSES = (2, 3)


def configurations() -> dict[str, dict[str, Any]]:
    """Every configuration by name, in the order of the report; keys starting with `reference` run the old schedule."""
    lossless = {"mrp_mode": "speculative"}
    dynamic = {"remasking_strategy": "low_confidence_dynamic"}
    found: dict[str, dict[str, Any]] = {"none": {"mrp_mode": "none"}}
    found["none stable"] = {"mrp_mode": "none", "confidence_resolution": 0.01}
    for block in (4, 8, 16):
        found[f"none block {block}"] = {"mrp_mode": "none", "block_length": block}
        found[f"reference static block {block}"] = {"reference": 0, "block_length": block}
    for k in CHAIN_STEPS:
        found[f"reference speculative K={k}"] = {"reference": k}
    for drafter in ("head", "zero"):
        for k in CHAIN_STEPS:
            found[f"chain K={k} {drafter}"] = {**lossless, "draft_shape": "chain", "mrp_steps": k, "drafter": drafter}
        for states in STATES:
            found[f"lattice {states} {drafter}"] = {**lossless, "draft_states": states, "drafter": drafter}
            found[f"lattice {states} {drafter} stable"] = {
                **lossless, "draft_states": states, "drafter": drafter, "confidence_resolution": 0.01,
            }  # fmt: skip
        found[f"chain K=7 {drafter} stable"] = {
            **lossless, "draft_shape": "chain", "mrp_steps": 7, "drafter": drafter, "confidence_resolution": 0.01,
        }  # fmt: skip
    for k in PASSES:
        for order, resolution in {"": 0.0, " stable": 0.01}.items():
            found[f"lattice 8 head, {k} passes{order}"] = {
                **lossless, "draft_states": 8, "mrp_steps": k, "confidence_resolution": resolution,
            }  # fmt: skip
    for drafter in ("head", "zero"):
        for k in (1, 2, 3, 4):
            found[f"direct K={k} {drafter}"] = {"mrp_mode": "direct", "mrp_steps": k, "drafter": drafter}
    for tau in TAUS:
        found[f"dynamic tau={tau}"] = {"mrp_mode": "none", **dynamic, "confidence_threshold": tau}
    for rule in ("confidence", "veto", "cross"):
        for tau in (0.3, 0.4, *TAUS):
            extra = {"remask_delta": 1.0} if rule == "veto" else {}
            found[f"remask {rule} tau={tau}"] = {
                "mrp_mode": "remask", "remask_rule": rule, "confidence_threshold": tau, **extra,
            }  # fmt: skip
    return found


def run_reference(workload: Workload, steps: int, block: int) -> Measurement:
    """The public schedule, one problem at a time."""
    result = Measurement([], 0, 0, 0, 0, 0, 0.0, [])
    eos = workload.model.config.eos_token_id
    for problem in workload.problems:
        prompt = workload.prompt(problem)
        counts = ReferenceSchedule(workload.model, block, steps).decode(prompt, MAX_NEW_TOKENS, (eos,))
        new = counts.ids[prompt.numel() :].tolist()
        new = new[: new.index(eos) + 1] if eos in new else new[:MAX_NEW_TOKENS]
        text = workload.tokenizer.decode(new, skip_special_tokens=True)
        result.right.append(is_correct(text, problem))
        result.ids.append(new)
        result.tokens += len(new)
        result.forwards += counts.forwards
        result.head_passes += counts.head_passes
    return result


def main(
    count: Annotated[int, typer.Option(min=1, help="Held-out problems.")] = 200,
    model: Annotated[Path, typer.Option(help="Folder of the model.")] = TINY_MODEL,
    only: Annotated[str, typer.Option(help="Run only configurations whose name contains this.")] = "",
    fresh: Annotated[bool, typer.Option(help="Forget earlier partial results.")] = False,
) -> None:
    """Measures all configurations and writes the report."""
    torch.manual_seed(0)
    workload = Workload(model, count)
    partial = RESULTS / "decoding.partial.json"
    key = {"model": str(model), "count": count, "stamp": (model / "model.safetensors").stat().st_mtime}
    done: dict[str, Any] = {}
    if partial.exists() and not fresh:
        saved = json.loads(partial.read_text())
        done = saved["rows"] if saved["key"] == key else {}
    plain: list[list[int]] = done.get("none", {}).get("ids", [])
    for name, options in tqdm(configurations().items(), desc="configurations"):
        if name in done or only not in name:
            continue
        if "reference" in options:
            measured = run_reference(workload, options["reference"], options.get("block_length", 8))
        else:
            measured = workload.run(**options)
        row = {**vars(measured), "accuracy": measured.accuracy, "tpf": measured.tokens_per_forward}
        if name == "none":
            plain = measured.ids
        row["equal_to_none"] = sum(a == b for a, b in zip(measured.ids, plain, strict=False))
        done[name] = row
        partial.write_text(json.dumps({"key": key, "rows": done}))
    if only:
        return
    with (RESULTS / "decoding.csv").open("w", newline="") as file:
        columns = [
            "name",
            "tpf",
            "accuracy",
            "tokens",
            "forwards",
            "segments",
            "head_passes",
            "taken_back",
            "equal_to_none",
        ]
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows({"name": name, **row} for name, row in done.items())
    write_report(workload, done, count)
    partial.unlink()


if __name__ == "__main__":
    typer.run(main)
