"""mrp-convert on synthetic checkpoints in the official layouts: what comes out, bit for bit."""

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import hub_checkpoints as official
import pytest
import torch
from safetensors.torch import load_file

from modeling_mrp.hub.convert import convert_checkpoint
from modeling_mrp.modeling_mrp import MRPForCausalLM

HERE = Path(__file__).parent


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        part = load_file(file)
        assert not set(part) & set(tensors)
        tensors.update(part)
    return tensors


def fingerprint(folder: Path) -> dict[str, tuple[str, int]]:
    return {
        str(p.relative_to(folder)): (hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns)
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def our_name(key: str) -> str:
    return key.replace("mrp_modules.0.model.", "mrp.")


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_arrives_and_the_source_is_untouched(tmp_path, experts, shards):
    source = tmp_path / "source"
    written = official.write_checkpoint(source, experts=experts, shards=shards)
    before = fingerprint(source)

    result = convert_checkpoint(source, tmp_path / "out", max_shard_size="30KB")

    found = all_tensors(tmp_path / "out")
    assert set(found) == {our_name(key) for key in written}
    for key, tensor in written.items():
        assert found[our_name(key)].dtype == torch.bfloat16
        assert torch.equal(found[our_name(key)], tensor), key
    assert fingerprint(source) == before
    assert len(result.files) > 1
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * 2 for t in found.values()) == result.total_bytes


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "moe"])
def test_the_converted_model_computes_what_the_official_one_does(tmp_path, experts):
    official.write_checkpoint(tmp_path / "source", experts=experts, dtype=torch.float32)
    convert_checkpoint(tmp_path / "source", tmp_path / "out")
    ids = torch.randint(0, 256, (2, 11))
    outputs = []
    for folder in ("source", "out"):
        model = MRPForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32).eval()
        # The grouped product of transformers' default compiles a fallback on CPUs, which takes a minute.
        model.config._experts_implementation = "eager"
        with torch.no_grad():
            outputs.append(model(ids, revealed_ids=ids.flip(0)[None]))
    # Not bit for bit: the products of a mixture of experts depend on how memory happens to be aligned.
    torch.testing.assert_close(outputs[0].logits, outputs[1].logits, atol=2e-5, rtol=0)
    torch.testing.assert_close(outputs[0].residual_logits, outputs[1].residual_logits, atol=2e-5, rtol=0)


def test_converting_a_converted_or_saved_folder_changes_nothing(tmp_path):
    """A mixture of experts saved by transformers holds fused experts: the other layout that must convert."""
    official.write_checkpoint(tmp_path / "source", experts=True)
    convert_checkpoint(tmp_path / "source", tmp_path / "once")
    convert_checkpoint(tmp_path / "once", tmp_path / "twice")
    once, twice = all_tensors(tmp_path / "once"), all_tensors(tmp_path / "twice")
    assert all(torch.equal(once[name], twice[name]) for name in once | twice)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        assert (tmp_path / "once" / name).read_text() == (tmp_path / "twice" / name).read_text()

    model = MRPForCausalLM.from_pretrained(tmp_path / "once")
    model.save_pretrained(tmp_path / "saved")
    convert_checkpoint(tmp_path / "saved", tmp_path / "again")
    again = MRPForCausalLM.from_pretrained(tmp_path / "again")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name


