"""`mrp-train calibrate`: fits the draft model to a trained head and stores it beside the head."""

import json
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..head_artifact import NAME, load_head
from .draft_traces import collect_traces, fit_calibration
from .errors import TrainingError
from .record import load_model, load_prompts


def calibrate_folder(
    model_path: Path,
    data: str,
    head: Path | None,
    max_new_tokens: int,
    limit: int,
    passes: int,
    dtype: str = "float32",
    device: str = "cpu",
) -> dict[str, Any]:
    """Fits a calibration on `limit` prompts and writes it into `config.json` (or the head's own `mrp_head.json`).

    Raises:
        TrainingError: `model_path` is no local folder, or a prompt cannot be read.
    """
    file = model_path / "config.json" if head is None else head / f"{NAME}.json"
    if not file.exists():
        raise TrainingError(f"{file} does not exist; calibrate a local folder that mrp-train or mrp-convert wrote.")
    model = load_model(str(model_path), dtype, device)
    if head is not None:
        load_head(model, head)
    prompts = [torch.tensor(ids, device=model.device) for ids in load_prompts(str(model_path), data, limit)]
    traces = collect_traces(model, tqdm(prompts, desc="traces"), max_new_tokens, passes=passes)
    calibration = fit_calibration(traces)
    description = json.loads(file.read_text())
    (description if head is None else description["head"])["draft_calibration"] = calibration
    part = file.with_suffix(".part")
    part.write_text(json.dumps(description, indent=2) + "\n")
    part.replace(file)
    return calibration
