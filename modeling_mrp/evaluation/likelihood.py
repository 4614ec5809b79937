"""Likelihood of a continuation under a block-diffusion model.

A block-diffusion model gives p(token at i | any set of revealed positions of the block, earlier blocks), so a block's
probability depends on the order in which its positions are revealed. With n continuation positions in a block, an
order s, and every other position of the block masked, the product over k of p(x_s(k) | x_s(1..k-1), earlier blocks) is
a proper distribution over the n tokens: it is what decoding one token a step in that order samples from at
temperature 1. Two likelihoods follow, each a sum over the blocks that the continuation touches:

    sequential   the log-probability under the left-to-right order: exact, one state per token.
    random       the mean over all orders of the log-probability: the any-order bound on log p that masked diffusion
                 is trained with. By linearity it is a sum over revealed subsets S,
                     sum_S  1 / (C(n, |S|) (n - |S|))  sum_{i not in S}  log p(x_i | x_S, earlier blocks).
                 Where all 2^n - 1 subsets cost no more than the samples, the sum is exact; else it is estimated from
                 `samples` orders, each giving sum_k mean_{i not in S_k} log p(x_i | x_{S_k}), with the standard error
                 of their mean. Errors of different blocks are independent.

The mask token has probability 0, as in decoding. Orders depend on (seed, block, n) alone: results are deterministic
and do not depend on batching, and the choices of one question are compared under the same orders.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..block_attention import TokenLayout, may_see

ORDERS = ("random", "sequential")
_PREFILL_TOKENS = 512


@dataclass(frozen=True)
class LikelihoodEstimate:
    """A log-likelihood in nats.

    Attributes:
        value: the estimate.
        standard_error: of `value`, 0 where it is exact.
        samples: orders drawn per block, 0 where every block is exact.
        states: block states that the backbone evaluated.
        first_pick_agrees: whether greedy decoding's first pick, if it is a position of the continuation, is its token.
    """

    value: float
    standard_error: float
    samples: int
    states: int
    first_pick_agrees: bool


class _PrefixCache:
    """Keys and values of a prefix, one row, shown to every row of a batch of states."""

    def __init__(self, layers: dict[int, tuple[Tensor, Tensor]] | None = None):
        self.layers, self.storing = dict(layers or {}), False

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if layer in self.layers:
            shape = (key.shape[0], -1, -1, -1)
            key = torch.cat([self.layers[layer][0].expand(shape), key], dim=2)
            value = torch.cat([self.layers[layer][1].expand(shape), value], dim=2)
        if self.storing:
            self.layers[layer] = (key, value)
        return key, value


class _Block(NamedTuple):
    """One block of the sequence: its number, its known tokens, and the offsets of continuation positions."""

    number: int
    tokens: list[int]
    scored: list[int]


class BlockLikelihood:
    """Evaluates log-likelihoods. It keeps the last context's cache: ask for one context's continuations in a row.

    Args:
        model: an `MRPForCausalLM`.
        block_length: default the model's `block_size`.
        order: `random` or `sequential` (module docstring).
        samples: orders per block where the sum over subsets is too long, at least 2.
        seed: of the orders.
        batch_size: states per backbone forward.

    Raises:
        ValueError: an argument out of its range.
    """

    def __init__(
        self,
        model: Any,
        block_length: int | None = None,
        order: str = "random",
        samples: int = 32,
        seed: int = 0,
        batch_size: int = 32,
    ):
        if order not in ORDERS:
            raise ValueError(f"likelihood_order={order!r}; allowed: {', '.join(ORDERS)}.")
        if not _is_integer(samples) or samples < 2:
            raise ValueError(
                f"likelihood_samples={samples!r}; allowed: an integer from 2 (a standard error needs two orders)."
            )
        if not _is_integer(seed):
            raise ValueError(f"likelihood_seed={seed!r}; allowed: an integer.")
        longest = model.config.max_position_embeddings
        if block_length is not None and not (_is_integer(block_length) and 1 <= block_length <= longest):
            raise ValueError(
                f"likelihood_block_length={block_length!r}; allowed: an integer from 1 to {longest}, or none for the "
                f"model's {model.config.block_size}."
            )
        self.model, self.order, self.samples, self.seed = model, order, samples, seed
        self.block_length = block_length or model.config.block_size
        self.batch_size = max(1, batch_size)
        self._prefix: list[int] = []
        self._cache = _PrefixCache()

    @torch.no_grad()
    def estimate(self, context: list[int], continuation: list[int]) -> LikelihoodEstimate:
        """log p(continuation | context), both token ids; the context may be empty, the continuation may not."""
        if not continuation:
            raise ValueError("the continuation is empty; give at least one token.")
        value, variance, samples, states, first = 0.0, 0.0, 0, 0, True
        for place, block in enumerate(self._blocks(context, continuation)):
            cache = self._cache_before(context + continuation, block.number, keep=place == 0)
            subsets, orders = self._subsets(len(block.scored), block.number)
            scores = self._scores(block, cache, subsets)
            if place == 0:
                first = self._first_pick_agrees(block, cache)
            mean, error_variance = self._combine(scores, orders, len(block.scored))
            value, variance, states = value + mean, variance + error_variance, states + len(subsets)
            samples = max(samples, self.samples if error_variance > 0 or self._sampled(orders) else 0)
        return LikelihoodEstimate(value, math.sqrt(variance), samples, states, first)

    def _blocks(self, context: list[int], continuation: list[int]) -> Iterator[_Block]:
        tokens, length = context + continuation, self.block_length
        for index in range(len(context) // length, -(-len(tokens) // length)):
            start = index * length
            own = tokens[start : start + length]
            yield _Block(index, own, list(range(max(0, len(context) - start), len(own))))

    def _subsets(self, n: int, block: int) -> tuple[list[frozenset[int]], list[list[int]] | None]:
        """The revealed subsets to evaluate (of 0..n-1), and the sampled orders, `None` where all subsets are taken."""
        if self.order == "sequential":
            orders = [list(range(n))]
        elif 2**n - 1 <= self.samples * n:
            return [frozenset(s) for size in range(n) for s in combinations(range(n), size)], None
        else:
            rng = random.Random(f"{self.seed}/{block}/{n}")
            orders = [rng.sample(range(n), n) for _ in range(self.samples)]
        return list(dict.fromkeys(frozenset(o[:k]) for o in orders for k in range(n))), orders

    def _sampled(self, orders: list[list[int]] | None) -> bool:
        return orders is not None and self.order == "random"

    def _combine(
        self, scores: dict[frozenset[int], Tensor], orders: list[list[int]] | None, n: int
    ) -> tuple[float, float]:
        """A block's log-likelihood and the variance of its error; `scores[S]` is `[n]` log p(x_i | x_S)."""
        if orders is None:
            total = 0.0
            for subset, score in scores.items():
                rest = [i for i in range(n) if i not in subset]
                total += float(score[rest].sum()) / (math.comb(n, len(subset)) * len(rest))
            return total, 0.0
        if self.order == "sequential":
            (order,) = orders
            return sum(float(scores[frozenset(order[:k])][order[k]]) for k in range(n)), 0.0
        values = [sum(float(scores[frozenset(order[:k])][order[k:]].mean()) for k in range(n)) for order in orders]
        mean = sum(values) / len(values)
        if not math.isfinite(mean):
            return mean, 0.0
        return mean, sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values)

    def _scores(
        self, block: _Block, cache: _PrefixCache, subsets: list[frozenset[int]]
    ) -> dict[frozenset[int], Tensor]:
        """`[n]` float64 log-probabilities of the block's scored tokens, for every revealed subset."""
        length, device = self.block_length, self.model.device
        scored = torch.tensor(block.scored, device=device)
        truth = torch.tensor([block.tokens[i] for i in block.scored], device=device)
        base = self._masked_block(block)
        scores: dict[frozenset[int], Tensor] = {}
        for begin in range(0, len(subsets), self.batch_size):
            chunk = subsets[begin : begin + self.batch_size]
            states = base.repeat(len(chunk), 1)
            for row, subset in enumerate(chunk):
                shown = scored[sorted(subset)]
                states[row, shown] = truth[sorted(subset)]
            hidden = self._backbone(states, block.number * length, cache)
            log_p = self._log_probabilities(hidden[:, scored])
            picked = log_p.gather(-1, truth.expand(len(chunk), -1)[..., None])[..., 0].double().cpu()
            scores.update(zip(chunk, picked, strict=True))
        return scores

    def _first_pick_agrees(self, block: _Block, cache: _PrefixCache) -> bool:
        """Whether the most confident position of the block, continuation all masked, holds the right token."""
        states = self._masked_block(block)[None]
        log_p = self._log_probabilities(self._backbone(states, block.number * self.block_length, cache))[0]
        confidence, token = log_p[block.scored[0] :].max(dim=-1)
        offset = block.scored[0] + int(confidence.argmax())
        return offset not in block.scored or int(token[offset - block.scored[0]]) == block.tokens[offset]

    def _masked_block(self, block: _Block) -> Tensor:
        """`[block_length]`: the block's context tokens, everything else masked."""
        ids = torch.full((self.block_length,), self.model.config.mask_token_id, device=self.model.device)
        known = block.tokens[: block.scored[0]]
        ids[: len(known)] = torch.tensor(known, dtype=torch.int64, device=ids.device)
        return ids

    def _log_probabilities(self, hidden: Tensor) -> Tensor:
        """`[..., vocab]` float32 log-probabilities; the mask token has none."""
        logits = self.model.lm_head(hidden).float()
        logits[..., self.model.config.mask_token_id] = -torch.inf
        return logits.log_softmax(dim=-1)

    def _backbone(self, states: Tensor, start: int, cache: _PrefixCache) -> Tensor:
        positions = start + torch.arange(states.shape[1], device=states.device)
        return self.model.backbone(states, positions.expand(states.shape), None, cache)

    def _cache_before(self, tokens: list[int], block: int, keep: bool) -> _PrefixCache:
        """The cache of the blocks before `block`; `keep` remembers it for the next continuation of this context."""
        end = block * self.block_length
        shared = len(self._prefix)
        if self._prefix != tokens[:shared] or shared > end:
            self._prefix, self._cache, shared = [], _PrefixCache(), 0
        cache = _PrefixCache(self._cache.layers)
        step = max(1, _PREFILL_TOKENS // self.block_length) * self.block_length
        for begin in range(shared, end, step):
            self._store(tokens[begin : min(begin + step, end)], begin, cache)
        if keep:
            self._prefix, self._cache = tokens[:end], cache
        return cache

    def _store(self, tokens: list[int], start: int, cache: _PrefixCache) -> None:
        """Adds clean, block-aligned tokens to a cache, under the block-causal mask."""
        device = self.model.device
        ids = torch.tensor([tokens], device=device)
        positions = torch.arange(start + len(tokens), device=device)[None]
        blocks = positions // self.block_length
        keys = TokenLayout(torch.zeros_like(blocks), blocks)
        queries = TokenLayout(torch.zeros_like(ids), blocks[:, start:])
        mask = self.model.attention_mask(may_see(queries, keys))
        cache.storing = True
        self.model.backbone(ids, positions[:, start:], mask, cache)
        cache.storing = False


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
