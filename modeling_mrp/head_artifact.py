"""The head alone: `mrp_head.safetensors` and `mrp_head.json`, for a backbone that is known by its fingerprint."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers.utils import logging

logger = logging.get_logger(__name__)

NAME = "mrp_head"
# What a head's shape and meaning depend on.
_HEAD_FIELDS = ("num_nextn_predict_layers", "head_prediction", "residual_scale", "draft_calibration", "block_size")
_SHAPE_FIELDS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "num_hidden_layers",
)  # fmt: skip
_SAMPLED_VALUES = 4096


def save_head(
    model: Any,
    folder: str | Path,
    backbone: str | None = None,
    *,
    name: str = NAME,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes the head of `model` to `folder`, as `<name>.safetensors` and `<name>.json`.

    Args:
        model: an `MRPForCausalLM`.
        backbone: name of the backbone, for the reader.
        dtype: of the file, default: as it is.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {key: value.detach().cpu().to(dtype or value.dtype) for key, value in model.mrp.state_dict().items()}
    save_file(
        {key: value.contiguous() for key, value in weights.items()},
        folder / f"{name}.safetensors",
        metadata={"format": "pt"},
    )
    config = model.config
    description = {
        "backbone": backbone,
        "fingerprint": backbone_fingerprint(model),
        "head": {key: getattr(config, key) for key in _HEAD_FIELDS},
        "shape": {key: getattr(config, key) for key in _SHAPE_FIELDS},
    }
    (folder / f"{name}.json").write_text(json.dumps(description, indent=1))


def load_head(model: Any, folder: str | Path) -> None:
    """Puts a head on `model`: from a local folder, a Hub id, or a file `<name>.safetensors` beside `<name>.json`.

    Raises:
        ValueError: the files are missing or broken, or the head does not fit the backbone's shape.
    """
    weights_file, config_file = _files(folder)
    description = json.loads(config_file.read_text())
    config = model.config
    for name, value in description["shape"].items():
        if getattr(config, name) != value:
            raise ValueError(
                f"{folder}: the head was trained on a backbone with {name}={value}, this one has "
                f"{getattr(config, name)}; load it on {description['backbone'] or 'its own backbone'}."
            )
    if description["fingerprint"] != backbone_fingerprint(model):
        logger.warning(
            f"{folder}: this head was trained on other backbone weights ({description['backbone']}). Outputs of "
            "lossless decoding stay right, but drafts may be poor; train it further with head.start=<folder>."
        )
    if description["head"]["block_size"] != config.block_size:
        logger.warning(
            f"{folder}: this head was trained with blocks of {description['head']['block_size']}, the backbone's "
            f"config says {config.block_size}."
        )
    for name in ("num_nextn_predict_layers", "head_prediction", "residual_scale", "draft_calibration"):
        setattr(config, name, description["head"][name])
    old = next(model.mrp.parameters())
    head = type(model.mrp)(config)
    try:
        head.load_state_dict(load_file(weights_file))
    except (RuntimeError, SafetensorError) as error:
        raise ValueError(f"{weights_file} does not hold the head of {config_file.name}: {error}") from error
    for layer in head.layers:
        layer.self_attn.is_causal = False
    model.mrp = head.to(old.device, old.dtype)


def _files(source: str | Path) -> tuple[Path, Path]:
    local = Path(source)
    if local.suffix == ".safetensors":
        weights = local
    elif local.is_dir():
        weights = local / f"{NAME}.safetensors"
    else:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        try:
            hf_hub_download(str(source), f"{NAME}.json")
            weights = Path(hf_hub_download(str(source), f"{NAME}.safetensors"))
        except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            raise ValueError(f"{source} is neither a folder nor a reachable Hub id of a head: {error}") from error
    for file in (weights, weights.with_suffix(".json")):
        if not file.exists():
            raise ValueError(f"{file} does not exist; give the output folder of mrp-train, or a .safetensors in it.")
    return weights, weights.with_suffix(".json")


@torch.no_grad()
def backbone_fingerprint(model: Any) -> str:
    """A hash of the backbone's weights: some thousand values of every tensor, rounded to bfloat16.

    The rounding keeps the fingerprint equal for one checkpoint loaded in float32, bfloat16 or (nearly) float16.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.model.named_parameters()):
        clean = name.replace("base_layer.", "")
        if "lora_" in clean or parameter.device.type == "meta":
            continue
        flat = parameter.detach().flatten()
        step = max(1, flat.numel() // _SAMPLED_VALUES)
        values = flat[::step][:_SAMPLED_VALUES].to(torch.bfloat16).float().cpu()
        digest.update(clean.encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()[:32]
