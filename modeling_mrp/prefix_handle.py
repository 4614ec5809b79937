"""Caches of a finished `generate` call, kept so that a conversation continues without reading its prefix again."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from .generation_config_mrp import DecodingOptions
from .head_runner import HeadRunner
from .packed_forward import PackedStack


@dataclass
class PrefixHandle:
    """Caches of a finished call; handed back as `past_key_values`, they spare the shared prefix another prefill.

    Attributes:
        stack, runner: of the backbone and of the head.
        tokens: per row, the ids whose keys and values are stored (whole blocks).
        block_length, context: of the call that filled them.
    """

    stack: PackedStack
    runner: HeadRunner | None
    tokens: list[list[int]]
    block_length: int
    context: str

    def shared_blocks(self, prompts: list[Tensor], options: DecodingOptions, needs_head: bool) -> int:
        """Positions (whole blocks) that these prompts share with the stored tokens, the same for every row."""
        if options.block_length != self.block_length or len(prompts) != len(self.tokens):
            return 0
        if needs_head and (self.runner is None or options.context != self.context):
            return 0
        shared = []
        for prompt, stored in zip(prompts, self.tokens, strict=True):
            both = min(len(prompt), len(stored))
            same = np.equal(prompt[:both].cpu().numpy(), np.array(stored[:both]))
            shared.append(both if same.all() else int(same.argmin()))
        return min(shared) // self.block_length * self.block_length
