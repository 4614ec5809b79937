"""Loading, saving and initialising: what is in the file is in the model, and nothing else."""

import json
import logging

import pytest
import torch
from golden_files import GOLDEN
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from benchmarks.random_models import random_config, random_model
from modeling_mrp import MRPConfig, MRPForCausalLM, MRPHead

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 63, 63]])


def outputs(model, ids=IDS):
    with torch.no_grad():
        out = model(ids, revealed_ids=ids[None], block_length=4)
    return torch.cat([out.logits, out.residual_logits[0]])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("moe", [True, False])
def test_save_and_reload_gives_the_same_logits(tmp_path, tied, moe):
    """Guards helper modules left out of the file, untied weights that are tied on loading, and the reverse."""
    model = random_model(0, tie_word_embeddings=tied, moe=moe)
    model.save_pretrained(tmp_path)
    keys = set(load_file(tmp_path / "model.safetensors"))
    assert ("lm_head.weight" in keys) != tied
    assert {key.split(".")[0] for key in keys} == {"model", "mrp"} | (set() if tied else {"lm_head"})
    again, info = MRPForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    shared = again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()
    assert shared == tied
    # Not bit for bit: loading may choose another implementation of the experts.
    torch.testing.assert_close(outputs(again.eval()), outputs(model), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("layers", range(1, 9))
def test_head_depths(tmp_path, layers):
    """Guards heads whose layers share a cache slot, or are not saved: 1 to 8 layers."""
    model = random_model(1, num_nextn_predict_layers=layers, block_size=4)
    assert len(model.mrp.layers) == layers
    model.save_pretrained(tmp_path)
    again = MRPForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(outputs(again), outputs(model))
    prompt = IDS[:, :6]
    none = again.generate(prompt, max_new_tokens=6, mrp_mode="none")
    assert torch.equal(again.generate(prompt, max_new_tokens=6, mrp_mode="speculative", draft_states=4), none)


def test_auto_classes():
    """Guards a registration that lm_eval and pipelines rest on."""
    config = random_config()
    assert type(AutoConfig.for_model("sdar_mrp")) is MRPConfig
    for auto in (AutoModel, AutoModelForCausalLM):
        assert type(auto.from_config(config)) is MRPForCausalLM
    assert isinstance(MRPForCausalLM(config).mrp, MRPHead)


def test_loading_leaves_nothing_uninitialised(tmp_path):
    """Guards 5.x meta loading: buffers that are not in the file must be computed, in the head too."""
    model = random_model(0)
    model.save_pretrained(tmp_path)
    for rotary in ("model.rotary_emb", "mrp.rotary_emb"):
        for _ in range(3):  # fresh memory may be right by chance
            again = MRPForCausalLM.from_pretrained(tmp_path)
            inverse = again.get_submodule(rotary).inv_freq
            assert inverse[0] == 1
            assert torch.equal(inverse, model.get_submodule(rotary).inv_freq)
    tensors = dict(again.named_parameters()) | dict(again.named_buffers())
    assert not any(tensor.is_meta for tensor in tensors.values())
    wanted = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in tensors.items():
        assert torch.equal(tensor, wanted[name]), name


def strip_head(folder, target, shards=1):
    """A plain SDAR checkpoint made of an official one."""
    target.mkdir()
    config = json.loads((folder / "config.json").read_text())
    for name in ("num_nextn_predict_layers", "num_mrp_heads", "auto_map", "architectures"):
        config.pop(name, None)
    (target / "config.json").write_text(json.dumps(config | {"architectures": ["SDARForCausalLM"]}))
    weights = {k: v for k, v in load_file(folder / "model.safetensors").items() if not k.startswith("mrp")}
    write(target, weights, shards)
    return weights


def write(folder, weights, shards):
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    where = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {key: weights[key] for index, key in enumerate(sorted(weights)) if index % shards == shard}
        save_file(part, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


@pytest.mark.parametrize("shards", [1, 3])
def test_official_layout_loads(tmp_path, shards):
    """Guards the official key names (`mrp_modules.0.model.*`), sharded or not."""
    source = GOLDEN / "ckpt_sharp"
    weights = load_file(source / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    write(tmp_path, weights, shards)
    model, info = MRPForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(model.mrp.eh_proj.weight, weights["mrp_modules.0.model.eh_proj.weight"].to(model.dtype))
    assert len(model.mrp.layers) == 2
    # Saved again, it has this package's own names and loads as well.
    model.save_pretrained(tmp_path / "saved")
    keys = set(load_file(tmp_path / "saved" / "model.safetensors"))
    assert not any(key.startswith("mrp_modules") for key in keys)
    again = MRPForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(outputs(again.eval()), outputs(model.eval()))


class Heard(logging.Handler):
    def __init__(self):
        super().__init__()
        self.text = ""

    def emit(self, record):
        self.text += record.getMessage()


@pytest.fixture
def heard():
    handler = Heard()
    root = logging.getLogger("modeling_mrp")
    transformers_root = logging.getLogger("transformers")
    for logger in (root, transformers_root):
        logger.addHandler(handler)
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_warning()
    yield handler
    transformers_logging.set_verbosity(verbosity)
    for logger in (root, transformers_root):
        logger.removeHandler(handler)


@pytest.mark.parametrize("shards", [1, 2])
def test_plain_checkpoint_gets_a_fresh_head_and_says_so(tmp_path, heard, shards):
    """Guards a silently random head, and one that is large: a fresh head hardly moves the logits."""
    weights = strip_head(GOLDEN / "ckpt_sharp", tmp_path / "plain", shards)
    model = MRPForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    assert "no MRP head" in heard.text
    assert "drafter='zero'" in heard.text
    assert torch.equal(model.model.norm.weight, weights["model.norm.weight"])
    assert len(model.mrp.layers) == 3
    assert all(torch.isfinite(parameter).all() for parameter in model.mrp.parameters())
    ids = torch.randint(0, 120, (1, 9))
    with torch.no_grad():
        out = model(ids, revealed_ids=ids[None])
    assert (out.residual_logits[0] - out.logits).abs().max() < 0.2 * out.logits.abs().max()
    model.generation_config.eos_token_id = None
    none = model.generate(ids, max_new_tokens=9, mrp_mode="none")
    for drafter in ("zero", "head"):
        assert torch.equal(model.generate(ids, max_new_tokens=9, mrp_mode="speculative", drafter=drafter), none)


def test_misdeclared_block_size_is_said(tmp_path, heard):
    """Guards the published 4B config, which says block_size 4 over weights trained with 16."""
    from modeling_mrp.configuration_mrp import looks_misdeclared

    fields = {"model_type": "sdar", "hidden_size": 2560, "num_hidden_layers": 36, "block_size": 4}
    assert looks_misdeclared(MRPConfig(**fields, architectures=["SDARMRPForCausalLM"]))
    assert not looks_misdeclared(MRPConfig(**fields, architectures=["SDARForCausalLM"]))
    assert not looks_misdeclared(MRPConfig(**(fields | {"block_size": 16}), architectures=["SDARMRPForCausalLM"]))


def test_generation_config_survives_saving(tmp_path):
    """Guards custom generation attributes that a reload drops."""
    model = random_model(0)
    model.generation_config.mrp_mode = "direct"
    model.generation_config.mrp_steps = 2
    model.generation_config.confidence_resolution = 0.01
    model.save_pretrained(tmp_path)
    again = MRPForCausalLM.from_pretrained(tmp_path).eval()
    assert again.generation_config.mrp_mode == "direct"
    assert again.generation_config.mrp_steps == 2
    assert again.generation_config.confidence_resolution == 0.01
    prompt = IDS[:, :5]
    assert torch.equal(again.generate(prompt, max_new_tokens=7), model.generate(prompt, max_new_tokens=7))
    explicit = model.generate(prompt, max_new_tokens=7, mrp_mode="none", mrp_steps=0, confidence_resolution=0.0)
    assert torch.equal(explicit, random_model(0).generate(prompt, max_new_tokens=7, mrp_mode="none"))


def test_a_fresh_model_is_sane():
    """Guards `_init_weights`: every parameter of a model made from a config is finite, its head's norm small."""
    for moe in (False, True):
        model = MRPForCausalLM(random_config(moe=moe))
        assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
        assert model.mrp.norm.weight.max() <= 0.011


def test_continuous_batching_is_declined():
    """Guards transformers' server, which asks for it and must fall back to `generate`."""
    with pytest.raises(AttributeError, match="generate"):
        random_model(0).init_continuous_batching()
