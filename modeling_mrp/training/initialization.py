"""How a head starts: drawn, as an identity, or from the backbone's own last layers."""

from typing import Any

import torch
from torch import nn

from ..modeling_mrp import MRPHead
from .errors import TrainingError

INITIALIZATIONS = ("normal", "identity", "backbone")
_SMALL_OUTPUT = 0.01
MATRICES_INTO_STREAM = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def fresh_head(
    model: Any,
    layers: int,
    prediction: str = "residual",
    initialization: str = "normal",
    deviation: float = 0.02,
    final_norm: float | None = None,
    seed: int = 0,
) -> None:
    """Gives `model` a new, seeded head in place of the one that it has.

    Args:
        model: an `MRPForCausalLM`.
        layers: depth of the head, 1 to 8.
        prediction: `"residual"` or `"direct"`.
        initialization: `"normal"`: every matrix from N(0, `deviation`); `"identity"`: the projection passes the
            hidden state through and the layers write nothing yet; `"backbone"`: that projection, and the layers of
            the end of the backbone.
        deviation: of the drawn matrices (the published recipe: 0.2).
        final_norm: weight of the head's last norm, the size of its first outputs. Default: 0.01 for a residual head,
            whose first correction should be small; the backbone's own norm weights for a direct one.

    Raises:
        TrainingError: an unknown initialization, or more layers than the backbone has to copy.
    """
    if initialization not in INITIALIZATIONS:
        raise TrainingError(f"head.initialization={initialization!r}; allowed: {', '.join(INITIALIZATIONS)}.")
    old = next(model.mrp.parameters())
    settings = {**model.config.to_dict(), "num_nextn_predict_layers": layers, "head_prediction": prediction}
    type(model.config)(**settings)  # raises for values out of range before anything is changed
    model.config.num_nextn_predict_layers, model.config.head_prediction = layers, prediction
    model.config.draft_calibration = None  # it was fitted on another head's drafts
    head = MRPHead(model.config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            elif initialization == "identity" and name.endswith(MATRICES_INTO_STREAM):
                parameter.zero_()
            else:
                parameter.normal_(0.0, deviation, generator=generator)
        if initialization != "normal":
            _pass_hidden_through(head, model.config.hidden_size)
        if initialization == "backbone":
            _copy_last_layers(head, model, layers)
        if final_norm is None and prediction == "direct":
            head.norm.weight.copy_(model.model.norm.weight)
        else:
            head.norm.weight.fill_(_SMALL_OUTPUT if final_norm is None else final_norm)
    for layer in head.layers:
        layer.self_attn.is_causal = False
    model.mrp = head.to(old.device, old.dtype)


def _pass_hidden_through(head: MRPHead, hidden: int) -> None:
    head.eh_proj.weight.zero_()
    head.eh_proj.weight[:, hidden:].copy_(torch.eye(hidden))


def _copy_last_layers(head: MRPHead, model: Any, layers: int) -> None:
    source: nn.ModuleList = model.model.layers
    if layers > len(source):
        raise TrainingError(
            f"head.initialization='backbone' copies {layers} layers, but the backbone has {len(source)}; lower "
            "head.layers."
        )
    for target, origin in zip(head.layers, list(source)[-layers:], strict=True):
        state = origin.state_dict()
        if set(state) != set(target.state_dict()):
            raise TrainingError(
                "head.initialization='backbone' cannot copy mixture-of-experts layers into the head's dense ones; "
                "use 'normal' or 'identity'."
            )
        target.load_state_dict(state)
