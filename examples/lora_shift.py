"""A head on a backbone that moves: LoRA on a shifted task, what the old head still drafts there, and its recovery.

    python examples/lora_shift.py --model hub_configs/sdar-tiny-mrp --work work/lora_shift

The shift: another notation of the equations, `(20 + 4) == 24`, or, harder, from the right, `24 = 20 + 4`. Two runs of
mrp-train: an adapter on the backbone by its own masked cross-entropy, then the head, on the adapted backbone.
Drafts are counted as lossless tokens per backbone forward, with 8 states.
"""

import argparse
import json
import re
from itertools import islice
from pathlib import Path

import torch
from peft import PeftModel
from tqdm import tqdm

from modeling_mrp import MRPForCausalLM
from modeling_mrp.head_artifact import load_head
from modeling_mrp.tiny.task import Problem, is_correct, problems
from modeling_mrp.tiny.tokenizer import build_tokenizer
from modeling_mrp.training.adapters import base_of
from modeling_mrp.training.config import config_from
from modeling_mrp.training.run import train

_EQUATION = re.compile(r"(\d+ [-+*] \d+) = (\d+)")
_SHIFTS = {"notation": r"(\1) == \2", "reversed": r"\2 = \1"}


def shifted(problem: Problem, shift: str) -> Problem:
    """The problem with its equations in the other notation."""
    return Problem(problem.question, _EQUATION.sub(_SHIFTS[shift], problem.solution), problem.answer)


def run(backbone: Path, output: Path, data: Path, steps: int, **sections: dict) -> None:
    """One run of mrp-train."""
    values = {
        "output": str(output),
        "save": "head",
        "model": {"path": str(backbone)},
        "head": {"start": "checkpoint"},
        "data": {"train": str(data), "max_length": 320},
        "trainer": {
            "per_device_train_batch_size": 3, "max_steps": steps, "learning_rate": 3e-3, "save_strategy": "no",
            "use_cpu": not torch.cuda.is_available(), "dataloader_pin_memory": False,
        },
    }  # fmt: skip
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}  # type: ignore[dict-item]
    train(config_from(values))


@torch.no_grad()
def measure(model: torch.nn.Module, chosen: list[Problem], drafter: str) -> tuple[float, float]:
    """(accuracy, lossless tokens per forward) on the problems."""
    tokenizer = build_tokenizer()
    base_of(model).eval()
    inputs = tokenizer.apply_chat_template(
        [[{"role": "user", "content": problem.question}] for problem in chosen],
        add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True,
    )  # fmt: skip
    output = model.generate(  # type: ignore[operator]
        **inputs, max_new_tokens=80, return_dict_in_generate=True, mrp_mode="speculative", draft_states=8,
        drafter=drafter,
    )  # fmt: skip
    texts = tokenizer.batch_decode(output.sequences[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    right = sum(is_correct(text, problem) for text, problem in zip(texts, chosen, strict=True))
    return right / len(chosen), int(output.new_tokens.sum()) / int(output.backbone_forwards.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("hub_configs/sdar-tiny-mrp"))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--shift", choices=list(_SHIFTS), default="notation")
    parser.add_argument("--adapter-steps", type=int, default=200)
    parser.add_argument("--head-steps", type=int, default=150)
    parser.add_argument("--problems", type=int, default=100)
    arguments = parser.parse_args()
    work = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    data = work / "shifted.jsonl"
    rows = (shifted(problem, arguments.shift) for problem in islice(problems("train", 20_000_000), 4000))
    data.write_text("".join(json.dumps({"prompt": row.question, "response": row.solution}) + "\n" for row in rows))
    adapter = {"adapter": str(work / "adapter" / "adapter")}
    run(
        arguments.model, work / "adapter", data, arguments.adapter_steps,
        model={"lora_rank": 8}, objective={"loss": "denoising", "copies": 2},
    )  # fmt: skip
    run(
        arguments.model, work / "head", data, arguments.head_steps,
        model=adapter, objective={"copies": 2, "supervise_revealed": 0.3},
    )  # fmt: skip

    before = list(islice(problems("held-out", 0), arguments.problems))
    after = [shifted(problem, arguments.shift) for problem in before]
    lines = []
    for name, adapted, head, chosen in (
        ("backbone, its head, its task", False, None, before),
        ("adapted backbone, old head, shifted task", True, None, after),
        ("adapted backbone, head trained on", True, work / "head", after),
    ):
        model = MRPForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
        if head is not None:
            # The fingerprint leaves the adapter out: the backbone below it is the same.
            load_head(model, head)
        decoder = PeftModel.from_pretrained(model, adapter["adapter"]) if adapted else model
        accuracy, with_head = measure(decoder, chosen, "head")
        _, without = measure(decoder, chosen, "zero")
        speed = f"tokens per forward: head {with_head:.3f}, none {without:.3f}"
        lines.append(f"{name:42} accuracy {accuracy:.1%}  {speed}")
    for line in lines:
        tqdm.write(line)


if __name__ == "__main__":
    main()
