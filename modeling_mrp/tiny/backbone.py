"""Trains the tiny backbone: seeded, resumable, about 25 minutes on two cores.

Every step draws its problems and its noise from its own number, so an interrupted run continues exactly.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..block_attention import may_see
from ..configuration_mrp import MRPConfig
from ..modeling_mrp import MRPForCausalLM
from .batches import BLOCK, SEQUENCE, Batch, make_batch
from .task import Problem, drills, is_correct, problems
from .tokenizer import build_tokenizer, vocabulary

STEPS = 3000
BATCH = 32
COPIES = 2
_WARM_UP = 100
_DECAY_FROM = 0.65
_CHECKPOINT_EVERY = 250
_EVALUATE_EVERY = 500


def tiny_config(head_layers: int = 1) -> MRPConfig:
    """Eight thin layers, so that a head call is cheap beside a backbone forward, as at real scale."""
    return MRPConfig(
        vocab_size=-(-len(vocabulary()) // 64) * 64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        tie_word_embeddings=True,
        block_size=BLOCK,
        pad_token_id=0,
        eos_token_id=1,
        mask_token_id=2,
        num_nextn_predict_layers=head_layers,
    )


def training_stream(step: int, steps: int) -> Iterator[Problem]:
    """Problems of one step: 60 % drills in the first half of training, 15 % later."""
    share = 0.6 if step < steps // 2 else 0.15
    worded, bare = problems("train", step), drills(step)
    place = 0
    while True:
        # Interleaved by position, so that the share holds in every batch.
        yield next(bare) if int((place + 1) * share) > int(place * share) else next(worded)
        place += 1


def learning_rate_factor(step: int, steps: int) -> float:
    """Warm-up, constant, then linear decay to a hundredth."""
    if step < _WARM_UP:
        return (step + 1) / _WARM_UP
    decay_from = int(steps * _DECAY_FROM)
    if step < decay_from:
        return 1.0
    return 1.0 - 0.99 * (step - decay_from) / (steps - decay_from)


def train_backbone(folder: Path, steps: int = STEPS, seed: int = 0, compile_step: bool = True) -> MRPForCausalLM:
    """Trains, with checkpoints in `folder`; continues from the last one; returns the model in float32, eval mode."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    config = tiny_config()
    config._attn_implementation = "eager"
    model = MRPForCausalLM(config)
    parameters = {n: p for n, p in model.named_parameters() if not n.startswith("mrp.")}
    matrices = [p for n, p in parameters.items() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in parameters.items() if p.ndim != 2 or "embed" in n]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    checkpoint = folder / "backbone.pt"
    folder.mkdir(parents=True, exist_ok=True)
    begin = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        begin = saved["step"]
    loss_of = torch.compile(_loss) if compile_step else _loss
    bar = tqdm(range(begin, steps), initial=begin, total=steps, desc="backbone", mininterval=5)
    model.train()
    for step in bar:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        batch = make_batch(training_stream(step, steps), tokenizer, BATCH, COPIES, generator)
        factor = learning_rate_factor(step, steps)
        for rate, group in zip(rates, (g for o in optimizers for g in o.param_groups), strict=True):
            group["lr"] = rate * factor
        loss = loss_of(model, batch.ids, batch.labels, batch.positions, _mask(batch))
        loss.backward()
        nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0:
            bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
        if (step + 1) % _CHECKPOINT_EVERY == 0 or step + 1 == steps:
            states = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
            torch.save({**states, "step": step + 1}, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)
        if (step + 1) % _EVALUATE_EVERY == 0 and step + 1 < steps:
            bar.write(f"step {step + 1}: loss {loss.item():.4f}, static accuracy {accuracy(model, 100):.1%} of 100")
            model.train()
    return model.eval()


def _mask(batch: Batch) -> Tensor:
    """Additive bfloat16 mask: a noisy copy sees itself and the clean copy, never another noisy copy."""
    allowed = may_see(batch.layout, batch.layout)
    allowed &= (batch.copy[:, :, None] == batch.copy[:, None, :]) | (batch.copy[:, None, :] == 0)
    return torch.zeros(allowed.shape, dtype=torch.bfloat16).masked_fill_(~allowed, -1e9)[:, None]


def _loss(model: MRPForCausalLM, ids: Tensor, labels: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
    """Cross-entropy over the masked positions of the noisy copies."""
    # bfloat16 under torch.compile with plain batched products is the fastest form on CPU.
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.backbone(ids, positions, mask)
        logits = model.lm_head(hidden[:, SEQUENCE:].flatten(0, 1)).float()
    return nn.functional.cross_entropy(logits, labels[:, SEQUENCE:].flatten(), ignore_index=-100)


@torch.no_grad()
def accuracy(model: MRPForCausalLM, count: int, seed: int = 0, batch: int = 50, **options: object) -> float:
    """Share of held-out problems that plain static decoding (or `options`) solves."""
    tokenizer = build_tokenizer()
    training = model.training
    model.eval()
    chosen = list(islice(problems("held-out", seed), count))
    right = 0
    for begin in range(0, count, batch):
        part = chosen[begin : begin + batch]
        chats = [[{"role": "user", "content": problem.question}] for problem in part]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
        )
        arguments = {"mrp_mode": "none", "max_new_tokens": 80, **options}
        output = model.generate(**inputs, **arguments)
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(is_correct(text, problem) for text, problem in zip(texts, part, strict=True))
    model.train(training)
    return right / count
