"""One training run: configuration in, trained head out."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from ..head_artifact import load_head, save_head
from ..hub.remote_code import AUTO_MAP
from ..modeling_mrp import MRPForCausalLM
from .adapters import add_backbone_adapter, add_head_adapter, base_of, load_backbone_adapter
from .config import TRAINER_DEFAULTS, RunConfig
from .data import Collator, SampleEncoder, held_out, load_samples, pad_token_of, prepare
from .errors import TrainingError
from .initialization import fresh_head
from .recorded_states import RecordedStates
from .trainer import HeadTrainer, freeze_backbone, freeze_head

logger = logging.get_logger(__name__)


def train(config: RunConfig, resume: bool = False) -> dict[str, float]:
    """Trains as configured and writes the result to `config.output`; returns the last metrics.

    Args:
        config: of the run.
        resume: continue from the last checkpoint in `config.output`, if there is one.

    Raises:
        TrainingError: something about the configuration or the data is wrong.
    """
    arguments = training_arguments(config)
    set_seed(arguments.seed)
    model, tokenizer = build_model(config, arguments.seed)
    train_rows, evaluation_rows = build_data(config, model, tokenizer, arguments)
    trainer = HeadTrainer(
        model=model,
        args=arguments,
        objective=config.objective,
        muon=config.optimizer == "muon",
        recorded_states=recorded_states(config, model),
        train_dataset=train_rows,
        eval_dataset=evaluation_rows,
        data_collator=Collator(pad_token_of(model)),
        processing_class=tokenizer,
    )
    last = get_last_checkpoint(config.output) if resume and Path(config.output).is_dir() else None
    result = trainer.train(resume_from_checkpoint=last)
    metrics = dict(result.metrics)
    if evaluation_rows is not None:
        metrics.update(trainer.evaluate())
    if trainer.is_world_process_zero():
        save_result(config, trainer.accelerator.unwrap_model(trainer.model), tokenizer, metrics)
    return metrics


def training_arguments(config: RunConfig) -> TrainingArguments:
    """The trainer's arguments: ours, under the user's."""
    values = {**TRAINER_DEFAULTS, **config.trainer, "output_dir": config.output}
    # YAML reads a bare `no` as false.
    values = {name: "no" if value is False and name.endswith("_strategy") else value for name, value in values.items()}
    refuse_unsupported_parallelism(values, config.objective.steps)
    try:
        return TrainingArguments(**values)
    except (TypeError, ValueError) as error:
        raise TrainingError(f"trainer: {error}") from error


def refuse_unsupported_parallelism(trainer: dict[str, Any], steps: int) -> None:
    """Raises `TrainingError` where sharding would go wrong, silently or late."""
    if trainer.get("fsdp") or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        raise TrainingError(
            "FSDP is refused: it shards the LM head, whose weight the chunked loss reads, and the backbone's layers, "
            "which run without gradients outside of FSDP's schedule. Only the head trains, so plain data parallel "
            "(torchrun, without fsdp) costs one frozen copy of the backbone per GPU; halve it with "
            "model.dtype: bfloat16 or quarter it with model.quantize_backbone: 8bit."
        )
    deepspeed = trainer.get("deepspeed")
    if isinstance(deepspeed, str):
        deepspeed = json.loads(Path(deepspeed).read_text())
    stage = (deepspeed or {}).get("zero_optimization", {}).get("stage", 0)
    if stage == 3 or (stage in (1, 2) and steps > 1):
        raise TrainingError(
            f"DeepSpeed ZeRO stage {stage} with objective.steps={steps} is refused: "
            + ("it shards the LM head, whose weight the chunked loss reads." if stage == 3 else
               "it reduces a gradient at each of the head's uses, and K >= 2 uses it K times in one backward pass.")
            + " Allowed: stage 0, and stages 1 and 2 with objective.steps=1."
        )  # fmt: skip


def build_model(config: RunConfig, seed: int) -> tuple[Any, Any]:
    """Backbone with its head in the configured state, everything but the head frozen; and the tokenizer, if any."""
    options = config.model
    level = logging.get_verbosity()
    if config.head.start == "fresh":
        logging.set_verbosity_error()  # that the checkpoint has no trained head is expected here
    model = load_backbone(config)
    logging.set_verbosity(level)
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.path, revision=options.revision)
    except (OSError, ValueError):
        tokenizer = None
    if options.block_length is not None:
        model.config.block_size = options.block_length
    start = config.head
    if start.start == "fresh":
        fresh_head(
            model, start.layers, start.prediction, start.initialization, start.deviation, start.final_norm, seed
        )
    elif start.start != "checkpoint":
        try:
            load_head(model, start.start)
        except ValueError as error:
            raise TrainingError(f"head.start: {error}") from error
    return adapt(model, config), tokenizer


def adapt(model: Any, config: RunConfig) -> Any:
    """Adapters as configured, and gradients only for what trains: the head, or for denoising the backbone."""
    if config.model.adapter is not None:
        model = load_backbone_adapter(model, config.model.adapter, config.model.merge_adapter)
    if config.objective.loss == "denoising":
        freeze_head(model)
        return add_backbone_adapter(model, config.model.lora_rank) if config.model.lora_rank else model
    freeze_backbone(model)
    return add_head_adapter(model, config.head.lora_rank) if config.head.lora_rank else model


def load_backbone(config: RunConfig) -> MRPForCausalLM:
    """The checkpoint, in the configured dtype, optionally with its backbone in 8 bit."""
    options = config.model
    arguments: dict[str, Any] = {
        "dtype": getattr(torch, options.dtype),
        "attn_implementation": options.attention,
        "revision": options.revision or "main",
    }
    if options.quantize_backbone == "8bit":
        from transformers import BitsAndBytesConfig

        arguments["quantization_config"] = BitsAndBytesConfig(
            load_in_8bit=True, llm_int8_skip_modules=["mrp", "lm_head"]
        )
    try:
        return MRPForCausalLM.from_pretrained(options.path, **arguments)
    except OSError as error:
        raise TrainingError(f"model.path={options.path!r} cannot be loaded: {error}") from error


def build_data(config: RunConfig, model: Any, tokenizer: Any, arguments: TrainingArguments) -> tuple[Any, Any]:
    """Training and evaluation sequences."""
    data = config.data
    pad = tokenizer.pad_token_id if tokenizer is not None else model.config.pad_token_id
    encoder = SampleEncoder(tokenizer, data, model.config.block_size, pad)
    raw = load_samples(data.train, data.train_split, data.subset, data.streaming)
    held = None
    if data.evaluation is not None:
        held = load_samples(data.evaluation, data.evaluation_split, data.subset, False)
    else:
        raw, held = held_out(raw, data.evaluation_size, arguments.seed)
    with arguments.main_process_first(desc="encoding the data"):
        train_rows = prepare(raw, encoder, data.packing)
        evaluation_rows = None if held is None else prepare(held, encoder, data.packing)
    if not data.streaming and len(train_rows) == 0:
        raise TrainingError("the training data is empty; give at least one row (data.too_long: skip may drop all).")
    return train_rows, evaluation_rows


def recorded_states(config: RunConfig, model: Any) -> RecordedStates | None:
    """The recording that the objective reads, checked against the backbone."""
    folder, layout = config.data.recorded_states, config.objective.layout
    if (folder is not None) != (layout == "recorded"):
        raise TrainingError(
            f"data.recorded_states={folder!r} with objective.layout={layout!r}; allowed: a folder and 'recorded', or "
            "neither."
        )
    if folder is None:
        return None
    states = RecordedStates(folder)
    states.check(base_of(model))
    return states


def save_result(config: RunConfig, model: Any, tokenizer: Any, metrics: dict[str, float]) -> None:
    """The head-only artefact, the whole model, or both, and the metrics."""
    output = Path(config.output)
    base = base_of(model)
    backbone_adapted = config.model.lora_rank > 0 and config.objective.loss == "denoising"
    if backbone_adapted or config.head.lora_rank > 0:
        model.save_pretrained(output / "adapter")
    if config.head.lora_rank > 0:
        base = model.merge_and_unload()
    if config.save in ("head", "both") and config.objective.loss != "denoising":
        save_head(base, output, config.model.path)
    whole = not backbone_adapted and (config.model.adapter is None or config.model.merge_adapter)
    if config.save in ("model", "both") and whole:
        base.config.auto_map = dict(AUTO_MAP)
        base.save_pretrained(output)
        if tokenizer is not None:
            tokenizer.save_pretrained(output)
    (output / "training_metrics.json").write_text(json.dumps(metrics, indent=1))
