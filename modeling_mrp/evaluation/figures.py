"""Decoding figures of single requests, and their sums: what a run adds to the harness's results."""

import os
import platform
from collections import defaultdict
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

Figures = dict[str, Any]

# Counters that `MRPGenerateOutput` gives per row and that add up over rows.
ROW_COUNTERS = ("new_tokens", "backbone_forwards", "segments", "head_passes", "reveals_taken_back")
DEPTH_COUNTERS = ("drafts_proposed", "drafts_accepted")


def figures_of_batch(output: Any, seconds: float) -> list[Figures]:
    """One JSON-able record per row of a `generate` call.

    Args:
        output: an `MRPGenerateOutput`.
        seconds: wall time of the call; each row gets the share of its new tokens, so rows add up to the call.

    Returns:
        Records with the counters above, `tokens_per_forward`, `seconds`, `batch_rows` and the reveal `order`.
    """
    rows = output.new_tokens.shape[0]
    total = max(1, int(output.new_tokens.sum()))
    records = []
    for row in range(rows):
        record: Figures = {name: int(getattr(output, name)[row]) for name in ROW_COUNTERS}
        for name in DEPTH_COUNTERS:
            record[name] = _without_trailing_zeros(getattr(output, name)[row].tolist())
        record["tokens_per_forward"] = _ratio(record["new_tokens"], record["backbone_forwards"])
        record["seconds"] = seconds * record["new_tokens"] / total
        record["batch_rows"] = rows
        record["order"] = output.order
        records.append(record)
    return records


def summarize(records: Iterable[Figures]) -> Figures:
    """Sums and ratios over the records of one task.

    `tokens_per_forward` is the ratio of the sums (not the mean of ratios). `acceptance_by_depth[d]` is the share of
    drafts with d + 1 reveals beyond the certain first pick that the walk reached. `tokens_per_second` is per process.
    Records of likelihood requests are summed apart, under `likelihood`.
    """
    records = list(records)
    generated = [record for record in records if "new_tokens" in record]
    scored = [record for record in records if "standard_error" in record]
    summary: Figures = {"requests": len(records)}
    if generated:
        for name in ROW_COUNTERS:
            summary[name] = sum(record[name] for record in generated)
        for name in DEPTH_COUNTERS:
            summary[name] = _sum_by_depth(record[name] for record in generated)
        proposed, accepted = summary["drafts_proposed"], summary["drafts_accepted"]
        accepted = accepted + [0] * (len(proposed) - len(accepted))
        summary["acceptance_by_depth"] = [_ratio(a, p) for a, p in zip(accepted, proposed, strict=True)]
        summary["seconds"] = sum(record["seconds"] for record in generated)
        summary["tokens_per_forward"] = _ratio(summary["new_tokens"], summary["backbone_forwards"])
        summary["tokens_per_second"] = _ratio(summary["new_tokens"], summary["seconds"])
        summary["order"] = sorted({record["order"] for record in generated})
    if scored:
        errors = [record["standard_error"] for record in scored]
        summary["likelihood"] = {
            "requests": len(scored),
            "exact": sum(record["samples"] == 0 for record in scored),
            "samples": max(record["samples"] for record in scored),
            "states": sum(record["states"] for record in scored),
            "mean_standard_error": sum(errors) / len(errors),
            "max_standard_error": max(errors),
        }
    return summary


class FigureBook:
    """Keeps each request's records until the harness has finished and they are taken."""

    def __init__(self) -> None:
        self._records: dict[int, tuple[Any, list[Figures]]] = {}

    def add(self, request: Any, record: Figures) -> None:
        # The request is kept too, so that its id stays its own.
        self._records.setdefault(id(request), (request, []))[1].append(record)

    def take(self, request: Any) -> list[Figures]:
        """The records of a request, at most `repeats` of them; they are forgotten here."""
        return self._records.pop(id(request), (None, []))[1]


def environment(model: Any, processes: int) -> dict[str, Any]:
    """Hardware, versions and the model's dtype: without them a speed says nothing."""
    device = model.device
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = _cpu_name()
    return {
        "device": name,
        "device_type": device.type,
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "processes": processes,
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": getattr(model.config, "_attn_implementation", None),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("torch", "transformers", "lm_eval", "modeling-mrp", "triton")},
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _without_trailing_zeros(counts: list[int]) -> list[int]:
    while counts and counts[-1] == 0:
        counts.pop()
    return counts


def _sum_by_depth(rows: Iterable[list[int]]) -> list[int]:
    sums: dict[int, int] = defaultdict(int)
    for counts in rows:
        for depth, count in enumerate(counts):
            sums[depth] += count
    return [sums[depth] for depth in range(max(sums) + 1)] if sums else []
