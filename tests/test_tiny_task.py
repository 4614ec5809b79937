"""The tiny task, its tokenizer and its recipe (guards the shipped model's data and its rebuild command)."""

from itertools import islice
from pathlib import Path

import pytest
import torch

from modeling_mrp import MRPForCausalLM
from modeling_mrp.tiny.batches import BLOCK, SEQUENCE, encode, make_batch
from modeling_mrp.tiny.task import MAX_RESULT, drills, extract_answer, is_correct, problems
from modeling_mrp.tiny.tokenizer import build_tokenizer

SHIPPED = Path(__file__).resolve().parents[1] / "hub_configs" / "sdar-tiny-mrp"


@pytest.fixture(scope="module")
def tokenizer() -> object:
    return build_tokenizer()


def test_streams_are_seeded_and_disjoint() -> None:
    first, again = (list(islice(problems("train", 3), 50)) for _ in range(2))
    assert first == again
    assert first != list(islice(problems("train", 4), 50))
    trained = {p.question for seed in range(20) for p in islice(problems("train", seed), 100)}
    held_out = {p.question for p in islice(problems("held-out", 1), 300)}
    assert not trained & held_out


def test_every_solution_is_right_and_checked_by_its_own_equations() -> None:
    for problem in [*islice(problems("held-out", 2), 300), *islice(drills(0), 50)]:
        assert is_correct(problem.solution, problem)
        assert 0 <= problem.answer <= MAX_RESULT
        for line in problem.solution.splitlines()[:-1]:
            left, right = line.split(" = ")
            expression = left[next(i for i, c in enumerate(left) if c.isdigit()) :]
            assert eval(expression) == int(right.split()[0])


@pytest.mark.parametrize(
    ("text", "answer"),
    [("#### 12", 12), ("no answer", None), ("#### 3\n#### 7", 7), ("####  -4", -4), ("#### x", None)],
)
def test_answers_are_extracted_from_the_last_line(text: str, answer: int | None) -> None:
    assert extract_answer(text) == answer


def test_tokenizer_round_trips_and_knows_the_task(tokenizer) -> None:
    texts = [part for p in islice(problems("train", 0), 200) for part in (p.question, p.solution)]
    texts += ["Hello, world! {x} = ~3%", "applesauce Miami 12apples", "".join(map(chr, range(32, 127)))]
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.unk_token_id not in ids
    assert tokenizer("é", add_special_tokens=False).input_ids == [tokenizer.unk_token_id]


def test_the_chat_template_renders_what_training_saw(tokenizer) -> None:
    problem = next(problems("train", 0))
    chat = [{"role": "user", "content": problem.question}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    encoded = encode(problem, tokenizer)
    assert encoded is not None
    assert rendered == encoded[0]
    with pytest.raises(Exception, match="unknown role"):
        tokenizer.apply_chat_template([{"role": "judge", "content": ""}], tokenize=False)


def test_noisy_copies_hide_only_answers_and_label_what_they_hide(tokenizer) -> None:
    batch = make_batch(problems("train", 1), tokenizer, 8, 2, torch.Generator().manual_seed(0))
    noised = batch.ids[:, SEQUENCE:] == tokenizer.mask_token_id
    assert noised.any()
    assert (noised == (batch.labels[:, SEQUENCE:] != -100)).all()
    assert (batch.labels[:, :SEQUENCE] == -100).all()
    clean = batch.ids[:, :SEQUENCE].gather(1, batch.positions[:, SEQUENCE:])
    assert (clean[noised] == batch.labels[:, SEQUENCE:][noised]).all()


def test_shipped_files_are_those_of_the_recipe(tokenizer) -> None:
    from transformers import AutoTokenizer

    shipped = AutoTokenizer.from_pretrained(SHIPPED)
    text = next(problems("held-out", 9)).question
    assert shipped(text).input_ids == tokenizer(text).input_ids
    assert shipped.mask_token_id == tokenizer.mask_token_id
    model = MRPForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)
    assert model.config.block_size == BLOCK
    assert model.config.mask_token_id == tokenizer.mask_token_id


def test_shipped_code_is_linked_not_copied() -> None:
    from modeling_mrp.hub.remote_code import code_files

    for file in code_files():
        link = SHIPPED / file.name
        assert link.is_symlink(), f"{link} is missing: run python -m modeling_mrp.tiny link"
        assert link.resolve() == file.resolve()


@pytest.mark.slow
def test_rebuild_command_runs_end_to_end_and_continues(tmp_path: Path) -> None:
    from modeling_mrp.tiny.build import build
    from modeling_mrp.tiny.heads import RECIPE
    from modeling_mrp.training.config import load_config

    arguments = {"head_steps": 2, "count": 24, "seed": 0, "threads": 1, "compiled": False, "copy": False}
    build(tmp_path, steps=2, **arguments)
    model = MRPForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert model.config.num_nextn_predict_layers == load_config(RECIPE, []).head.layers
    before = model.model.layers[0].mlp.up_proj.weight.clone()
    build(tmp_path, steps=2, **arguments)
    again = MRPForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(before, again.model.layers[0].mlp.up_proj.weight)
    MRPForCausalLM.from_pretrained(tmp_path, mrp_head=str(tmp_path / "direct_head.safetensors"))
