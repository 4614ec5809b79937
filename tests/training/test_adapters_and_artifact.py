"""Heads on LoRA-adapted backbones, LoRA on the head, and the head as a file of its own."""

import json

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from training_models import MASK, sample, small_model

from modeling_mrp import MRPForCausalLM
from modeling_mrp.head_artifact import load_head, save_head
from modeling_mrp.training.adapters import add_backbone_adapter, add_head_adapter, base_of
from modeling_mrp.training.config import config_from
from modeling_mrp.training.errors import TrainingError
from modeling_mrp.training.initialization import fresh_head
from modeling_mrp.training.run import train

PROMPT = torch.tensor([[5, 9, 33, 21, 40, 8]])


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    small_model().save_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(sample(10, 2, n)) + "\n" for n in range(8)))
    adapted = add_backbone_adapter(MRPForCausalLM.from_pretrained(folder / "model"), 2)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.3, generator=generator)
    adapted.save_pretrained(folder / "adapter")
    return folder


def configuration(workplace, output, **sections):
    values = {
        "output": str(output),
        "model": {"path": str(workplace / "model")},
        "head": {"layers": 1, "final_norm": 0.1},
        "data": {"train": str(workplace / "rows.jsonl"), "max_length": 32},
        "trainer": {"per_device_train_batch_size": 4, "max_steps": 3, "use_cpu": True, "disable_tqdm": True},
    }  # fmt: skip
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return config_from(values)


def assert_lossless(model):
    model.eval()
    arguments = {"max_new_tokens": 14, "eos_token_id": MASK}
    plain = model.generate(input_ids=PROMPT, mrp_mode="none", **arguments)
    drafted = model.generate(input_ids=PROMPT, mrp_mode="speculative", draft_states=4, **arguments)
    assert torch.equal(plain, drafted)
    for mode in ("direct", "remask"):
        assert model.generate(input_ids=PROMPT, mrp_mode=mode, **arguments).shape == plain.shape
    return plain


def test_adapters_reach_only_their_own_layers(workplace):
    for add, owner in ((add_backbone_adapter, "model.layers."), (add_head_adapter, "mrp.layers.")):
        adapted = add(MRPForCausalLM.from_pretrained(workplace / "model"), 2)
        names = [name.removeprefix("base_model.model.") for name, p in adapted.named_parameters() if p.requires_grad]
        assert names
        assert all(name.startswith(owner) for name in names)
        with pytest.raises(TrainingError, match="merge"):
            add(adapted, 2)


def test_every_mode_works_on_an_adapted_backbone(workplace):
    bare = assert_lossless(MRPForCausalLM.from_pretrained(workplace / "model"))
    adapted = PeftModel.from_pretrained(MRPForCausalLM.from_pretrained(workplace / "model"), workplace / "adapter")
    loaded = assert_lossless(adapted)
    assert not torch.equal(bare, loaded)
    assert torch.equal(loaded, assert_lossless(AutoPeftModelForCausalLM.from_pretrained(workplace / "adapter")))
    assert torch.equal(loaded, assert_lossless(adapted.merge_and_unload()))


@pytest.mark.parametrize("merge", [False, True])
def test_a_head_trains_on_an_adapted_backbone(workplace, tmp_path, merge):
    adapter = {"adapter": str(workplace / "adapter"), "merge_adapter": merge}
    train(configuration(workplace, tmp_path, model=adapter))
    adapted = PeftModel.from_pretrained(MRPForCausalLM.from_pretrained(workplace / "model"), workplace / "adapter")
    if merge:
        merged = MRPForCausalLM.from_pretrained(tmp_path)
        assert merged.config.num_nextn_predict_layers == 1
        assert_lossless(merged)
    else:
        load_head(base_of(adapted), tmp_path)
        assert_lossless(adapted)


def test_adapted_and_merged_backbones_teach_the_same(workplace, tmp_path):
    for merge in (False, True):
        adapter = {"adapter": str(workplace / "adapter"), "merge_adapter": merge}
        train(configuration(workplace, tmp_path / str(merge), model=adapter))
    one, other = (load_file(tmp_path / str(merge) / "mrp_head.safetensors") for merge in (False, True))
    assert all(torch.allclose(one[name], other[name], atol=1e-3) for name in one)


