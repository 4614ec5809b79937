"""Run under torchrun: loads a model tensor-parallel, and rank 0 writes what it computes."""

import sys

import torch
import torch.distributed as dist

from modeling_mrp.modeling_mrp import MRPForCausalLM

MODES = ("none", "speculative", "direct", "remask")
PROMPT = torch.tensor([[12, 8, 40, 77, 5]])


def local_shape(parameter: torch.Tensor) -> list[int]:
    return list(parameter.to_local().shape if hasattr(parameter, "to_local") else parameter.shape)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = MRPForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto").eval()
    model.config._experts_implementation = "eager"
    with torch.no_grad():
        output = model(PROMPT, revealed_ids=PROMPT[None])
    result = {
        "logits": output.logits,
        "residual_logits": output.residual_logits,
        "q_proj": local_shape(model.model.layers[0].self_attn.q_proj.weight),
        "head_q_proj": local_shape(model.mrp.layers[0].self_attn.q_proj.weight),
    }
    for mode in MODES:
        result[mode] = model.generate(PROMPT, mrp_mode=mode, max_new_tokens=12)
    if dist.get_rank() == 0:
        torch.save(result, sys.argv[2])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