def test_settings_that_hurt_are_dropped_and_said(tmp_path):
    official.write_checkpoint(tmp_path / "source")
    result = convert_checkpoint(tmp_path / "source", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())

    assert not set(config) & {"attn_implementation", "debug", "ep_size", "micro_forward", "torch_dtype"}
    assert config["model_type"] == "sdar_mrp"
    assert config["dtype"] == "bfloat16"
    assert config["use_cache"] is True
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 1000000}
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_mrp.MRPForCausalLM"
    assert generation["do_sample"] is False
    assert generation["mrp_mode"] == "speculative"
    assert not set(generation) & {"temperature", "top_k", "top_p", "max_new_tokens", "max_length"}
    notes = "\n".join(result.notes)
    for said in ("attn_implementation='flex_attention'", "use_cache=False", "debug", "temperature=0.6", "top_p=0.95"):
        assert said in notes


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "moe"])
def test_loaded_as_they_are_official_files_do_not_choose_the_attention(tmp_path, experts):
    """They name flex_attention; only the caller's own wish counts here."""
    official.write_checkpoint(tmp_path / "source", experts=experts)
    for wish, chosen in (({}, "sdpa"), ({"attn_implementation": "eager"}, "eager")):
        model = MRPForCausalLM.from_pretrained(tmp_path / "source", **wish)
        assert model.config._attn_implementation == chosen


