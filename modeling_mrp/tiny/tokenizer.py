"""The tiny model's tokenizer: whole words, single digits, any other printable ASCII character by itself."""

import re

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from .words import vocabulary_words

PAD, END, MASK, UNKNOWN = "<|endoftext|>", "<|im_end|>", "<|MASK|>", "<|unknown|>"
USER, ASSISTANT, SYSTEM = "<|user|>", "<|assistant|>", "<|system|>"
_SPECIAL = [PAD, END, MASK, UNKNOWN, SYSTEM, USER, ASSISTANT]

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('unknown role ' + message.role + '; allowed: system, user, assistant') -}}"
    "{%- endif -%}"
    "{{- '<|' + message.role + '|>' + message.content + '<|im_end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def vocabulary() -> list[str]:
    """All tokens in the order of their ids."""
    characters = ["\n", *(chr(code) for code in range(32, 127))]
    return [*_SPECIAL, *characters, *vocabulary_words()]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A fast tokenizer whose decode(encode(text)) is text for all printable ASCII."""
    tokens = vocabulary()
    words = sorted((t for t in tokens if len(t) > 1 and t not in _SPECIAL), key=len, reverse=True)
    # A word token must not end inside a longer word; anything else falls back to characters.
    pattern = "|".join(re.escape(word) + (r"(?![A-Za-z])" if word[-1].isalpha() else "") for word in words)
    tokenizer = Tokenizer(WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{pattern}|[\\s\\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        mask_token=MASK,
        unk_token=UNKNOWN,
        extra_special_tokens={"system_token": SYSTEM, "user_token": USER, "assistant_token": ASSISTANT},
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
