"""The workloads of the kernel benchmark: every operation at the shapes of the SDAR models.

A case builds its tensors on any device; on `meta` nothing is allocated, which is enough to compile ahead of time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mrp_kernels
import torch
from mrp_kernels import NoiseKey
from torch import Tensor

from modeling_mrp import MRPConfig
from modeling_mrp.draft_lattice import DraftCalibration
from modeling_mrp.generation_config_mrp import resolve_options
from modeling_mrp.reveal_policies import make_policy


@dataclass(frozen=True)
class Model:
    """Published sizes of one backbone."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    head_dim: int = 128
    vocab: int = 151936


MODELS = (
    Model("1.7B", 2048, 28, 16, 8, 6144),
    Model("4B", 2560, 36, 32, 8, 9728),
    Model("8B", 4096, 36, 32, 8, 12288),
)
MASK_TOKEN = 151669
BLOCK = 16
# batch, segments, prefix
ATTENTION_SHAPES = ((1, 1, 512), (1, 1, 4096), (1, 4, 512), (1, 4, 4096), (1, 16, 4096), (16, 1, 1024), (16, 4, 4096))
HEADLINE_ATTENTION = f"4B, batch 1, 4 x {BLOCK} on 4096"
LOSS_TOKENS = 4096
SHORTLIST = 64


@dataclass(frozen=True)
class Case:
    """One operation at one shape.

    Attributes:
        operation: its name in `mrp_kernels`.
        shape: what the tables print.
        build: device -> the arguments of one call, positional and named.
        bytes_moved: bytes that any implementation must read and write, counted once.
        operations: floating point operations of the matrix products, 2 for a multiply and add.
        backward: whether the gradient belongs to the measurement.
        headline: compared with slow-to-build rivals too (torch.compile, flex attention).
    """

    operation: str
    shape: str
    build: Callable[[torch.device], tuple[tuple, dict]]
    bytes_moved: int
    operations: int = 0
    backward: bool = False
    headline: bool = False

    def call(self, arguments: tuple, options: dict, kernels: str) -> object:
        """Runs the operation's entry."""
        return getattr(mrp_kernels, self.operation)(*arguments, kernels=kernels, **options)


