"""The shipped configs, against the official weight indices and the published table of sizes."""

import json
from pathlib import Path

import pytest
from hub_checkpoints import layer_shapes, official_shapes
from transformers import AutoConfig, GenerationConfig

from modeling_mrp.configuration_mrp import MRPConfig
from modeling_mrp.generation_config_mrp import MRPGenerationConfig
from modeling_mrp.hub.tensor_plan import expected_shapes

DATA = Path(__file__).parent / "data"
CONFIGS = Path(__file__).parents[2] / "hub_configs"
# hidden, layers, heads, key/value heads, MLP: the published table.
SIZES = {
    "sdar-1.7b-mrp": (2048, 28, 16, 8, 6144),
    "sdar-4b-mrp": (2560, 36, 32, 8, 9728),
    "sdar-8b-mrp": (4096, 36, 32, 8, 12288),
    "sdar-30b-a3b-mrp": (2048, 48, 32, 4, 6144),
}


@pytest.mark.parametrize("name", SIZES)
def test_shapes_and_defaults(name):
    config = AutoConfig.from_pretrained(CONFIGS / name)
    assert isinstance(config, MRPConfig)
    found = (
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.intermediate_size,
    )
    assert found == SIZES[name]
    assert (config.head_dim, config.vocab_size, config.mask_token_id) == (128, 151936, 151669)
    assert config.rope_parameters["rope_theta"] == 1e6
    assert not config.tie_word_embeddings
    assert config.is_mixture_of_experts == ("a3b" in name)
    generation = MRPGenerationConfig.from_pretrained(CONFIGS / name)
    assert generation.mrp_mode == "speculative"
    assert generation.do_sample is False
    assert generation.max_new_tokens is None
    assert generation.eos_token_id == [151645, 151643]
    # Other tools read the file with transformers' own class.
    assert GenerationConfig.from_pretrained(CONFIGS / name).eos_token_id == [151645, 151643]


@pytest.mark.parametrize("size", ["4b", "8b"])
def test_names_and_bytes_match_the_official_index(size):
    index = json.loads((DATA / f"index.sdar-{size}-chat.json").read_text())
    shapes = expected_shapes(AutoConfig.from_pretrained(CONFIGS / f"sdar-{size}-mrp"))
    backbone = {name: shape for name, shape in shapes.items() if not name.startswith("mrp.")}
    assert backbone.keys() == index["weight_map"].keys()
    count = 0
    for shape in backbone.values():
        count += shape[0] * (shape[1] if len(shape) > 1 else 1)
    assert 2 * count == index["metadata"]["total_size"]


@pytest.mark.parametrize("size", ["4b", "8b"])
def test_fields_match_the_official_config(size):
    theirs = json.loads((DATA / f"config.sdar-{size}-chat.json").read_text())
    ours = json.loads((CONFIGS / f"sdar-{size}-mrp" / "config.json").read_text())
    # block_size is the MRP recipe's; eos gains the end of a chat turn; the rest describes their code, or training.
    differing = {"architectures", "block_size", "eos_token_id", "model_type"}
    for name in (set(ours) & set(theirs)) - differing:
        assert ours[name] == theirs[name], name
    assert ours["rope_parameters"]["rope_theta"] == theirs["rope_theta"]


def test_the_mixture_of_experts_has_the_official_layout():
    config = AutoConfig.from_pretrained(CONFIGS / "sdar-30b-a3b-mrp")
    plain = json.loads((CONFIGS / "sdar-30b-a3b-mrp" / "config.json").read_text())
    expected = official_shapes(plain)
    ours = expected_shapes(config, fused_experts=False)
    assert {name.replace("mrp_modules.0.model.", "mrp."): shape for name, shape in expected.items()} == ours
    # The head's own layers stay dense.
    head = layer_shapes(plain, "mrp.layers.0.")
    assert head.items() <= ours.items()
    parameters = sum(s[0] * (s[1] if len(s) > 1 else 1) for n, s in ours.items() if not n.startswith("mrp."))
    assert 30.4e9 < parameters < 30.6e9
