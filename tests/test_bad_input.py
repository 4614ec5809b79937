"""Every kind of bad input raises an exception that names the value, what is allowed and the fix."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.random_models import random_model, shared_model
from modeling_mrp import MRPConfig, MRPForCausalLM, MRPGenerationConfig
from modeling_mrp.token_statistics import BrokenLogitsError

PROMPT = torch.tensor([[5, 6, 7, 8, 9]])

# arguments -> what the message must hold
ARGUMENTS = [
    ({"mrp_mod": "none"}, ["mrp_mod", "Did you mean 'mrp_mode'"]),
    ({"block_size": 4}, ["block_size", "Allowed"]),
    ({"confidence_treshold": 0.5}, ["Did you mean 'confidence_threshold'"]),
    ({"mrp_mode": "fast"}, ["'fast'", "none, speculative, direct, remask"]),
    ({"mrp_mode": "none", "mrp_steps": 2}, ["mrp_steps=2", "none", "Leave it out"]),
    ({"mrp_mode": "remask", "remasking_strategy": "sequential"}, ["'sequential'", "low_confidence_dynamic"]),
    ({"mrp_mode": "remask", "drafter": "zero"}, ["zero", "head"]),
    ({"mrp_steps": -1}, ["mrp_steps=-1", "from 0"]),
    ({"mrp_steps": 2.5}, ["mrp_steps=2.5", "integer"]),
    ({"block_length": 0}, ["block_length=0", "from 1"]),
    ({"block_length": "8"}, ["block_length='8'", "integer"]),
    ({"block_length": 1024}, ["block_length=1024", "512"]),
    ({"denoising_steps": 5}, ["denoising_steps=5", "block_length=4"]),
    ({"denoising_steps": 0}, ["denoising_steps=0", "from 1"]),
    ({"remasking_strategy": "random"}, ["'random'", "low_confidence_static"]),
    ({"confidence_threshold": 1.5}, ["confidence_threshold=1.5", "[0.0, 1.0]"]),
    ({"confidence_threshold": float("nan")}, ["nan"]),
    ({"entropy_bound": -0.1}, ["entropy_bound=-0.1"]),
    ({"confidence_resolution": 0.9}, ["confidence_resolution=0.9", "0.5"]),
    ({"remask_rule": "all"}, ["'all'", "cross"]),
    ({"remask_delta": -1.0}, ["remask_delta=-1.0"]),
    ({"mrp_context": "all"}, ["'all'", "prefix"]),
    ({"drafter": "oracle"}, ["'oracle'", "zero"]),
    ({"draft_shape": "tree"}, ["'tree'", "lattice"]),
    ({"draft_states": 0}, ["draft_states=0", "auto"]),
    ({"draft_states": 65}, ["draft_states=65", "64"]),
    ({"direct_tokens_per_step": 0}, ["direct_tokens_per_step=0"]),
    ({"seed": -1}, ["seed=-1"]),
    ({"row_seeds": [1, 2]}, ["row_seeds", "2", "1 rows"]),
    ({"row_seeds": [-1]}, ["row_seeds=[-1]"]),
    ({"temperature": -0.5, "do_sample": True}, ["temperature=-0.5"]),
    ({"top_k": -1, "do_sample": True}, ["top_k=-1"]),
    ({"top_p": 0.0, "do_sample": True}, ["top_p=0.0"]),
    ({"num_beams": 4}, ["num_beams=4", "not supported"]),
    ({"repetition_penalty": 1.3}, ["repetition_penalty=1.3", "not supported"]),
    ({"logits_processor": [lambda ids, scores: scores]}, ["logits_processor", "not supported"]),
    ({"assistant_model": object()}, ["assistant_model", "not supported"]),
    ({"output_scores": True}, ["output_scores=True", "not supported"]),
    ({"max_new_tokens": 0}, ["max_new_tokens=0", "at least 1"]),
    ({"max_new_tokens": 4.5}, ["max_new_tokens=4.5"]),
    ({"max_new_tokens": 508}, ["508", "512", "507"]),
    ({"max_new_tokens": None, "max_length": 5}, ["max_length=5", "more than 5"]),
    ({"stop_strings": "x"}, ["stop_strings", "tokenizer"]),
    ({"num_return_sequences": 0}, ["num_return_sequences=0"]),
    ({"num_return_sequences": 2}, ["num_return_sequences=2", "do_sample"]),
]


@pytest.mark.parametrize(("arguments", "words"), ARGUMENTS, ids=["-".join(entry[0]) for entry in ARGUMENTS])
def test_arguments_are_refused(arguments, words):
    """Guards arguments that are swallowed, which transformers does with most attributes of a config."""
    with pytest.raises((ValueError, TypeError)) as error:
        shared_model(0).generate(PROMPT, **({"max_new_tokens": 4} | arguments))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(("arguments", "words"), [entry for entry in ARGUMENTS if set(entry[0]) <= {
    "mrp_mod", "mrp_mode", "confidence_treshold", "block_length", "remask_rule", "draft_states"} and len(entry[0]) == 1
    and entry[0] != {"block_length": 1024}])  # fmt: skip
def test_generation_config_refuses_the_same(arguments, words):
    """Guards a config class that accepts what `generate` refuses."""
    with pytest.raises(ValueError, match=r"allowed|Allowed|Did you mean"):
        MRPGenerationConfig(**arguments).validate()


PROMPTS = [
    (torch.zeros((1, 0), dtype=torch.long), None, ["(1, 0)", "empty"]),
    (torch.zeros((0, 3), dtype=torch.long), None, ["(0, 3)", "empty"]),
    (torch.tensor([5, 6]), None, ["(2,)", "[rows, columns]"]),
    ([[5, 6]], None, ["list", "tensor"]),
    (torch.rand(1, 4), None, ["integer"]),
    (torch.tensor([[5, 64]]), None, ["64", "63"]),
    (torch.tensor([[5, -1]]), None, ["-1", "0 to"]),
    (torch.full((1, 512), 3), None, ["512", "fewer"]),
    (PROMPT, torch.ones(1, 4, dtype=torch.long), ["(1, 4)", "(1, 5)"]),
    (PROMPT, torch.tensor([[1, 0, 1, 1, 1]]), ["row 0", "holes"]),
    (PROMPT.repeat(2, 1), torch.tensor([[1] * 5, [0] * 5]), ["row 1", "empty"]),
]


@pytest.mark.parametrize(("ids", "mask", "words"), PROMPTS)
def test_prompts_are_refused(ids, mask, words):
    """Guards index errors from inside an embedding, and answers to a prompt with holes."""
    with pytest.raises((ValueError, TypeError)) as error:
        shared_model(0).generate(ids, attention_mask=mask, max_new_tokens=4)
    for word in words:
        assert word in str(error.value)


def test_ids_at_padding_are_not_checked():
    """Guards a refusal of -100 or 0 where nobody reads them."""
    ids, mask = torch.tensor([[-100, 5, 6]]), torch.tensor([[0, 1, 1]])
    out = shared_model(0).generate(ids, attention_mask=mask, max_new_tokens=3)
    assert torch.equal(out[:, 1:], shared_model(0).generate(ids[:, 1:], max_new_tokens=3))


def test_no_prompt_or_two_are_refused():
    for arguments in ({}, {"inputs": PROMPT, "input_ids": PROMPT}):
        with pytest.raises(ValueError, match="exactly one"):
            shared_model(0).generate(max_new_tokens=2, **arguments)


def test_nothing_runs_before_the_border(monkeypatch):
    """Guards an error after minutes of work: the border is checked before the first forward."""
    model = shared_model(0)
    monkeypatch.setattr(model, "backbone", lambda *a, **k: pytest.fail("the backbone ran"))
    for arguments in ({"max_new_tokens": 508}, {"mrp_mode": "x"}, {"row_seeds": [1, 2]}, {"stop_strings": "x"}):
        with pytest.raises(ValueError, match=r"\w"):
            model.generate(PROMPT, **arguments)
    with pytest.raises(ValueError, match="streamer"):
        model.generate(PROMPT.repeat(2, 1), streamer=object(), max_new_tokens=2)


@pytest.mark.parametrize(("fields", "words"), [
    ({"num_nextn_predict_layers": 0}, ["num_nextn_predict_layers=0", "1 to 8"]),
    ({"num_nextn_predict_layers": 9}, ["num_nextn_predict_layers=9", "1 to 8"]),
    ({"num_mrp_heads": 2}, ["num_mrp_heads=2"]),
    ({"block_size": 0}, ["block_size=0"]),
    ({"head_prediction": "both"}, ["'both'", "residual or direct"]),
    ({"kernels": "cuda"}, ["'cuda'", "auto, torch, triton"]),
    ({"mask_token_id": 70, "vocab_size": 64}, ["mask_token_id=70", "63"]),
])  # fmt: skip
def test_configs_are_refused(fields, words):
    with pytest.raises(ValueError, match=r"\w") as error:
        MRPConfig(**fields)
    for word in words:
        assert word in str(error.value)


@pytest.fixture
def checkpoint(tmp_path):
    random_model(0).save_pretrained(tmp_path)
    return tmp_path


def change(folder, edit):
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_half_a_head_is_refused(checkpoint):
    """Guards a head that is part checkpoint, part fresh, silently."""
    change(checkpoint, lambda weights: weights.pop("mrp.eh_proj.weight"))
    with pytest.raises(ValueError, match=r"(?s)incomplete.*mrp\.eh_proj\.weight.*num_nextn_predict_layers"):
        MRPForCausalLM.from_pretrained(checkpoint)


def test_fewer_head_layers_than_configured_are_refused(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 3}))
    with pytest.raises(ValueError, match=r"(?s)incomplete.*mrp\.layers\.2"):
        MRPForCausalLM.from_pretrained(checkpoint)


def test_misshapen_head_is_refused(checkpoint):
    """Guards weights of another size that are replaced by fresh ones."""

    def cut(weights):
        weights["mrp.eh_proj.weight"] = weights["mrp.eh_proj.weight"][:, :40].clone()

    change(checkpoint, cut)
    with pytest.raises(ValueError, match=r"(?s)eh_proj.*\[32, 40\].*\[32, 64\].*mrp-convert"):
        MRPForCausalLM.from_pretrained(checkpoint)


@pytest.mark.parametrize("mode", ["none", "speculative", "direct", "remask"])
@pytest.mark.parametrize("rows", [1, 3])
def test_nan_backbone(mode, rows):
    """Guards an endless loop or nonsense: NaN logits are an error that names the cause and the fix."""
    model = random_model(0)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(BrokenLogitsError, match=r"(?s)NaN.*allowed: finite.*dtype"):
        model.generate(PROMPT.repeat(rows, 1), max_new_tokens=6, mrp_mode=mode)


@pytest.mark.parametrize("arguments", [
    {"mrp_mode": "speculative", "draft_states": 8},
    {"mrp_mode": "speculative", "draft_shape": "chain", "mrp_steps": 2},
    {"mrp_mode": "direct", "mrp_steps": 2},
    *({"mrp_mode": "remask", "remask_rule": rule, "confidence_threshold": 0.0} for rule in ("cross", "veto")),
])  # fmt: skip
@pytest.mark.parametrize("new", [3, 12])
def test_nan_head(arguments, new):
    """Guards a head with NaN weights: a clear error, however short the answer, and no tokens from broken logits."""
    model = random_model(0)
    with torch.no_grad():
        model.mrp.eh_proj.weight[0, 0] = float("nan")
    with pytest.raises(BrokenLogitsError, match=r"(?s)NaN.*head"):
        model.generate(PROMPT, max_new_tokens=new, **arguments)
    # Without the head the model still decodes.
    assert model.generate(PROMPT, max_new_tokens=new, mrp_mode="none").shape[1] == 5 + new


def test_forward_refuses_bad_input():
    model = shared_model(0)
    with pytest.raises(ValueError, match="input_ids"):
        model()
    with pytest.raises(TypeError, match="atention_mask"):
        model(PROMPT, atention_mask=PROMPT)
    with pytest.raises(ValueError, match="holes"):
        model(PROMPT, attention_mask=torch.tensor([[1, 0, 1, 1, 1]]))


def test_flash_attention_is_refused():
    """Guards an attention that drops block masks without an error."""
    with pytest.raises((ValueError, ImportError), match=r"(?i)flash"):
        random_model(0).set_attn_implementation("flash_attention_2")
