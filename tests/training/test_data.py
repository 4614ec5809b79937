"""Rows of every kind become labelled samples, and a bad row is named by its number."""

import json

import pytest
import torch
from datasets import Dataset
from training_models import BLOCK, sample

from modeling_mrp.noising import IGNORED
from modeling_mrp.tiny.tokenizer import build_tokenizer
from modeling_mrp.training.data import Collator, DataConfig, SampleEncoder, held_out, load_samples, pack, prepare
from modeling_mrp.training.errors import TrainingError


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def encoder(tokenizer, **config):
    return SampleEncoder(tokenizer, DataConfig(train="x", **config), BLOCK, tokenizer.pad_token_id)


def supervised_text(tokenizer, row):
    return tokenizer.decode([token for token in row["labels"] if token != IGNORED])


def test_chat_supervises_assistant_turns_alone(tokenizer):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2 + 2"},
        {"role": "assistant", "content": "4"},
    ]
    row = encoder(tokenizer, complete_last_block=False)({"messages": messages}, 0)
    assert supervised_text(tokenizer, row) == "2<|im_end|>4<|im_end|>"
    assert row["position_ids"] == list(range(len(row["input_ids"])))


def test_prompt_and_response(tokenizer):
    row = encoder(tokenizer)({"prompt": "1 + 1", "response": "2"}, 3)
    assert len(row["input_ids"]) % BLOCK == 0
    assert supervised_text(tokenizer, row).startswith("2<|im_end|>")
    assert set(row["sample_keys"]) == {3}
    plain = encoder(tokenizer, chat_prompts=False, complete_last_block=False)({"prompt": "1", "response": "2"}, 0)
    assert supervised_text(tokenizer, plain) == "2" + tokenizer.eos_token


def test_plain_text_and_ready_ids(tokenizer):
    assert IGNORED not in encoder(tokenizer)({"text": "1 + 1 = 2"}, 0)["labels"]
    row = encoder(tokenizer)({"input_ids": [5, 6, 7], "labels": [IGNORED, 6, 7], "reveal_order": [0, 1, 0]}, 0)
    assert row["labels"] == [IGNORED, 6, 7]
    assert row["reveal_order"] == [0, 1, 0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": ""}, "row 7 is empty"),
        ({"prompt": "1", "response": ""}, "row 7 has an empty response"),
        ({"messages": [{"role": "user", "content": "1"}]}, "row 7 has no assistant turn"),
        ({"question": "1"}, "row 7 has the columns"),
        ({"text": "1 " * 50}, "row 7 has .* data.max_length=32"),
        ({"input_ids": [1, 2], "labels": [1]}, "row 7: 1 labels for 2"),
        ({"input_ids": [1, 2], "labels": [IGNORED, IGNORED]}, "row 7 has nothing to learn from"),
    ],
)
def test_bad_rows_are_named(tokenizer, row, message):
    with pytest.raises(TrainingError, match=message):
        encoder(tokenizer, max_length=32)(row, 7)


def test_too_long_rows_can_be_skipped(tokenizer):
    rows = Dataset.from_list([{"text": "1"}, {"text": "1 " * 50}, {"text": "2"}])
    prepared = prepare(rows, encoder(tokenizer, max_length=32, too_long="skip"), packing=False)
    assert len(prepared) == 2


def test_chat_without_a_template_is_refused(tokenizer):
    bare = build_tokenizer()
    bare.chat_template = None
    with pytest.raises(TrainingError, match="row 2 holds chat messages, but the tokenizer has no chat template"):
        encoder(bare)({"messages": [{"role": "assistant", "content": "1"}]}, 2)


def test_packing_keeps_samples_whole_and_apart():
    samples = [sample(length, 1, key) for key, length in enumerate([7, 9, 3, 8, 1, 12])]
    columns = {name: [row[name] for row in samples] for name in samples[0]}
    packed = pack(columns, 16)
    assert max(map(len, packed["input_ids"])) <= 16
    found = {}
    for ids, keys in zip(packed["input_ids"], packed["sample_keys"], strict=True):
        for token, key in zip(ids, keys, strict=True):
            found.setdefault(key, []).append(token)
    assert found == {key: row["input_ids"] for key, row in enumerate(samples)}


def test_streaming_equals_loading(tokenizer, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": f"{n} + {n} = {2 * n}"}) + "\n" for n in range(20)))
    encode = encoder(tokenizer, max_length=40)
    loaded = list(prepare(load_samples(str(file), "train", None, False), encode, True))
    streamed = list(prepare(load_samples(str(file), "train", None, True), encode, True))
    assert loaded == streamed
    assert len(loaded) < 20


def test_files_that_are_missing_or_of_unknown_kind(tmp_path):
    with pytest.raises(TrainingError, match="does not exist"):
        load_samples(str(tmp_path / "no.jsonl"), "train", None, False)
    with pytest.raises(TrainingError, match="mixed or unknown kinds"):
        load_samples(["a.jsonl", "b.txt"], "train", None, False)


def test_held_out_rows():
    rows = Dataset.from_list([{"text": str(n)} for n in range(10)])
    train, evaluation = held_out(rows, 3, 0)
    assert len(train) == 7
    assert not set(train["text"]) & set(evaluation["text"])
    with pytest.raises(TrainingError, match="evaluation_size=10"):
        held_out(rows, 10, 0)


def test_collator_pads_on_the_right():
    batch = Collator(9)([sample(3, 1, 0), sample(5, 1, 1)])
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert batch["input_ids"][0, 3:].tolist() == [9, 9]
    assert (batch["labels"][0, 3:] == IGNORED).all()
    assert batch["input_ids"].dtype == torch.int64
