"""Tiny checkpoints in the official layouts, written the way the publishers write them, without this package's code."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB, MASK, END_OF_TEXT, TURN_START, TURN_END = 272, 259, 256, 257, 258
BLOCK = 4
PRINTABLE = 94  # ids below: the bytes ! to ~
DENSE = {
    "architectures": ["SDARMRPForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_sdar.SDARConfig",
        "AutoModelForCausalLM": "modeling_sdar.SDARMRPForCausalLM",
    },
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_implementation": "flex_attention",
    "block_size": BLOCK,
    "bos_token_id": END_OF_TEXT,
    "debug": False,
    "eos_token_id": END_OF_TEXT,
    "ep_size": 1,
    "fuse_cross_entropy": True,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "mask_token_id": MASK,
    "max_position_embeddings": 512,
    "max_window_layers": 2,
    "micro_forward": False,
    "model_type": "sdar",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_mrp_heads": 1,
    "num_nextn_predict_layers": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.52.4",
    "use_cache": False,
    "use_sliding_window": False,
    "vocab_size": VOCAB,
}
EXPERTS = {
    "architectures": ["SDARMoeForCausalLM"],
    "model_type": "sdar_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GENERATION = {
    "bos_token_id": END_OF_TEXT,
    "do_sample": True,
    "eos_token_id": [TURN_END, END_OF_TEXT],
    "pad_token_id": END_OF_TEXT,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
}
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def layer_shapes(c: dict, prefix: str, experts: bool = False) -> dict[str, tuple[int, ...]]:
    hidden, head, mlp = c["hidden_size"], c["head_dim"], c["intermediate_size"]
    q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
    }
    if experts:
        shapes["mlp.gate.weight"] = (c["num_experts"], hidden)
    wide = c["moe_intermediate_size"] if experts else mlp
    for part in [f"experts.{e}." for e in range(c["num_experts"])] if experts else [""]:
        shapes[f"mlp.{part}gate_proj.weight"] = (wide, hidden)
        shapes[f"mlp.{part}up_proj.weight"] = (wide, hidden)
        shapes[f"mlp.{part}down_proj.weight"] = (hidden, wide)
    return {prefix + name: shape for name, shape in shapes.items()}


def official_shapes(c: dict, head: bool = True) -> dict[str, tuple[int, ...]]:
    hidden = c["hidden_size"]
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], hidden)
    for index in range(c["num_hidden_layers"]):
        shapes.update(layer_shapes(c, f"model.layers.{index}.", experts="num_experts" in c))
    if head:
        top = "mrp_modules.0.model."
        shapes.update({top + n: (hidden,) for n in ("enorm.weight", "hnorm.weight", "norm.weight")})
        shapes[top + "eh_proj.weight"] = (hidden, 2 * hidden)
        for index in range(c["num_nextn_predict_layers"]):
            shapes.update(layer_shapes(c, f"{top}layers.{index}."))
    return shapes


def random_tensors(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights lively enough that decoding depends on every part: norms about one, matrices of unit gain."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            return (1 + 0.1 * noise).to(dtype)
        scale = 3.0 if name == "lm_head.weight" else 1.0
        matrix = scale * noise / shape[-1] ** 0.5
        if name == "lm_head.weight":
            # Only printable ASCII is ever said: text can be compared, and answers run to their full length.
            matrix[PRINTABLE:] = 0
        return matrix.to(dtype)

    return {name: draw(name, shape) for name, shape in shapes.items()}


def write_shards(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    names = list(tensors)
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[number::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(folder: Path, with_mask: bool = True) -> None:
    """A byte-level tokenizer in Qwen's file layout, with the official files' two names for the mask token."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = [chr(b) for b in visible] + [chr(256 + n) for n in range(256 - len(visible))]
    (folder / "vocab.json").write_text(json.dumps({s: i for i, s in enumerate(symbols)}, ensure_ascii=False))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    added = {"<|endoftext|>": END_OF_TEXT, "<|im_start|>": TURN_START, "<|im_end|>": TURN_END}
    names = {**added, "<|MASK|>": MASK} if with_mask else added
    decoder = {
        str(i): {
            "content": n,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for n, i in names.items()
    }
    config = {
        "added_tokens_decoder": decoder,
        "additional_special_tokens": list(names)[1:],
        "auto_map": {"AutoTokenizer": ["tokenization_qwen2.Qwen2Tokenizer", None]},
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "model_max_length": 512,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    if with_mask:
        config["mask_token"] = "<|MASK|>"
        (folder / "added_tokens.json").write_text(json.dumps({**added, "<MASK>": MASK}))
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False))


def write_checkpoint(
    folder: Path,
    *,
    config: dict | None = None,
    experts: bool = False,
    head: bool = True,
    shards: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    tokenizer: bool = True,
) -> dict[str, torch.Tensor]:
    """Writes a checkpoint in the official layout and returns its tensors by their official names."""
    folder.mkdir(parents=True, exist_ok=True)
    full = {**DENSE, **(EXPERTS if experts else {}), **(config or {})}
    if not head:
        full = {k: v for k, v in full.items() if k not in ("num_nextn_predict_layers", "num_mrp_heads")}
        full["architectures"] = ["SDARForCausalLM"]
    tensors = random_tensors(official_shapes(full, head), dtype)
    (folder / "config.json").write_text(json.dumps(full, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    write_shards(folder, tensors, shards)
    if tokenizer:
        write_tokenizer(folder)
    return tensors
