"""LoRA on the backbone's layers or on the head's, by PEFT."""

from typing import Any

from .errors import TrainingError

_PROJECTIONS = r"(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)"
# Names are matched from the start, so that neither set reaches the layers of the other.
BACKBONE_LAYERS = rf"model\.layers\.\d+\.{_PROJECTIONS}"
HEAD_LAYERS = rf"mrp\.layers\.\d+\.{_PROJECTIONS}"


def load_backbone_adapter(model: Any, path: str, merge: bool) -> Any:
    """Puts a trained adapter on the backbone, loaded beside its weights or merged into them.

    Raises:
        TrainingError: `path` holds no adapter.
    """
    from peft import PeftModel

    try:
        adapted = PeftModel.from_pretrained(model, path)
    except (OSError, ValueError) as error:
        raise TrainingError(f"model.adapter={path!r} is no PEFT adapter: {error}") from error
    return adapted.merge_and_unload() if merge else adapted


def add_backbone_adapter(model: Any, rank: int) -> Any:
    """A fresh LoRA adapter of `rank` on the backbone's layers; it is what trains."""
    return _add(model, rank, BACKBONE_LAYERS)


def add_head_adapter(model: Any, rank: int) -> Any:
    """A fresh LoRA adapter of `rank` on the head's layers; it is what trains."""
    return _add(model, rank, HEAD_LAYERS)


def _add(model: Any, rank: int, targets: str) -> Any:
    from peft import LoraConfig, PeftModel, get_peft_model

    if isinstance(model, PeftModel):
        raise TrainingError("a second adapter on an adapted model: merge the first with model.merge_adapter: true.")
    return get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules=targets)
    )


def base_of(model: Any) -> Any:
    """The `MRPForCausalLM` under any PEFT wrappers."""
    while hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return model
