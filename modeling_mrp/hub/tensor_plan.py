"""Which tensors a checkpoint must hold, under which names and shapes, and where each is found in the source."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..configuration_mrp import MRPConfig
from .checkpoint_reader import StoredTensor
from .errors import HubError

_HEAD = "mrp."
_OFFICIAL_HEAD = re.compile(r"^mrp_modules\.(\d+)\.model\.")
_HEAD_LAYER = re.compile(r"^mrp\.layers\.(\d+)\.")
_BARE_HEAD = re.compile(r"^(enorm|hnorm|eh_proj|norm|layers)\.")
_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.")
_FUSED = re.compile(r"^(.*\.mlp\.experts)\.(gate_up_proj|down_proj)$")
# Buffers that older checkpoints carry; they are computed, not loaded.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$|\.masked_bias$")
_FLOATING = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def our_names(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The checkpoint's tensors under this package's names (`mrp_modules.0.model.*` becomes `mrp.*`).

    Raises:
        HubError: more than one head, or two tensors of one name.
    """
    renamed: dict[str, StoredTensor] = {}
    for key, tensor in stored.items():
        official = _OFFICIAL_HEAD.match(key)
        if official and official.group(1) != "0":
            raise HubError(f"{tensor.file} holds {key!r}: a second head. The method has one; num_mrp_heads must be 1.")
        name = _HEAD + key[official.end() :] if official else key
        if _IGNORED.search(name):
            continue
        if name in renamed:
            raise HubError(f"{tensor.file} holds {name!r} twice, in the official and in this package's naming.")
        renamed[name] = tensor
    return renamed


def head_file_names(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """As `our_names`, for a file of a head alone, whose names may lack any prefix; other tensors are left out."""
    named = {_HEAD + key if _BARE_HEAD.match(key) else key: tensor for key, tensor in stored.items()}
    head = {name: tensor for name, tensor in our_names(named).items() if name.startswith(_HEAD)}
    if not head:
        first = ", ".join(sorted(stored)[:3])
        raise HubError(
            f"no MRP head among the given head weights (found {first}, ...). Expected mrp_modules.0.model.*."
        )
    return head


def head_layers(named: Mapping[str, StoredTensor]) -> int | None:
    """The number of layers of the head among `named`, or `None` where there is no head."""
    if not any(name.startswith(_HEAD) for name in named):
        return None
    numbers = {int(match.group(1)) for name in named if (match := _HEAD_LAYER.match(name))}
    return max(numbers) + 1 if numbers else 0


def expected_shapes(config: MRPConfig, *, fused_experts: bool = True) -> dict[str, tuple[int, ...]]:
    """Name and shape of every stored tensor of a model of `config`, from the model itself on the meta device.

    Args:
        fused_experts: whether a mixture of experts is stored as transformers keeps it in memory (one tensor for all
            experts of a layer) or one by one, as the official checkpoints and transformers' own files store it.
    """
    from ..modeling_mrp import MRPForCausalLM

    with torch.device("meta"):
        shapes = {name: tuple(t.shape) for name, t in MRPForCausalLM(config).state_dict().items()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    if fused_experts:
        return shapes
    result: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        fused = _FUSED.match(name)
        if not fused:
            result[name] = shape
            continue
        prefix, (experts, rows, columns) = fused.group(1), shape
        for expert in range(experts):
            if fused.group(2) == "down_proj":
                result[f"{prefix}.{expert}.down_proj.weight"] = (rows, columns)
            else:
                result[f"{prefix}.{expert}.gate_proj.weight"] = (rows // 2, columns)
                result[f"{prefix}.{expert}.up_proj.weight"] = (rows // 2, columns)
    return result


@dataclass(frozen=True)
class TensorPlan:
    """What `mrp-convert` writes.

    Attributes:
        tensors: name -> where it is found, in the order of writing.
        dtype: of every tensor written.
        has_head: whether an MRP head is among them.
        notes: what is changed on the way.
        tied: the stored LM head of a checkpoint whose config ties it to the embeddings; it must equal them.
    """

    tensors: dict[str, StoredTensor]
    dtype: torch.dtype
    has_head: bool
    notes: list[str]
    tied: StoredTensor | None = None

    def bytes_of(self, tensor: StoredTensor) -> int:
        """Size of `tensor` when written."""
        return math.prod(tensor.shape) * self.dtype.itemsize

    @property
    def total_bytes(self) -> int:
        """Size of all tensors when written."""
        return sum(map(self.bytes_of, self.tensors.values()))


def plan_tensors(named: Mapping[str, StoredTensor], config: MRPConfig, dtype: str | None = None) -> TensorPlan:
    """Checks `named` against a model of `config` and decides the dtype of the result.

    Args:
        named: tensors under this package's names.
        dtype: `"float32"`, `"float16"` or `"bfloat16"`; default: that of the backbone's matrices.

    Raises:
        HubError: missing or unexpected tensors, wrong shapes, or dtypes that are no plain floating point.
    """
    expected = expected_shapes(config, fused_experts=not any(_EXPERT.search(name) for name in named))
    has_head = head_layers(named) is not None
    if not has_head:
        expected = {name: shape for name, shape in expected.items() if not name.startswith(_HEAD)}
    notes = []
    tied = named.get("lm_head.weight") if config.tie_word_embeddings else None
    if tied is not None:
        named = {name: tensor for name, tensor in named.items() if name != "lm_head.weight"}
        notes.append("lm_head.weight: left out, it is tied to the embeddings (tie_word_embeddings=true).")
    _check_names(named, expected, config)
    for name, tensor in named.items():
        if tensor.shape != expected[name]:
            raise HubError(
                f"{tensor.file}: {tensor.key!r} has shape {list(tensor.shape)}, but config.json asks for "
                f"{list(expected[name])}. Config and weights belong to different models."
            )
        if tensor.dtype not in _FLOATING:
            raise HubError(
                f"{tensor.file}: {tensor.key!r} is stored as {tensor.dtype}; allowed: {', '.join(_FLOATING)}. "
                "Convert the checkpoint that was not quantised, and quantise the result."
            )
    own = _FLOATING[named["model.embed_tokens.weight"].dtype]
    wanted = getattr(torch, dtype) if dtype else own
    others = sorted({t.dtype for t in named.values() if _FLOATING[t.dtype] != wanted})
    if others:
        notes.append(f"dtype: tensors stored as {', '.join(others)} are written as {str(wanted).split('.')[1]}.")
    return TensorPlan(dict(named), wanted, has_head, notes, tied)


def _check_names(named: Mapping[str, StoredTensor], expected: Mapping[str, tuple], config: MRPConfig) -> None:
    missing = [name for name in expected if name not in named]
    if missing:
        hint = "Download the checkpoint again, or check that config.json belongs to it."
        if missing == ["lm_head.weight"]:
            hint = 'If the LM head is tied to the embeddings, config.json must say "tie_word_embeddings": true.'
        elif all(name.startswith(_HEAD) for name in missing):
            hint = "Half a head cannot be used: download it again, or give the whole head with --head."
        raise HubError(f"{len(missing)} of {len(expected)} tensors are missing, the first is {missing[0]!r}. {hint}")
    unexpected = [tensor for name, tensor in named.items() if name not in expected]
    if unexpected:
        first = unexpected[0]
        raise HubError(
            f"{first.file} holds {len(unexpected)} tensors that a model of this config does not have, the first is "
            f"{first.key!r}. Config and weights belong to different models."
        )