def test_special_tokens_agree_afterwards(tmp_path):
    from transformers import AutoTokenizer

    official.write_checkpoint(tmp_path / "source")
    result = convert_checkpoint(tmp_path / "source", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())

    assert tokenizer.mask_token_id == config["mask_token_id"] == official.MASK
    assert tokenizer.decode([72, official.MASK], skip_special_tokens=True) == tokenizer.decode([72])
    assert config["eos_token_id"] == generation["eos_token_id"] == [official.TURN_END, official.END_OF_TEXT]
    assert config["pad_token_id"] == generation["pad_token_id"] == official.END_OF_TEXT
    assert any("'<|MASK|>' and '<MASK>'" in note for note in result.notes)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_missing_mask_token_and_end_token_are_added(tmp_path):
    from transformers import AutoTokenizer

    source = tmp_path / "source"
    official.write_checkpoint(source, tokenizer=False)
    official.write_tokenizer(source, with_mask=False)
    (source / "generation_config.json").unlink()
    result = convert_checkpoint(source, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.mask_token_id == official.MASK
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert set(generation["eos_token_id"]) == {official.TURN_END, official.END_OF_TEXT}
    assert any("added the mask token" in note for note in result.notes)
    assert any("end tokens" in note for note in result.notes)


@pytest.mark.parametrize("naming", ["official", "ours", "bare"])
def test_backbone_and_head_from_two_places(tmp_path, naming):
    whole = official.write_checkpoint(tmp_path / "whole")
    plain = {key: tensor for key, tensor in whole.items() if "mrp_modules" not in key}
    official.write_checkpoint(tmp_path / "plain", head=False)
    official.write_shards(tmp_path / "plain", plain)
    prefix = {"official": "mrp_modules.0.model.", "ours": "mrp.", "bare": ""}[naming]
    head = {key.replace("mrp_modules.0.model.", prefix): t.float() for key, t in whole.items() if "mrp_modules" in key}
    (tmp_path / "head").mkdir()
    official.write_shards(tmp_path / "head", head)

    result = convert_checkpoint(tmp_path / "plain", tmp_path / "out", head=tmp_path / "head" / "model.safetensors")
    found = all_tensors(tmp_path / "out")
    assert {name: t.dtype for name, t in found.items()} == dict.fromkeys(map(our_name, whole), torch.bfloat16)
    assert all(torch.equal(found[our_name(key)], tensor) for key, tensor in whole.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 2
    assert any("F32" in note for note in result.notes)


def test_another_head_may_have_another_number_of_layers(tmp_path):
    official.write_checkpoint(tmp_path / "source")
    other = official.write_checkpoint(tmp_path / "other-direct", config={"num_nextn_predict_layers": 1})
    result = convert_checkpoint(tmp_path / "source", tmp_path / "out", head=tmp_path / "other-direct")
    found = all_tensors(tmp_path / "out")
    assert all(torch.equal(found[our_name(k)], t) for k, t in other.items() if "mrp_modules" in k)
    assert not any(name.startswith("mrp.layers.1.") for name in found)
    # Official configs do not say what a head predicts; the publishers' names do.
    assert any("--head-prediction direct" in note for note in result.notes)
    options = {"head": tmp_path / "other-direct", "head_prediction": "direct"}
    result = convert_checkpoint(tmp_path / "source", tmp_path / "direct", **options)
    assert json.loads((tmp_path / "direct" / "config.json").read_text())["head_prediction"] == "direct"
    assert not any("WARNING" in note for note in result.notes)


def test_licence_and_origin_are_carried_on(tmp_path):
    source = tmp_path / "source"
    official.write_checkpoint(source, tokenizer=False)
    (source / "LICENSE").write_text("Terms")
    (source / "README.md").write_text("---\nlicense: mit\nbase_model: JetLM/SDAR-4B-Chat\n---\n# Theirs\n")
    convert_checkpoint(source, tmp_path / "my-model")
    card = (tmp_path / "my-model" / "README.md").read_text()
    assert "license: mit" in card
    assert "base_model: JetLM/SDAR-4B-Chat" in card
    assert "# my-model" in card
    assert (tmp_path / "my-model" / "LICENSE").read_text() == "Terms"


def test_a_plain_checkpoint_stays_without_a_head_and_says_so(tmp_path):
    official.write_checkpoint(tmp_path / "source", head=False)
    result = convert_checkpoint(tmp_path / "source", tmp_path / "out")
    assert not result.has_head
    assert any("no MRP head" in note for note in result.notes)
    _, info = MRPForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert all(key.startswith("mrp.") for key in info["missing_keys"])


def test_dtype_and_block_length_can_be_chosen(tmp_path):
    official.write_checkpoint(tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "out", dtype="float32", block_length=8)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["block_size"] == 8
    assert config["dtype"] == "float32"
    assert {t.dtype for t in all_tensors(tmp_path / "out").values()} == {torch.float32}


def test_tied_embeddings(tmp_path):
    written = official.write_checkpoint(tmp_path / "source", config={"tie_word_embeddings": True})
    assert "lm_head.weight" not in written
    convert_checkpoint(tmp_path / "source", tmp_path / "out")
    model = MRPForCausalLM.from_pretrained(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_killed_anywhere_it_leaves_nothing_or_everything(tmp_path):
    official.write_checkpoint(tmp_path / "source", shards=3)
    (tmp_path / "work").mkdir()
    before = fingerprint(tmp_path / "source")
    seed = random.Random().randrange(10**6)
    command = [sys.executable, HERE / "kill_points.py", tmp_path / "source", tmp_path / "work", "20", str(seed)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    report = json.loads(run.stdout.splitlines()[-1])
    complete = report["complete"]["files"]
    assert len(report["results"]) == 20
    for result in report["results"]:
        assert result["files"] in (None, complete), (seed, result)
    assert any(result["files"] is None for result in report["results"]), (seed, report["events"])
    # The next conversion clears away what the killed ones left.
    assert report["after"] == {"files": complete, "leftovers": 0}
    assert fingerprint(tmp_path / "source") == before


def test_memory_is_bounded_by_a_shard(tmp_path):
    """120 MB in 8 shards, written in files of 16 MB: the growth of the process stays far below the checkpoint."""
    config = {"hidden_size": 512, "vocab_size": 20000, "num_hidden_layers": 12, "intermediate_size": 1536}
    official.write_checkpoint(tmp_path / "source", config=config, shards=8, tokenizer=False)
    script = (
        "import resource, sys\n"
        "from modeling_mrp.hub.convert import convert_checkpoint\n"
        "from modeling_mrp.modeling_mrp import MRPForCausalLM\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "result = convert_checkpoint(sys.argv[1], sys.argv[2], max_shard_size='16MB')\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, result.total_bytes // 1024)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "source"), str(tmp_path / "out")]
    environment = dict(os.environ)
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    growth, total = map(int, run.stdout.split()[-2:])
    assert total > 100_000
    assert growth < 0.5 * total, f"grew by {growth} kB for a checkpoint of {total} kB"
