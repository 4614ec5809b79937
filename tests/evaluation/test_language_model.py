"""The harness with the model class `mrp`: texts, figures, cache and likelihood on a small random model."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from evaluation_models import TASKS
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from modeling_mrp.evaluation import cli
from modeling_mrp.evaluation.figures import figures_of_batch, summarize
from modeling_mrp.evaluation.language_model import MRPLM
from modeling_mrp.evaluation.results import check_every_process_has_documents, figures_in_results

PROMPTS = [
    "<|user|>Zara has 2 red apples. How many in all?<|im_end|><|assistant|>",
    "<|user|>Ben has 12 pens. He loses 3. How many pens does Ben have now?<|im_end|><|assistant|>",
    "<|user|>3 + 4<|im_end|><|assistant|>",
    "<|user|>1 + 1; 2 * 9; 5 - 4<|im_end|><|assistant|>",
    "<|user|>Hi<|im_end|><|assistant|>",
]
MODES = [
    {"mrp_mode": "none"},
    {"mrp_mode": "speculative", "mrp_steps": 2, "draft_shape": "chain"},
    {"mrp_mode": "direct", "mrp_steps": 2},
    {"mrp_mode": "remask", "confidence_threshold": 1},
    {"mrp_mode": "none", "remasking_strategy": "low_confidence_dynamic", "confidence_threshold": 0.3},
]


def instances(until=(), repeats=1, **arguments):
    arguments = {"until": list(until), "do_sample": False, "max_gen_toks": 14, **arguments}
    return [
        Instance("generate_until", {}, (prompt, dict(arguments)), 0, metadata=("task", doc_id, repeats))
        for doc_id, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def stock(model_folder):
    return HFLM(str(model_folder), trust_remote_code=True, device="cpu", dtype="float32", batch_size=1)


@pytest.fixture
def manager():
    return TaskManager(include_path=str(TASKS), include_defaults=False)


def test_it_is_registered():
    assert get_model("mrp") is MRPLM


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(map(str, mode.values())))
def test_texts_are_those_of_the_stock_class_in_every_mode_and_batch(language_model, stock, mode, monkeypatch):
    # In the harness's types: "none" is a string, 1 an int where a threshold is meant.
    wanted = stock.generate_until(instances(**mode), disable_tqdm=True)
    assert language_model.generate_until(instances(**mode), disable_tqdm=True) == wanted
    monkeypatch.setattr(stock, "batch_size_per_gpu", 4)
    assert stock.generate_until(instances(**mode), disable_tqdm=True) == wanted
    monkeypatch.setattr(language_model, "batch_size_per_gpu", "auto")
    assert language_model.generate_until(instances(**mode), disable_tqdm=True) == wanted


def test_stop_strings_cut_as_in_the_stock_class(language_model, stock):
    free = stock.generate_until(instances(mrp_mode="none"), disable_tqdm=True)
    stops = [text[len(text) // 2 :][:3] for text in free if len(text) > 6][:2]
    assert stops
    wanted = stock.generate_until(instances(until=stops, mrp_mode="none"), disable_tqdm=True)
    assert wanted != free
    for mode in ("none", "speculative"):
        requests = instances(until=stops, mrp_mode=mode)
        assert language_model.generate_until(requests, disable_tqdm=True) == wanted
        # A row that stopped early did not pay for the rest.
        figures = [language_model.recorded_figures(request)[0] for request in requests]
        assert any(record["new_tokens"] < 14 for record in figures)


def test_a_text_does_not_depend_on_its_neighbours(language_model):
    together = language_model.generate_until(instances(mrp_mode="speculative"), disable_tqdm=True)
    alone = [
        language_model.generate_until([request], disable_tqdm=True)[0] for request in instances(mrp_mode="speculative")
    ]
    assert together == alone


def test_padding_copies_are_answered_but_not_counted(language_model):
    requests = instances(mrp_mode="none")
    # Under data parallelism the harness repeats a short rank's last request.
    texts = language_model.generate_until([*requests, requests[-1], requests[-1]], disable_tqdm=True)
    assert texts[-1] == texts[-2] == texts[len(requests) - 1]
    assert [len(language_model.recorded_figures(request)) for request in requests] == [1] * len(requests)


def test_repeats_are_decoded_and_counted(language_model):
    (request, *_) = instances(repeats=2, do_sample=True, temperature=1.0)
    language_model.generate_until([request, request], disable_tqdm=True)
    assert len(language_model.recorded_figures(request)) == 2


def test_too_many_new_tokens_is_a_user_error(language_model):
    with pytest.raises(ValueError, match=r"max_gen_toks=256; allowed: less than the model's context of 256"):
        language_model.generate_until(instances(max_gen_toks=256)[:1], disable_tqdm=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_gen_toks": "many"}, "max_gen_toks='many'; allowed: an integer of at least 1"),
        ({"max_gen_toks": 0}, "max_gen_toks=0; allowed: an integer of at least 1"),
        ({"stop_strings": "a"}, r"stop_strings='a' in --gen_kwargs; .* use until=\.\.\."),
        ({"num_return_sequences": 2, "do_sample": True, "temperature": 1.0}, "num_return_sequences=2 in --gen_kwargs"),
        ({"return_dict_in_generate": False}, "return_dict_in_generate=False in --gen_kwargs"),
        ({"mrp_mode": "fast"}, "mrp_mode='fast'; allowed: one of none, speculative, direct, remask"),
        ({"mrp_mod": "none"}, "unknown generation argument 'mrp_mod'. Did you mean 'mrp_mode'"),
    ],
)
def test_wrong_generation_arguments_are_named(language_model, arguments, message):
    with pytest.raises(ValueError, match=message):
        language_model.generate_until(instances(**arguments)[:1], disable_tqdm=True)


def test_wrong_model_arguments_are_named(model_folder):
    with pytest.raises(ValueError, match="no model is named; pass --model_args pretrained="):
        MRPLM()
    with pytest.raises(ValueError, match="pretrained='/nowhere' is no folder"):
        MRPLM("/nowhere", device="cpu")
    with pytest.raises(ValueError, match="batch_size=0; allowed: a positive integer or auto"):
        MRPLM(str(model_folder), device="cpu", batch_size=0)


def test_processes_that_do_not_know_each_other_are_refused(language_model, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE=2, but accelerate sees 1 process"):
        language_model._join_processes(in_tensor_parallel=False)
    language_model._join_processes(in_tensor_parallel=True)


def test_fewer_documents_than_processes_are_refused(manager):
    """The harness would wait for ever."""
    tasks = manager.load(["mrp_tiny"])
    two = SimpleNamespace(world_size=2)
    for chosen in ({"limit": 1}, {"limit": 0.001}, {"chosen": {"mrp_tiny": [5]}}):
        with pytest.raises(ValueError, match=r"mrp_tiny has 1 document\(s\) here for 2 processes"):
            check_every_process_has_documents(two, tasks, **chosen)
        check_every_process_has_documents(SimpleNamespace(world_size=1), tasks, **chosen)
    for chosen in ({}, {"limit": 2}, {"chosen": {"mrp_tiny": [5, 7]}}):
        check_every_process_has_documents(two, tasks, **chosen)


def test_auto_halves_the_batch_when_memory_runs_out(language_model, monkeypatch):
    monkeypatch.setattr(language_model, "batch_size_per_gpu", "auto")
    generate, rows = language_model.model.generate, []

    def small_memory(*args, **kwargs):
        rows.append(kwargs["input_ids"].shape[0])
        if rows[-1] > 2:
            raise torch.OutOfMemoryError("too large")
        return generate(*args, **kwargs)

    wanted = language_model.generate_until(instances(), disable_tqdm=True)
    monkeypatch.setattr(language_model.model, "generate", small_memory)
    monkeypatch.setattr(language_model, "max_batch_size", 8)
    assert language_model.generate_until(instances(), disable_tqdm=True) == wanted
    assert rows == [5, 4, 2, 2, 1] or rows == [5, 5, 2, 2, 1]


def test_results_hold_the_sums_of_the_models_own_outputs(language_model, manager, monkeypatch):
    outputs, generate = [], language_model.model.generate

    def recording(*args, **kwargs):
        outputs.append(generate(*args, **kwargs))
        return outputs[-1]

    monkeypatch.setattr(language_model.model, "generate", recording)
    with figures_in_results():
        results = simple_evaluate(
            language_model, tasks=["mrp_tiny"], limit=7, task_manager=manager, bootstrap_iters=0,
            gen_kwargs="mrp_mode=speculative,max_gen_toks=12", log_samples=True,
        )  # fmt: skip
    assert [output.new_tokens.shape[0] for output in outputs] == [3, 3, 1]
    figures = results["decoding"]["tasks"]["mrp_tiny"]
    assert figures["requests"] == figures["documents"] == 7
    for name in ("new_tokens", "backbone_forwards", "segments", "head_passes", "reveals_taken_back"):
        assert figures[name] == sum(int(getattr(output, name).sum()) for output in outputs)
    assert figures["tokens_per_forward"] == figures["new_tokens"] / figures["backbone_forwards"]
    for name in ("drafts_proposed", "drafts_accepted"):
        for depth, count in enumerate(figures[name]):
            assert count == sum(
                int(output[name][:, depth].sum()) for output in outputs if depth < output[name].shape[1]
            )
    shares = [
        a / p if p else 0.0 for a, p in zip(figures["drafts_accepted"], figures["drafts_proposed"], strict=False)
    ]
    assert figures["acceptance_by_depth"][: len(shares)] == shares
    row = results["results"]["mrp_tiny"]
    assert row["tokens_per_forward,decoding"] == figures["tokens_per_forward"]
    samples = results["samples"]["mrp_tiny"]
    assert summarize(sample["decoding"][0] for sample in samples)["backbone_forwards"] == figures["backbone_forwards"]
    environment = results["decoding"]["environment"]
    assert environment["device"]
    assert environment["versions"]["torch"] == torch.__version__
    assert json.loads(json.dumps(results["decoding"])) == results["decoding"]


def test_a_resumed_run_knows_the_figures_of_what_it_does_not_decode_again(
    language_model, manager, tmp_path, monkeypatch
):
    def run(limit):
        with figures_in_results():
            return simple_evaluate(
                language_model, tasks=["mrp_tiny"], limit=limit, task_manager=manager, bootstrap_iters=0,
                gen_kwargs="mrp_mode=none,max_gen_toks=8", use_cache=str(tmp_path / "cache"), log_samples=True,
            )  # fmt: skip

    try:
        first = run(3)["decoding"]["tasks"]["mrp_tiny"]
        decoded = []
        monkeypatch.setattr(
            language_model, "_decode", lambda contexts, arguments, do=language_model._decode: (
                decoded.extend(contexts), do(contexts, arguments))[1],
        )  # fmt: skip
        resumed = run(5)
    finally:
        language_model.set_cache_hook(type(language_model.cache_hook)(None))
    assert len(decoded) == 2
    figures = resumed["decoding"]["tasks"]["mrp_tiny"]
    assert figures["documents_without_figures"] == 0
    assert figures["requests"] == 5
    assert figures["new_tokens"] > first["new_tokens"]
    assert all(sample["decoding"] for sample in resumed["samples"]["mrp_tiny"])


def test_a_multiple_choice_task_runs_through_the_likelihood(language_model, manager):
    with figures_in_results():
        results = simple_evaluate(
            language_model,
            tasks=["mrp_tiny_choice"],
            limit=4,
            task_manager=manager,
            bootstrap_iters=0,
            log_samples=True,
        )
    assert 0 <= results["results"]["mrp_tiny_choice"]["acc,none"] <= 1
    figures = results["decoding"]["tasks"]["mrp_tiny_choice"]["likelihood"]
    assert figures["requests"] == 16
    assert figures["exact"] == 16
    for sample in results["samples"]["mrp_tiny_choice"]:
        values = [float(response[0][0]) for response in sample["resps"]]
        assert values == [record["log_likelihood"] for record in sample["decoding"]]
        assert len(set(values)) > 1


def test_is_greedy_means_what_generate_does(language_model):
    prompt = language_model.tokenizer(PROMPTS[0]).input_ids
    ids = torch.tensor([prompt])
    greedy = language_model.model.generate(input_ids=ids, mrp_mode="none", max_new_tokens=3)[0, len(prompt) :].tolist()
    other = [*greedy[:-1], greedy[-1] + 1]
    answers = language_model._loglikelihood_tokens([(None, prompt, greedy), (None, prompt, other)], disable_tqdm=True)
    assert [answer[1] for answer in answers] == [True, False]


def test_rolling_likelihood_runs(language_model):
    request = Instance("loglikelihood_rolling", {}, ("Ben has 12 pens.",), 0)
    (value,) = language_model.loglikelihood_rolling([request], disable_tqdm=True)
    assert value < 0


def test_the_command_writes_figures_to_the_results_file(model_folder, tmp_path, monkeypatch, capsys):
    arguments = [
        "mrp-eval", "--model_args", f"pretrained={model_folder},dtype=float32", "--tasks", "mrp_tiny",
        "--device", "cpu", "--include_path", str(TASKS), "--limit", "3", "--batch_size", "2", "--log_samples",
        "--output_path", str(tmp_path), "--gen_kwargs", "mrp_mode=speculative,max_gen_toks=8",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", arguments)
    cli.main()
    assert "tokens_per_forward" in capsys.readouterr().out
    (file,) = tmp_path.rglob("results_*.json")
    results = json.loads(file.read_text())
    figures = results["decoding"]["tasks"]["mrp_tiny"]
    (lines,) = tmp_path.rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(samples) == 3
    assert figures["new_tokens"] == sum(sample["decoding"][0]["new_tokens"] for sample in samples)
    assert results["config"]["model"] == "mrp"


def test_the_model_may_be_left_out():
    assert cli.with_default_model(["--tasks", "x"]) == ["--tasks", "x", "--model", "mrp"]
    assert cli.with_default_model(["run", "--tasks", "x"]) == ["run", "--tasks", "x", "--model", "mrp"]
    for arguments in (["--model", "hf", "--tasks", "x"], ["--model=hf", "--tasks", "x"], ["ls", "tasks"], ["--help"]):
        assert cli.with_default_model(arguments) == arguments


def test_figures_of_a_batch_share_out_its_time(language_model):
    ids = torch.tensor([language_model.tokenizer(PROMPTS[0]).input_ids] * 2)
    output = language_model.model.generate(
        input_ids=ids, mrp_mode="speculative", max_new_tokens=9, return_dict_in_generate=True
    )
    records = figures_of_batch(output, seconds=3.0)
    assert sum(record["seconds"] for record in records) == pytest.approx(3.0)
    assert [record["new_tokens"] for record in records] == output.new_tokens.tolist()
    assert summarize(records)["tokens_per_second"] == pytest.approx(int(output.new_tokens.sum()) / 3.0)
