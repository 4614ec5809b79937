"""What the shared clean pass and the chunked loss save: `python -m benchmarks.training` writes results/training.md.

Speed, in processor seconds, which other processes on the machine disturb least: one training step (forward and
backward, head in float32) in the shared layout against the plain packed layout, same model, batch and noise,
alternating within one process. Memory: the loss and its gradient at the real vocabulary,
chunked against plain, each in a process of its own, by the growth of the peak resident set.
"""

import argparse
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers

from modeling_mrp import MRPConfig, MRPForCausalLM
from modeling_mrp.noising import IGNORED
from modeling_mrp.residual_kl import residual_kl
from modeling_mrp.training.trainer import freeze_backbone

RESULT = Path(__file__).resolve().parent / "results" / "training.md"
VOCABULARY, TOKENS, HIDDEN = 151_936, 1024, 128
_REPETITIONS = 4


def model_and_batch(rows: int, tokens: int) -> tuple[MRPForCausalLM, dict[str, torch.Tensor]]:
    """A backbone of the tiny model's shape and a batch whose first quarter is the prompt."""
    torch.manual_seed(0)
    config = MRPConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, block_size=8, mask_token_id=2, num_nextn_predict_layers=2,
        tie_word_embeddings=True, max_position_embeddings=2048,
    )  # fmt: skip
    model = MRPForCausalLM(config).train()
    torch.nn.init.constant_(model.mrp.norm.weight, 0.3)
    freeze_backbone(model)
    ids = torch.randint(3, 512, (rows, tokens))
    labels = ids.clone()
    labels[:, : tokens // 4] = IGNORED
    return model, {"input_ids": ids, "labels": labels}


def step(model: MRPForCausalLM, batch: dict[str, torch.Tensor], steps: int, layout: str) -> tuple[float, torch.Tensor]:
    """Processor seconds of one step, and the head's flattened gradient."""
    objective = {"steps": steps, "layout": layout, "noise_level": "block", "reveal_rule": "ground_truth"}
    model.zero_grad(set_to_none=True)
    begin = time.process_time()
    model(**batch, objective=objective, noise_seed=1, all_metrics=False).loss.backward()
    seconds = time.process_time() - begin
    return seconds, torch.cat([p.grad.flatten() for p in model.mrp.parameters() if p.grad is not None])


def speed(rows: int, tokens: int) -> list[str]:
    """Table rows: K, seconds of both layouts (the fastest of several), ratio, largest difference of gradients."""
    model, batch = model_and_batch(rows, tokens)
    lines = []
    for steps in (1, 2, 3):
        times: dict[str, list[float]] = {"shared": [], "packed": []}
        gradients = {}
        for repetition in range(_REPETITIONS + 1):
            for layout, measured in times.items():
                seconds, gradients[layout] = step(model, batch, steps, layout)
                if repetition:
                    measured.append(seconds)
        shared, packed = min(times["shared"]), min(times["packed"])
        difference = float((gradients["shared"] - gradients["packed"]).abs().max())
        lines.append(f"| {steps} | {packed:.3f} | {shared:.3f} | {packed / shared:.2f} | {difference:.1e} |")
    return lines


def peak_of_loss(kind: str) -> int:
    """Growth of the peak resident set, in MiB, by one loss with its gradient."""
    torch.manual_seed(0)
    weight = torch.randn(VOCABULARY, HIDDEN) * 0.1
    target = torch.randn(TOKENS, HIDDEN)
    student = (target + 0.1 * torch.randn(TOKENS, HIDDEN)).requires_grad_()
    (student[:1] @ weight[:64].t()).sum().backward()  # libraries load before the measurement
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if kind == "chunked":
        loss = residual_kl(student, target, weight)
    else:
        log_student, log_target = ((h @ weight.t()).log_softmax(-1) for h in (student, target))
        loss = torch.nn.functional.kl_div(log_student, log_target, log_target=True, reduction="none").sum(-1)
    loss.sum().backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024


def memory() -> list[str]:
    """Table rows of `peak_of_loss`, each measured in a fresh process."""
    peaks = {}
    for kind in ("plain", "chunked"):
        line = [sys.executable, "-m", "benchmarks.training", "--loss", kind]
        done = subprocess.run(line, check=True, capture_output=True, text=True, cwd=RESULT.parents[2])
        peaks[kind] = int(done.stdout)
    ratio = peaks["chunked"] / peaks["plain"]
    return [f"| {peaks['plain']} | {peaks['chunked']} | {ratio:.2f} |"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8, help="sequences per batch")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--loss", choices=["plain", "chunked"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.loss:
        sys.stdout.write(str(peak_of_loss(arguments.loss)))
        return
    cpu_lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in cpu_lines if "model name" in line), "unknown processor")
    text = [
        "# Cost of a training step",
        "",
        f"{platform.machine()}, {cpu}, {arguments.threads} threads; torch {torch.__version__}, transformers "
        f"{transformers.__version__}, Python {platform.python_version()}. Made by `python -m benchmarks.training "
        f"--rows {arguments.rows} --tokens {arguments.tokens} --threads {arguments.threads}`.",
        "",
        f"**Shared clean pass.** 8 layers of width 128, head of 2 layers, float32, {arguments.rows} sequences of "
        f"{arguments.tokens} tokens, a quarter of them prompt; forward and backward, processor seconds, the fastest "
        f"of {_REPETITIONS}, layouts alternating. Both layouts have the same loss; the last column is the largest "
        "difference of any gradient.",
        "",
        "| K | packed, s | shared, s | times faster | gradients differ by |",
        "|---|---|---|---|---|",
        *speed(arguments.rows, arguments.tokens),
        "",
        f"**Chunked loss.** Vocabulary {VOCABULARY:,}, {TOKENS:,} tokens, width {HIDDEN}, float32, loss and gradient; "
        "growth of the process's peak resident set.",
        "",
        "| plain, MiB | chunked, MiB | share |",
        "|---|---|---|",
        *memory(),
        "",
    ]
    RESULT.write_text("\n".join(text))


if __name__ == "__main__":
    main()