def random(*shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    """Normal draws; on `meta` only the shape."""
    return (torch.randn(*shape, device=device) * scale).to(dtype)


def noise_of(rows: int, device: torch.device) -> NoiseKey:
    order = torch.arange(rows, device=device)
    return NoiseKey(1234, order // BLOCK, order, order * 0)


def statistics_cases(dtype: torch.dtype = torch.bfloat16) -> Iterator[Case]:
    """Greedy, corrected by a residual, sampled, and sampled with top-k and top-p."""
    vocab = MODELS[0].vocab
    variants: tuple[tuple[str, int, dict], ...] = (
        ("greedy", 16, {}),
        ("greedy", 64, {}),
        ("greedy, residual", 64, {"residual": True}),
        ("sampled", 64, {"temperature": 1.0}),
        ("sampled, top-k 50, top-p 0.95", 64, {"temperature": 1.0, "top_k": 50, "top_p": 0.95}),
    )
    for name, rows, options in variants:

        def build(device: torch.device, rows: int = rows, options: dict = options) -> tuple[tuple, dict]:
            chosen = {"mask_token_id": MASK_TOKEN, **options}
            if chosen.pop("residual", False):
                chosen["residual"] = random(rows, vocab, device=device, dtype=dtype)
            if "temperature" in chosen:
                chosen["noise"] = noise_of(rows, device)
            return (random(rows, vocab, device=device, dtype=dtype, scale=3.0),), chosen

        yield Case(
            "reveal_statistics",
            f"{rows} x {vocab}, {name}",
            build,
            bytes_moved=rows * vocab * dtype.itemsize * (2 if options.get("residual") else 1),
            headline=rows == 64 and "residual" not in options,
        )


def attention_arguments(
    model: Model, batch: int, segments: int, prefix: int, device: torch.device
) -> tuple[tuple, dict]:
    """A chain of segments: each sees the earlier ones of its row. One that is alone is committed too."""
    tokens, dim = segments * BLOCK, model.head_dim
    query = random(batch, tokens, model.heads, dim, device=device).transpose(1, 2)
    key, value = (random(batch, tokens, model.kv_heads, dim, device=device).transpose(1, 2) for _ in range(2))
    capacity = prefix + 2 * BLOCK
    cache = {
        name: random(batch, model.kv_heads, capacity, dim, device=device) for name in ("cache_key", "cache_value")
    }
    chain = torch.tril(torch.ones(segments, segments, device=device, dtype=torch.bool)).expand(batch, -1, -1)
    options = {
        **cache,
        "prefix_length": torch.full((batch,), prefix, device=device),
        "visibility": mrp_kernels.visibility_bits(chain),
        "block": BLOCK,
        "commit": torch.zeros(batch, device=device, dtype=torch.int64) if segments == 1 else None,
        "max_prefix_length": prefix,
    }
    return (query, key, value), options


def attention_cases() -> Iterator[Case]:
    """One, four and sixteen segments, short and long prefixes, alone and batched."""
    for model in MODELS[:2]:  # 8B has the attention shape of 4B
        for batch, segments, prefix in ATTENTION_SHAPES:
            tokens = segments * BLOCK
            keys = prefix + tokens

            def build(device: torch.device, model=model, batch=batch, segments=segments, prefix=prefix):
                return attention_arguments(model, batch, segments, prefix, device)

            shape = f"{model.name}, batch {batch}, {segments} x {BLOCK} on {prefix}"
            yield Case(
                "packed_block_attention",
                shape,
                build,
                bytes_moved=2 * batch * model.head_dim * (2 * model.kv_heads * keys + 2 * model.heads * tokens),
                operations=4 * batch * model.heads * tokens * keys * model.head_dim,
                headline=shape == HEADLINE_ATTENTION,
            )


def shortlist_cases() -> Iterator[Case]:
    """Selecting 64 tokens for 16 positions, and correcting them."""
    rows, size = BLOCK, SHORTLIST
    vocab = MODELS[0].vocab
    yield Case(
        "shortlist",
        f"{rows} x {vocab}, {size} tokens",
        lambda device: (
            (random(rows, vocab, device=device, scale=3.0), size),
            {"mask_token_id": MASK_TOKEN},
        ),
        bytes_moved=rows * vocab * 2,
        headline=True,
    )
    for model in MODELS:
        for sampled in (False, True):

            def build(device: torch.device, model=model, sampled=sampled):
                list_ = mrp_kernels.Shortlist(
                    torch.randperm(vocab, device=device)[: rows * size].view(rows, size),
                    random(rows, size, device=device, dtype=torch.float32),
                    random(rows, device=device, dtype=torch.float32),
                    random(rows, device=device, dtype=torch.float32),
                )
                residual = random(rows, model.hidden, device=device)
                weight = random(vocab, model.hidden, device=device, scale=0.02)
                options = {"temperature": 1.0, "top_p": 0.95, "noise": noise_of(rows, device)} if sampled else {}
                return (list_, residual, weight), options

            yield Case(
                "shortlist_residual",
                f"{model.name}, {rows} x {size} tokens" + (", sampled, top-p 0.95" if sampled else ""),
                build,
                bytes_moved=rows * size * model.hidden * 2,
                operations=2 * rows * size * model.hidden,
                headline=model.name == "4B" and not sampled,
            )


def input_cases() -> Iterator[Case]:
    """The head's input and the first steps of its attention, for one and for four blocks."""
    for model in MODELS:
        for tokens in (16, 32, 64):
            hidden, dim = model.hidden, model.head_dim

            def build(device: torch.device, model=model, tokens=tokens):
                hidden = model.hidden
                return (
                    torch.randint(model.vocab, (1, tokens), device=device),
                    random(1, tokens, hidden, device=device),
                    random(model.vocab, hidden, device=device, scale=0.02),
                    random(hidden, device=device),
                    random(hidden, device=device),
                    random(hidden, 2 * hidden, device=device, scale=0.02),
                ), {}

            yield Case(
                "mrp_input",
                f"{model.name}, {tokens} tokens",
                build,
                bytes_moved=2 * (2 * hidden * hidden + 3 * tokens * hidden),
                operations=4 * tokens * hidden * hidden,
                headline=model.name == "4B" and tokens == BLOCK,
            )

            def build_rope(device: torch.device, model=model, tokens=tokens):
                dim = model.head_dim
                return (
                    random(1, tokens, model.heads, dim, device=device),
                    random(1, tokens, model.kv_heads, dim, device=device),
                    random(dim, device=device),
                    random(dim, device=device),
                    random(1, tokens, dim, device=device),
                    random(1, tokens, dim, device=device),
                ), {}

            yield Case(
                "qk_norm_rope",
                f"{model.name}, {tokens} tokens",
                build_rope,
                bytes_moved=2 * tokens * dim * (2 * (model.heads + model.kv_heads) + 2),
                headline=model.name == "4B" and tokens == BLOCK,
            )


def lattice_cases() -> Iterator[Case]:
    """Choosing the next forward's states, for one row and for sixteen. Latency is all there is to it: few bytes."""
    for rows, budget in ((1, 8), (1, 16), (16, 8)):
        block, depth = BLOCK, budget - 1

        def build(device: torch.device, rows: int = rows, budget: int = budget) -> tuple[tuple, dict]:
            options = resolve_options({"mrp_mode": "speculative", "block_length": BLOCK}, MRPConfig())
            odds = random(rows, 1, BLOCK, device=device, dtype=torch.float32, scale=2.0)
            tokens = torch.randint(MASK_TOKEN, (2, rows, 1, BLOCK), device=device)
            choice = mrp_kernels.PositionStatistics(tokens[0], odds.sigmoid(), odds, odds.abs())
            generator = torch.Generator().manual_seed(0)
            multipliers = torch.randint(-(2**62), 2**62, (BLOCK,), generator=generator) * 2 + 1
            start = torch.zeros(rows, device=device, dtype=torch.int64)
            return (
                torch.full((rows, BLOCK), -1, device=device),
                start,
                start,
                start == 0,
                mrp_kernels.DraftStatistics(choice, tokens[1], 1),
            ), {
                "policy": make_policy(options),
                "depth": budget - 1,
                "budget": budget,
                "multipliers": multipliers.to(device),
                "perturbation": DraftCalibration.from_config(None).perturbation(BLOCK, device),
            }

        yield Case(
            "lattice_states",
            f"{rows} x {budget} states of {block}",
            build,
            bytes_moved=rows * (budget * (block + 3) * 8 + 5 * block * 8) + 96 * (block * 16 + (depth + 1) * 8),
            headline=rows == 1 and budget == 8,
        )


def loss_cases() -> Iterator[Case]:
    """The training loss with its gradient."""
    tokens = LOSS_TOKENS
    for model in MODELS[1:2]:

        def build(device: torch.device, model=model):
            student = random(tokens, model.hidden, device=device).requires_grad_()
            return (
                student,
                random(tokens, model.hidden, device=device),
                random(model.vocab, model.hidden, device=device, scale=0.02),
            ), {}

        yield Case(
            "residual_kl",
            f"{model.name}, {tokens} tokens x {model.vocab}",
            build,
            bytes_moved=2 * (3 * tokens * model.hidden + model.vocab * model.hidden),
            operations=6 * tokens * model.vocab * model.hidden,
            backward=True,
            headline=True,
        )


def verification_cases() -> Iterator[Case]:
    """The eight states of a round: a policy that reveals one position a step, and one that weighs all of them."""
    segments = 8
    for strategy in ("low_confidence_static", "entropy_bounded"):
        for rows in (1, 16):

            def build(device: torch.device, strategy=strategy, rows=rows):
                options = {"block_length": BLOCK, "mrp_mode": "none", "remasking_strategy": strategy}
                shape = (rows, segments, BLOCK)
                ids = torch.where(torch.rand(shape, device=device) < 0.5, -1, 7)
                step, parent = (torch.full(shape[:2], number, device=device) for number in (0, -1))
                alive = torch.ones(shape[:2], device=device, dtype=torch.bool)
                measures = (torch.rand(shape, device=device) for _ in range(3))
                statistics = mrp_kernels.PositionStatistics(torch.full(shape, 7, device=device), *measures)
                policy = make_policy(resolve_options(options, MRPConfig()))
                total = torch.rand(shape, device=device)
                return (ids, step, parent, alive, statistics, total, policy), {"compare_steps": False}

            # Of a segment: ids, token and four measures; step, parent, alive; the host's copy of these. Of a row: the
            # known state, what follows it, the finished one, and the host's copy.
            per_segment = BLOCK * (2 * 8 + 4 * 4) + 2 * 8 + 1 + 3 * 8
            per_row = BLOCK * (6 * 8 + 3 * 4) + 8 * 8 + 1
            yield Case(
                "verify_states",
                f"{rows} x {segments} x {BLOCK}, {strategy}",
                build,
                bytes_moved=rows * (segments * per_segment + per_row),
                headline=rows == 1 and strategy == "low_confidence_static",
            )


def all_cases() -> Iterator[Case]:
    """Every case."""
    yield from statistics_cases()
    yield from attention_cases()
    yield from shortlist_cases()
    yield from input_cases()
    yield from lattice_cases()
    yield from loss_cases()
    yield from verification_cases()
