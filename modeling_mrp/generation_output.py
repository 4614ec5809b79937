"""What `generate` returns when `return_dict_in_generate=True`."""

from dataclasses import dataclass
from typing import Any

from torch import LongTensor, Tensor
from transformers.utils import ModelOutput


@dataclass
class MRPGenerateOutput(ModelOutput):
    """Sequences and exact counts of one `generate` call; per-row fields are `[rows]` int64 unless said otherwise.

    Attributes:
        sequences: `[rows, length]` int64: prompts as given, new tokens, then the pad token.
        tokens_per_forward: `[rows]` float32, new tokens / backbone forwards (prefill apart).
        new_tokens: tokens returned for the row after its prompt.
        backbone_forwards: forwards in which the row took part, prefill apart.
        total_forwards: int, forwards of the whole batch, prefill apart.
        prefill_forwards: int, forwards that only read the prompt.
        segments: block-sized states that the backbone evaluated for the row.
        head_passes: head calls in which the row took part.
        drafts_proposed, drafts_accepted: `[rows, depth]` int64: rounds in which a draft of that depth (reveals beyond
            the certain first pick) was evaluated, and was reached by the walk.
        reveals_taken_back: reveals that a remask rule masked again.
        reveal_step, reveal_source: `[rows, length]` int64, on request: the row's forward (from 0) at which each token
            was revealed and where it came from (0 backbone, k head step k); -1 at prompt and padding.
        order: str, the reveal order: `published`, or `stable` where `confidence_resolution` > 0.
        cache: handle to continue this conversation, when `return_cache` was asked for.
    """

    sequences: LongTensor | None = None
    tokens_per_forward: Tensor | None = None
    new_tokens: Tensor | None = None
    backbone_forwards: Tensor | None = None
    total_forwards: int | None = None
    prefill_forwards: int | None = None
    segments: Tensor | None = None
    head_passes: Tensor | None = None
    drafts_proposed: Tensor | None = None
    drafts_accepted: Tensor | None = None
    reveals_taken_back: Tensor | None = None
    reveal_step: Tensor | None = None
    reveal_source: Tensor | None = None
    order: str | None = None
    cache: Any = None
