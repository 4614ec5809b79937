"""From an SDAR or SDAR-MRP config.json to ours: keeps what describes the model, drops what hurts, says both."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from ..configuration_mrp import MRPConfig, looks_misdeclared
from ..generation_config_mrp import MRPGenerationConfig
from .checkpoint_reader import read_json
from .errors import HubError
from .remote_code import AUTO_MAP

MODEL_TYPES = ("sdar", "sdar_moe", "sdar_mrp")
_ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters")
# Fields that are rewritten here, so nothing is lost with them.
_REPLACED = {"architectures", "auto_map", "model_type", "dtype", "torch_dtype", "transformers_version", "layer_types"}
_NOT_READ = _REPLACED | {"declared_model_type"}
_HARMFUL = {
    "attn_implementation": "an attention implementation that fits the original modelling code only",
    "_attn_implementation": "an attention implementation that fits the original modelling code only",
    "use_cache": "decoding here always uses its cache",
    "debug": "a switch of the original training code",
    "ep_size": "a switch of the original training code",
    "fuse_cross_entropy": "a switch of the original training code",
    "micro_forward": "a switch of the original training code",
    "skip_checkpoint": "a switch of the original training code",
    "use_deepep": "a switch of the original training code",
}
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "max_length", "max_new_tokens")


def read_config(
    source: Path,
    *,
    block_length: int | None,
    head_layers: int | None,
    mask_token_id: int | None,
    head_prediction: str | None = None,
    other_head: bool = False,
) -> tuple[MRPConfig, list[str]]:
    """Our config for the checkpoint folder `source`, and notes on what was changed.

    Args:
        block_length: overrides the declared `block_size`.
        head_layers: head layers found among the weights, `None` for no head.
        mask_token_id: overrides the declared mask token.
        head_prediction: what the head predicts, `residual` or `direct`, where the config does not say.
        other_head: whether the head comes from elsewhere, so that the declared number of its layers means nothing.

    Raises:
        HubError: no config.json, another kind of model, or values that `MRPConfig` refuses.
    """
    declared = read_json(source / "config.json")
    kind = declared.get("model_type")
    if kind not in MODEL_TYPES:
        raise HubError(
            f"{source / 'config.json'}: model_type={kind!r}; allowed: {', '.join(MODEL_TYPES)}. "
            "Only SDAR checkpoints, with or without an MRP head, can be converted."
        )
    known = {field.name for field in dataclasses.fields(MRPConfig)} - _NOT_READ
    kept = {name: value for name, value in declared.items() if name in known and name not in _HARMFUL}
    kept["rope_parameters"] = _rope_parameters(declared)
    notes = _dropped(declared, known)
    if head_layers is not None:
        stated = declared.get("num_nextn_predict_layers")
        if not other_head and stated not in (None, head_layers):
            raise HubError(
                f"{source / 'config.json'} says num_nextn_predict_layers={stated}, but the weights hold a head of "
                f"{head_layers} layers. Download config and weights of one revision."
            )
        kept["num_nextn_predict_layers"] = head_layers
    if block_length is not None:
        kept["block_size"] = block_length
        if declared.get("block_size") != block_length:
            notes.append(f"block_size: {declared.get('block_size')} -> {block_length}, as asked.")
    if mask_token_id is not None:
        kept["mask_token_id"] = mask_token_id
    if head_prediction is not None:
        kept["head_prediction"] = head_prediction
    try:
        config = MRPConfig(architectures=declared.get("architectures"), **kept)
    except (ValueError, TypeError) as error:
        raise HubError(f"{source / 'config.json'}: {error}") from error
    config.declared_model_type = "sdar" if head_layers is not None else kind
    if block_length is None and looks_misdeclared(config):
        notes.append(
            "WARNING: block_size is 4 in this config, but the published 4B MRP weights were trained with 16. "
            "Convert again with --block-length 16, or pass block_length=16 to generate."
        )
    config.declared_model_type = None
    config.architectures = ["MRPForCausalLM"]
    config.auto_map = dict(AUTO_MAP)
    return config, notes


def generation_config(source: Path, config: MRPConfig, end_tokens: list[int]) -> tuple[MRPGenerationConfig, list[str]]:
    """The generation config of the converted model: its special tokens and the lossless mode, nothing else.

    Args:
        end_tokens: ids that end an answer.
    """
    path = source / "generation_config.json"
    declared = read_json(path) if path.exists() else {}
    notes = [
        f"generation_config: dropped {name}={declared[name]!r} (decoding is greedy unless a call asks otherwise)."
        for name in _SAMPLING
        if declared.get(name) not in (None, False)
    ]
    result = MRPGenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=end_tokens or None,
        pad_token_id=config.pad_token_id,
        do_sample=False,
        mrp_mode="speculative",
    )
    return result, notes


def write_generation_config(config: MRPGenerationConfig, target: Path) -> None:
    """Writes generation_config.json without the fields that nobody set."""
    config.save_pretrained(target)
    path = target / "generation_config.json"
    content = {name: value for name, value in read_json(path).items() if value is not None}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def declared_token(source: Path, name: str) -> list[int]:
    """Ids that config.json and generation_config.json of `source` give for `name`, without repetition."""
    found: list[int] = []
    for file in ("generation_config.json", "config.json"):
        path = source / file
        value: Any = read_json(path).get(name) if path.exists() else None
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int) and token not in found:
                found.append(token)
    return found


def _rope_parameters(declared: dict) -> dict:
    given = declared.get("rope_parameters") or declared.get("rope_scaling") or {}
    parameters = {"rope_type": "default", **given}
    parameters.setdefault("rope_theta", declared.get("rope_theta", 10_000.0))
    if "type" in parameters:
        parameters["rope_type"] = parameters.pop("type")
    return parameters


def _dropped(declared: dict, known: set[str]) -> list[str]:
    notes = [
        f"config: dropped {name}={declared[name]!r} ({reason})."
        for name, reason in _HARMFUL.items()
        if declared.get(name) is not None
    ]
    handled = known | set(_HARMFUL) | set(_ROPE_FIELDS) | _REPLACED
    unknown = sorted(set(declared) - handled)
    if unknown:
        notes.append(f"config: dropped unknown fields {', '.join(unknown)}.")
    return notes
