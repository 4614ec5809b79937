"""The published tokenizer's files, where they are at hand (they are too large to keep a copy here)."""

import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from modeling_mrp.hub.tokenizer_files import write_tokenizer

FILES = Path(__file__).parents[3] / "shared" / "sdar-tokenizer"
pytestmark = pytest.mark.skipif(not FILES.exists(), reason="no ../shared/sdar-tokenizer beside this clone")


def test_the_published_tokenizer(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(FILES, source)
    target.mkdir()
    result = write_tokenizer(source, target, mask_token_id=151669, vocab_size=151936)
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert len(tokenizer) == 151670
    assert tokenizer.mask_token_id == 151669
    assert tokenizer.convert_ids_to_tokens(151669) == "<|MASK|>"
    assert result.end_tokens == [151645, 151643]
    assert result.pad_token_id == 151643
    assert any("'<|MASK|>' and '<MASK>'" in note for note in result.notes)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "2+2?"}], add_generation_prompt=True)
    assert tokenizer.decode(text["input_ids"]) == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    # Known ids of Qwen's vocabulary.
    assert tokenizer("Hello world").input_ids == [9707, 1879]
