"""Weight-only quantisation of the backbone, through torchao."""

from typing import Any

from .errors import HubError

# Their rounding would change which position is revealed first; together they are a small part of the weights.
KEPT = ["lm_head", "mrp"]
BITS = (4, 8)


def backbone_weights(bits: int = 8, group_size: int = 32) -> Any:
    """The `quantization_config` for `from_pretrained` that stores the backbone's matrices in 8 or 4 bits.

    Args:
        bits: 8 (one scale per output) or 4 (one scale per `group_size` inputs).
        group_size: of 4-bit weights; must divide the model's matrix widths.

    Raises:
        HubError: another number of bits, or torchao is not installed.
    """
    if bits not in BITS:
        raise HubError(f"bits={bits!r}; allowed: {' or '.join(map(str, BITS))}.")
    try:
        import torch
        from torchao.quantization import IntxWeightOnlyConfig
        from torchao.quantization.granularity import PerAxis, PerGroup
        from transformers import TorchAoConfig
    except ImportError as error:
        raise HubError('quantised weights need torchao 0.18 or newer: pip install "torchao>=0.18"') from error
    # Plain storage runs on every device (the packed formats are each for one kind), and its weights are scaled
    # before the product: Int8WeightOnlyConfig scales behind it, which overflows in float16.
    if bits == 8:
        kind = IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))
    else:
        kind = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(group_size))
    return TorchAoConfig(kind, modules_to_not_convert=list(KEPT))
