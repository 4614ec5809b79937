"""Inputs that the tests of the twins and of the kernels share."""

import torch
from mrp_kernels import DraftStatistics, NoiseKey, Perturbation, PositionStatistics
from torch import Tensor

from benchmarks.random_models import random_config
from modeling_mrp.generation_config_mrp import resolve_options
from modeling_mrp.reveal_policies import RevealPolicy, make_policy

MARGIN = 37


def inside_nan(tensor: Tensor) -> Tensor:
    """The same values as a view whose neighbours in memory are all NaN: a read outside shows in the result."""
    shape = (*tensor.shape[:-2], tensor.shape[-2] + 2, tensor.shape[-1] + MARGIN)
    buffer = torch.full(shape, torch.nan, dtype=tensor.dtype)
    view = buffer[..., 1:-1, : tensor.shape[-1]]
    return view.copy_(tensor)


def logits_of(rows: int, vocab: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random logits with a near-certain row, a tied row, a row with impossible tokens and one that is flat."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 4
    logits[0, vocab // 3] = 45.0
    logits[1 % rows, [2, vocab // 2, vocab - 1]] = 30.0
    if rows > 2:
        logits[2, ::3] = -torch.inf
    if rows > 3:
        logits[3] = 1.5
    return inside_nan(logits.to(dtype))


def noise_of(rows: int, seed: int = 2**40 + 17) -> NoiseKey:
    order = torch.arange(rows)
    return NoiseKey(seed, order % 3, 1000 + order, order // 2)


def attention_inputs(
    batch: int,
    heads: int,
    kv_heads: int,
    segments: int,
    block: int,
    dim: int,
    prefixes: list[int],
    dtype: torch.dtype,
    capacity: int | None = None,
) -> tuple[tuple[Tensor, Tensor, Tensor], dict]:
    """Query, key and value as projections leave them (heads behind tokens); a cache that is NaN past its prefix."""
    generator = torch.Generator().manual_seed(segments * 100 + block)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    tokens = segments * block
    query = draw(batch, tokens, heads, dim).transpose(1, 2)
    key, value = (draw(batch, tokens, kv_heads, dim).transpose(1, 2) for _ in range(2))
    capacity = max(prefixes) + block if capacity is None else capacity
    caches = [torch.full((batch, kv_heads, capacity, dim), torch.nan, dtype=dtype) for _ in range(2)]
    for row, length in enumerate(prefixes):
        for cache in caches:
            cache[row, :, :length] = draw(kv_heads, length, dim)
    return (query, key, value), {
        "cache_key": caches[0],
        "cache_value": caches[1],
        "prefix_length": torch.tensor(prefixes),
        "visibility": torch.rand(batch, segments, segments, generator=generator) < 0.4,
        "block": block,
    }


# batch, heads, kv_heads, segments, block, dim, prefixes: one head and grouped heads, odd blocks and head sizes, empty
# and unequal prefixes, as many segments as there are bits.
ATTENTION_SHAPES = (
    (2, 5, 1, 3, 3, 16, [0, 41]),
    (3, 4, 2, 5, 16, 64, [33, 0, 7]),
    (1, 4, 2, 2, 16, 128, [70]),
    (2, 2, 2, 1, 4, 80, [0, 0]),
    (1, 2, 1, 64, 1, 16, [5]),
)


POLICIES = (
    {},
    {"denoising_steps": 1},
    {"denoising_steps": 2},
    {"remasking_strategy": "sequential"},
    {"confidence_resolution": 0.125},
    {"remasking_strategy": "low_confidence_dynamic", "confidence_threshold": 0.7, "denoising_steps": 2},
    {"remasking_strategy": "entropy_bounded", "entropy_bound": 0.5},
    {"remasking_strategy": "entropy_bounded", "entropy_bound": 4.0, "confidence_resolution": 0.25},
)


def policy_with(block: int, **options: object) -> RevealPolicy:
    return make_policy(resolve_options({"mrp_mode": "none", "block_length": block} | options, random_config()))


def lattice_inputs(block: int, depths: int, passes: int, trajectories: int | None) -> tuple[tuple, dict]:
    """Six rows: finished, undrafted, one masked position, all masked, and two between; draws far apart."""
    generator = torch.Generator().manual_seed(block * 100 + depths)

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    rows = 6
    first = torch.randint(0, 60, (rows, block), generator=generator)
    masked = draw(rows, block) < 0.6
    masked[0], masked[3] = False, True
    masked[2] = torch.arange(block) == block // 2
    first = first.masked_fill(masked, -1)
    odds = 4 * draw(rows, depths, block) - 2
    shape = odds.shape
    tokens, others = (torch.randint(0, 60, shape, generator=generator) for _ in range(2))
    drafts = DraftStatistics(PositionStatistics(tokens, odds.sigmoid(), odds, 2 * draw(*shape)), others, passes)
    drafted = torch.tensor([True, False, True, True, True, True])
    start, step = block * torch.arange(3, 3 + rows), torch.arange(rows) % 3
    options = {"multipliers": torch.randint(-(2**62), 2**62, (block,), generator=generator) * 2 + 1}
    if trajectories is not None:
        bins, quantiles = 4, 7
        options["perturbation"] = Perturbation(
            levels=torch.tensor([-1.0, 0.0, 1.0]),
            quantiles=(3 * draw(2, 2, bins, quantiles) - 1.5).sort().values,
            flip_rates=0.4 * draw(2, 2, bins),
            below=torch.randint(0, quantiles - 1, (trajectories, block), generator=generator),
            fraction=draw(trajectories, block),
            flips=draw(trajectories, block),
        )
    return (first, start, step, drafted, drafts), options


STRATEGIES = ("low_confidence_static", "low_confidence_dynamic", "sequential", "entropy_bounded")
# segments, block, steps: odd blocks, several reveals a step, uneven schedules, one segment.
VERIFICATIONS = ((1, 4, 4), (2, 3, 3), (5, 4, 2), (5, 16, 16), (16, 16, 5), (7, 3, 2), (16, 4, 4))


def policy_of(strategy: str, block: int, steps: int, resolution: float = 0.0, threshold: float = 0.5) -> RevealPolicy:
    options = {"block_length": block, "denoising_steps": steps, "remasking_strategy": strategy, "entropy_bound": 0.75}
    options |= {"confidence_threshold": threshold, "confidence_resolution": resolution, "mrp_mode": "none"}
    return make_policy(resolve_options(options, random_config()))


def statistics_of(*shape: int, generator: torch.Generator) -> PositionStatistics:
    """Few tokens and coarse measures, so that states meet, ties occur, and sums are exact."""
    probability, entropy = (torch.randint(1, 16, shape, generator=generator) / 16 for _ in range(2))
    token = torch.randint(0, 3, shape, generator=generator)
    return PositionStatistics(token, probability, torch.logit(probability), 2 * entropy)


def verification_inputs(policy: RevealPolicy, rows: int, segments: int, block: int) -> tuple:
    """`verify_states`' tensors: mostly states that follow from one another, in any order, some of them dead."""
    generator = torch.Generator().manual_seed(segments * 100 + block)
    draw = lambda *shape: torch.rand(*shape, generator=generator)  # noqa: E731
    statistics = statistics_of(rows, segments, block, generator=generator)
    ids = torch.randint(0, 3, (rows, segments, block), generator=generator)
    ids[draw(rows, segments, block) < 0.4] = -1
    ids[0, 0] = 1  # certain and finished
    step, parent = torch.zeros(rows, segments, dtype=torch.int64), torch.full((rows, segments), -1)
    for row in range(rows):
        order = [0, *(1 + torch.randperm(segments - 1, generator=generator)).tolist()]
        for place in range(1, segments):
            child, mother = order[place], order[max(0, place - 1 - int(1.5 * draw(1)))]
            masked = ids[row, mother] == -1
            if not masked.any():
                ids[row, child], parent[row, child] = -1, mother
                continue
            parent[row, child], step[row, child] = parent[row, mother], step[row, mother] + 1 + (draw(1) < 0.1)
            if draw(1) < 0.9:
                own = PositionStatistics(*(part[row, mother] for part in statistics))
                reveal = policy.select(own, masked, step[row, mother])
                ids[row, child] = torch.where(reveal, own.token, ids[row, mother])
    alive = draw(rows, segments) < 0.95
    alive[:, 0] = True
    if rows > 4:
        alive[4, 0] = False
    log_sum_exp = torch.randn(rows, segments, block, generator=generator)
    log_sum_exp[1 % rows, 0, 0] = torch.inf
    return ids, step, parent, alive, statistics, log_sum_exp
