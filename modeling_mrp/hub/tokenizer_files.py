"""Copies a tokenizer into a converted folder and makes it agree with the model's special tokens."""

import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .checkpoint_reader import read_json
from .errors import HubError

_FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "added_tokens.json",
    "special_tokens_map.json", "chat_template.jinja", "chat_template.json", "tokenizer.model", "vocab.txt",
)  # fmt: skip
# What transformers writes about the place it read from, and the original's own code.
_STRIPPED = ("auto_map", "is_local", "local_files_only", "name_or_path")
_MASK_NAMES = ("<|MASK|>", "<MASK>")
_TURN_END = "<|im_end|>"
_SAMPLES = (
    "Janet's 16 ducks lay eggs: 3 + 4 = 7.\n\n#### 7",
    "<|im_start|>user\nWarum? Größe 1,5 µm — 漢字<|im_end|>\n<|im_start|>assistant\n",
    "def f(x):\n\treturn  x ** 2\n",
)


@dataclass
class TokenizerResult:
    """What was done. `end_tokens`: ids that end an answer by the chat template, or the tokenizer's own end token."""

    found: bool = False
    end_tokens: list[int] = field(default_factory=list)
    pad_token_id: int | None = None
    notes: list[str] = field(default_factory=list)


def write_tokenizer(source: Path, target: Path, mask_token_id: int, vocab_size: int) -> TokenizerResult:
    """Writes the tokenizer of `source` into `target`, with the mask token that the model's config names.

    Raises:
        HubError: the tokenizer needs code of its own, or its mask token is not the model's.
    """
    result = TokenizerResult()
    if not any((source / name).exists() for name in ("tokenizer.json", "vocab.json", "tokenizer.model", "vocab.txt")):
        result.notes.append("tokenizer: none found in the source, so none was written.")
        return result
    with tempfile.TemporaryDirectory() as scratch:
        for name in _FILES:
            if (source / name).exists():
                shutil.copyfile(source / name, Path(scratch) / name)
        stripped = _strip(Path(scratch) / "tokenizer_config.json")
        tokenizer = _load(Path(scratch), source)
    if "auto_map" in stripped:
        result.notes.append("tokenizer: dropped auto_map (its code is part of transformers).")
    samples = [tokenizer(text)["input_ids"] for text in _SAMPLES]
    _reconcile_mask(tokenizer, source, mask_token_id, vocab_size, result)
    _find_end_tokens(tokenizer, result)
    result.found, result.pad_token_id = True, tokenizer.pad_token_id
    if tokenizer.chat_template is None:
        result.notes.append("tokenizer: it has no chat template; chat and mrp-serve need one.")
    tokenizer.save_pretrained(target)
    _strip(target / "tokenizer_config.json")
    written = _load(target, target)
    if [written(text)["input_ids"] for text in _SAMPLES] != samples:
        raise HubError(f"the tokenizer of {source} gives other ids after it was written again; please report this.")
    return result


def _load(folder: Path, source: Path) -> PreTrainedTokenizerBase:
    try:
        # Without a config.json beside it, the tokenizer's own class decides, not the model type.
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise HubError(f"the tokenizer of {source} cannot be read without code of its own: {error}") from error


def _strip(path: Path) -> list[str]:
    if not path.exists():
        return []
    content = read_json(path)
    removed = [name for name in _STRIPPED if content.pop(name, None) is not None]
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return removed


def _reconcile_mask(
    tokenizer: Any, source: Path, mask_token_id: int, vocab_size: int, result: TokenizerResult
) -> None:
    vocabulary = tokenizer.get_vocab()
    by_id = {index: token for token, index in vocabulary.items()}
    token = by_id.get(mask_token_id)
    if token is None:
        elsewhere = [name for name in _MASK_NAMES if name in vocabulary]
        if elsewhere:
            raise HubError(
                f"the tokenizer of {source} has its mask token {elsewhere[0]!r} at id {vocabulary[elsewhere[0]]}, the "
                f"config says mask_token_id={mask_token_id}. Say which is right with --mask-token-id."
            )
        if mask_token_id != len(tokenizer) or mask_token_id >= vocab_size:
            result.notes.append(
                f"tokenizer: it has no token at mask_token_id={mask_token_id} and none was added (its next free id is "
                f"{len(tokenizer)}); masked text cannot be shown, everything else works."
            )
            return
        token = _MASK_NAMES[0]
        tokenizer.add_special_tokens({"mask_token": token})
        result.notes.append(f"tokenizer: added the mask token {token!r} at id {mask_token_id}.")
    _note_other_names(source, mask_token_id, token, result)
    if tokenizer.mask_token != token:
        tokenizer.add_special_tokens({"mask_token": token})
        result.notes.append(f"tokenizer: {token!r} (id {mask_token_id}) is now its mask token.")
    if tokenizer.mask_token_id != mask_token_id:
        raise HubError(
            f"the tokenizer of {source} cannot hold {token!r} at id {mask_token_id} (it gives "
            f"{tokenizer.mask_token_id}). Say which id is right with --mask-token-id."
        )


def _note_other_names(source: Path, mask_token_id: int, token: str, result: TokenizerResult) -> None:
    path = source / "added_tokens.json"
    names = [name for name, index in (read_json(path) if path.exists() else {}).items() if index == mask_token_id]
    if names and names[0] != token:
        result.notes.append(
            f"tokenizer: its files call id {mask_token_id} both {token!r} and {names[0]!r}; {token!r} was kept."
        )


def _find_end_tokens(tokenizer: Any, result: TokenizerResult) -> None:
    template = tokenizer.chat_template
    text = template if isinstance(template, str) else "".join((template or {}).values())
    if _TURN_END in text and _TURN_END in tokenizer.get_vocab():
        result.end_tokens.append(tokenizer.convert_tokens_to_ids(_TURN_END))
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in result.end_tokens:
        result.end_tokens.append(tokenizer.eos_token_id)
