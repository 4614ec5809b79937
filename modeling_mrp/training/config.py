"""The training configuration: one YAML file and overrides of the form section.name=value."""

import inspect
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from ..training_objective import TrainingObjective
from .data import DataConfig
from .errors import TrainingError


@dataclass(frozen=True)
class ModelConfig:
    """The backbone that is trained on.

    Attributes:
        path: folder or Hub id of an SDAR or SDAR-MRP checkpoint.
        revision: of a Hub id.
        dtype: `"float32"`, `"bfloat16"` or `"float16"` of the backbone. The head is trained in float32 master weights
            when the trainer's `bf16` or `fp16` is set and `dtype` is float32.
        attention: attention implementation: `"sdpa"`, `"eager"` or `"flex_attention"`.
        block_length: overrides the checkpoint's `block_size`.
        quantize_backbone: `null` or `"8bit"` (needs bitsandbytes and a GPU); head and LM head stay as they are.
        adapter: folder or Hub id of a LoRA adapter to load onto the backbone, not merged.
        merge_adapter: merge it instead.
        lora_rank: with `objective.loss: denoising`, train a LoRA adapter of this rank on it (0: its weights).
    """

    path: str = ""
    revision: str | None = None
    dtype: str = "float32"
    attention: str = "sdpa"
    block_length: int | None = None
    quantize_backbone: str | None = None
    adapter: str | None = None
    merge_adapter: bool = False
    lora_rank: int = 0

    def __post_init__(self) -> None:
        if not self.path:
            raise TrainingError("model.path is empty; give the folder or the Hub id of a backbone.")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise TrainingError(f"model.dtype={self.dtype!r}; allowed: float32, bfloat16, float16.")
        if self.quantize_backbone not in (None, "8bit"):
            raise TrainingError(f"model.quantize_backbone={self.quantize_backbone!r}; allowed: null, 8bit.")


@dataclass(frozen=True)
class HeadConfig:
    """The head.

    Attributes:
        start: `"fresh"`, `"checkpoint"` (continue the head that `model.path` brings), or a folder with a head-only
            artefact.
        layers, prediction, initialization, deviation, final_norm: of a fresh head, see `initialization.fresh_head`.
        lora_rank: train LoRA adapters of this rank on the head's layers instead of the head itself (0: off).
    """

    start: str = "fresh"
    layers: int = 3
    prediction: str = "residual"
    initialization: str = "normal"
    deviation: float = 0.02
    final_norm: float | None = None
    lora_rank: int = 0


@dataclass(frozen=True)
class RunConfig:
    """Everything that `mrp-train` needs.

    Attributes:
        output: folder for checkpoints, logs and the result.
        trainer: fields of `transformers.TrainingArguments`; the defaults of `TRAINER_DEFAULTS` apply.
        optimizer: `"trainer"`: what the trainer's `optim` says (AdamW); `"muon"`: Muon for the head's matrices with
            `trainer.learning_rate` (about 0.02), AdamW for its vectors.
        save: `"head"` (the head-only artefact), `"model"` (backbone and head, a folder to push) or `"both"`.
    """

    output: str
    model: ModelConfig
    data: DataConfig
    head: HeadConfig = field(default_factory=HeadConfig)
    objective: TrainingObjective = field(default_factory=TrainingObjective)
    trainer: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "trainer"
    save: str = "both"

    def __post_init__(self) -> None:
        if self.optimizer not in ("trainer", "muon"):
            raise TrainingError(f"optimizer={self.optimizer!r}; allowed: trainer, muon.")
        if self.save not in ("head", "model", "both"):
            raise TrainingError(f"save={self.save!r}; allowed: head, model, both.")


# The published recipe's optimizer; batch size and length of training belong to the user's configuration.
TRAINER_DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "warmup_steps": 0.03,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "logging_steps": 10,
    "save_strategy": "steps",
    "save_steps": 500,
    "save_total_limit": 2,
    "report_to": "none",
    "remove_unused_columns": False,
    "ddp_find_unused_parameters": False,
    "prediction_loss_only": True,
}
# What won on the tiny task (benchmarks/results/ablation.md); under a loss other than the forward KL there is no
# certainty loss.
OBJECTIVE_DEFAULTS: dict[str, Any] = {"steps": 3, "certainty_weight": 1.0, "supervise_revealed": 0.3}
_SECTIONS: dict[str, type] = {
    "model": ModelConfig, "data": DataConfig, "head": HeadConfig, "objective": TrainingObjective
}  # fmt: skip


def load_config(path: Path, overrides: list[str]) -> RunConfig:
    """Reads a YAML file and applies overrides, whose values are YAML too.

    Raises:
        TrainingError: the file cannot be read, or something in it is unknown or out of range.
    """
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise TrainingError(f"{path} cannot be read as a YAML file: {error}") from error
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or not name:
            raise TrainingError(f"override {override!r}; allowed: section.name=value, e.g. objective.steps=2.")
        *sections, last = name.split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise TrainingError(f"override {override!r}: {section} is no section of {path}.")
        place[last] = yaml.safe_load(text)
    return config_from(values)


def config_from(values: dict[str, Any]) -> RunConfig:
    """A checked configuration from nested dicts.

    Raises:
        TrainingError: a name is unknown, a required one is missing, or a value is out of range.
    """
    _refuse_unknown(values, RunConfig, "")
    if not values.get("output"):
        raise TrainingError("output is missing; give the folder for checkpoints and the result.")
    built: dict[str, Any] = dict(values)
    for name, kind in _SECTIONS.items():
        section = values.get(name) or {}
        if not isinstance(section, dict):
            raise TrainingError(f"{name}={section!r} must be a section with names and values.")
        _refuse_unknown(section, kind, f"{name}.")
        if kind is TrainingObjective:
            section = {**OBJECTIVE_DEFAULTS, **section}
            if section.get("loss", "forward_kl") != "forward_kl" and "certainty_weight" not in (
                values.get(name) or {}
            ):
                section["certainty_weight"] = 0.0
        try:
            built[name] = TrainingObjective.of(section) if kind is TrainingObjective else kind(**section)
        except TrainingError:
            raise
        except (TypeError, ValueError) as error:
            raise TrainingError(f"{name}: {error}") from error
    return RunConfig(**built)


def _refuse_unknown(values: dict[str, Any], kind: type, prefix: str) -> None:
    known = [f.name for f in fields(kind)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise TrainingError(f"unknown {', '.join(prefix + name for name in unknown)}; allowed: {', '.join(known)}.")


def describe_options() -> str:
    """Every name of the configuration with its default, and what its class says about it."""
    lines = []
    for name, kind in {"": RunConfig, **_SECTIONS}.items():
        lines.append(f"\n[{name or 'top level'}] {inspect.getdoc(kind)}\n")
        for entry in fields(kind):
            if entry.default is not MISSING:
                lines.append(f"    {entry.name}: {entry.default!r}")
    lines.append(f"\n[objective] defaults of mrp-train where they differ: {OBJECTIVE_DEFAULTS}")
    lines.append(f"\n[trainer] fields of transformers.TrainingArguments; defaults here: {TRAINER_DEFAULTS}")
    return "\n".join(lines)
