"""Pipelines, chat, reduced precision, compiled layers, devices without float64."""

import pytest
import torch
import transformers
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer, pipeline

from modeling_mrp.modeling_mrp import MRPForCausalLM

MODES = ("none", "speculative", "direct", "remask")
PROMPT = torch.tensor([[12, 8, 40, 77, 5]])
# The pipeline of 5.14 samples whatever a model's own generation config says (a stock Qwen3's too).
GREEDY = {} if Version(transformers.__version__) >= Version("5.17") else {"do_sample": False}


@pytest.fixture(scope="module")
def model(converted):
    return MRPForCausalLM.from_pretrained(converted).eval()


@pytest.fixture(scope="module")
def tokenizer(converted):
    return AutoTokenizer.from_pretrained(converted)


def test_text_generation_pipeline(exported, model, tokenizer):
    generator = pipeline("text-generation", model=str(exported), trust_remote_code=True)
    said = generator("3+4=", max_new_tokens=10, return_full_text=False, **GREEDY)[0]["generated_text"]
    ids = tokenizer("3+4=", return_tensors="pt")["input_ids"]
    plain = model.generate(ids, mrp_mode="none", max_new_tokens=10)
    assert said == tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True)
    # The default is greedy, unlike the pipeline's own, and stays the same from call to call.
    assert generator("3+4=", max_new_tokens=10, return_full_text=False, **GREEDY)[0]["generated_text"] == said
    direct = generator("3+4=", max_new_tokens=10, mrp_mode="direct", return_full_text=False, **GREEDY)
    ids = model.generate(tokenizer("3+4=", return_tensors="pt")["input_ids"], mrp_mode="direct", max_new_tokens=10)
    assert direct[0]["generated_text"] == tokenizer.decode(ids[0, -10:], skip_special_tokens=True)


def test_pipeline_takes_chats_and_batches(exported):
    generator = pipeline("text-generation", model=str(exported), trust_remote_code=True)
    chats = [[{"role": "user", "content": text}] for text in ("Add 3 and 4.", "Hi")]
    answers = [generator(chat, max_new_tokens=8, **GREEDY)[0]["generated_text"][-1] for chat in chats]
    assert all(answer["role"] == "assistant" and answer["content"] for answer in answers)
    together = generator(chats, max_new_tokens=8, batch_size=2, **GREEDY)
    assert [result[0]["generated_text"][-1] for result in together] == answers


def test_a_conversation_with_a_streamer(model, tokenizer, capsys):
    messages = [{"role": "user", "content": "Add 3 and 4."}]
    for turn in range(2):
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        output = model.generate(**inputs, streamer=streamer, max_new_tokens=12)
        said = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert capsys.readouterr().out.rstrip("\n") == said
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"More {turn}"}]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "moe"])
def test_reduced_precision(converted, converted_moe, dtype, experts):
    model = MRPForCausalLM.from_pretrained(converted_moe if experts else converted, dtype=dtype).eval()
    model.config._experts_implementation = "eager"
    for mode in MODES:
        output = model.generate(PROMPT, mrp_mode=mode, max_new_tokens=12, return_dict_in_generate=True)
        assert output.sequences.shape == (1, 17)
        assert model(output.sequences).logits.dtype == dtype


class NoDoubles(TorchDispatchMode):
    """Fails where a float64 tensor is made: Apple's GPUs have none."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            assert not (isinstance(value, torch.Tensor) and value.dtype == torch.float64), function
        return result


@pytest.mark.parametrize("mode", MODES)
def test_no_float64_on_the_device(model, mode):
    with NoDoubles():
        model.generate(PROMPT, mrp_mode=mode, max_new_tokens=6)
        model.generate(PROMPT, mrp_mode=mode, max_new_tokens=6, do_sample=True, top_k=5, top_p=0.9, seed=1)


def test_continuous_batching_is_refused(model):
    """transformers' server asks `hasattr`; whoever calls it all the same reads what to do instead."""
    assert not hasattr(model, "init_continuous_batching")
    assert not hasattr(model, "no_such_attribute")
    with pytest.raises(AttributeError, match="no_such_attribute"):
        _ = model.no_such_attribute
    for call in (lambda: model.init_continuous_batching(), lambda: model.generate_batch([[1, 2, 3]])):
        with pytest.raises(AttributeError, match="block-diffusion models; use generate"):
            call()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("part", ["mlp", "layer"])
def test_compiled_parts_decode_the_same(converted, model, backend, part):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = MRPForCausalLM.from_pretrained(converted).eval()
    for layer in [*compiled.model.layers, *compiled.mrp.layers]:
        (layer.mlp if part == "mlp" else layer).compile(backend=backend, dynamic=True)
    for mode in MODES:
        expected = model.generate(PROMPT, mrp_mode=mode, max_new_tokens=12)
        assert torch.equal(compiled.generate(PROMPT, mrp_mode=mode, max_new_tokens=12), expected), mode
    if part == "mlp":
        # One compilation for all layers and shapes (and one for a batch of one).
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.slow
def test_a_compiled_forward(converted, model):
    torch.compiler.reset()
    compiled = torch.compile(MRPForCausalLM.from_pretrained(converted).eval(), backend="aot_eager", dynamic=True)
    with torch.no_grad():
        for ids in (PROMPT, PROMPT.repeat(2, 3)):
            torch.testing.assert_close(compiled(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)


def test_auto_model_is_the_same_class(converted):
    assert isinstance(AutoModelForCausalLM.from_pretrained(converted), MRPForCausalLM)