def test_lora_on_the_head(workplace, tmp_path):
    start = {"start": "checkpoint", "lora_rank": 2}
    train(configuration(workplace, tmp_path, head=start))
    before = load_file(workplace / "model" / "model.safetensors")
    after = load_file(tmp_path / "mrp_head.safetensors")
    moved = {name for name, value in after.items() if not torch.allclose(value, before[f"mrp.{name}"])}
    assert moved
    assert all("_proj" in name and name.startswith("layers.") for name in moved)


def test_lora_on_the_backbone_by_denoising(workplace, tmp_path):
    config = configuration(
        workplace, tmp_path, model={"lora_rank": 2}, head={"start": "checkpoint"}, objective={"loss": "denoising"}
    )
    train(config)
    adapted = PeftModel.from_pretrained(MRPForCausalLM.from_pretrained(workplace / "model"), tmp_path / "adapter")
    assert any("lora_B" in name and p.abs().sum() > 0 for name, p in adapted.named_parameters())
    assert_lossless(adapted)


def test_artifact_travels(workplace, tmp_path):
    model = MRPForCausalLM.from_pretrained(workplace / "model")
    fresh_head(model, 1, "direct", seed=3, final_norm=0.5)
    save_head(model, tmp_path, "small")
    loaded = MRPForCausalLM.from_pretrained(workplace / "model", mrp_head=str(tmp_path))
    assert (loaded.config.num_nextn_predict_layers, loaded.config.head_prediction) == (1, "direct")
    ids = torch.tensor([[5, MASK, 7, MASK]])
    with torch.no_grad():
        expected = model(ids, revealed_ids=ids[None]).residual_logits
        assert torch.equal(expected, loaded(ids, revealed_ids=ids[None]).residual_logits)


def test_artifact_knows_its_backbone(workplace, tmp_path, caplog):
    from transformers.utils import logging

    model = MRPForCausalLM.from_pretrained(workplace / "model")
    save_head(model, tmp_path, "small")
    logging.get_logger("modeling_mrp").propagate = True
    load_head(MRPForCausalLM.from_pretrained(workplace / "model", dtype=torch.bfloat16), tmp_path)
    assert "other backbone weights" not in caplog.text
    moved = MRPForCausalLM.from_pretrained(workplace / "model")
    with torch.no_grad():
        moved.model.layers[0].mlp.up_proj.weight.mul_(1.01)
    load_head(moved, tmp_path)
    assert "other backbone weights" in caplog.text
    with pytest.raises(ValueError, match="hidden_size=32, this one has 16"):
        load_head(small_model(hidden_size=16), tmp_path)
    (tmp_path / "mrp_head.json").unlink()
    with pytest.raises(ValueError, match=r"mrp_head.json does not exist"):
        load_head(model, tmp_path)
    with pytest.raises(ValueError, match="neither a folder nor a reachable Hub id"):
        load_head(model, "nobody/nothing-here")


@pytest.mark.parametrize("initialization", ["normal", "identity", "backbone"])
def test_initializations(initialization):
    model = small_model()
    fresh_head(model, 2, initialization=initialization, seed=1, final_norm=1.0)
    again = small_model()
    fresh_head(again, 2, initialization=initialization, seed=1, final_norm=1.0)
    for name, value in model.mrp.state_dict().items():
        assert torch.equal(value, again.mrp.state_dict()[name])
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        hidden = model(ids).last_hidden_state
        residual, _ = model.head(ids, hidden, torch.arange(4)[None], None)
    if initialization == "identity":
        normed = hidden / hidden.square().mean(-1, keepdim=True).add(1e-6).sqrt()
        assert torch.allclose(residual, normed, atol=1e-4)
    if initialization == "backbone":
        for target, origin in zip(model.mrp.layers, model.model.layers, strict=True):
            assert torch.equal(target.mlp.up_proj.weight, origin.mlp.up_proj.weight)
        with pytest.raises(TrainingError, match="the backbone has 2"):
            fresh_head(model, 3, initialization="backbone")
    with pytest.raises(TrainingError, match="normal, identity, backbone"):
        fresh_head(model, 2, initialization="zeros")
