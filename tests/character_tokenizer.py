"""A tokenizer of single characters over the random models' 64 ids, and streamers that remember what they got."""

import string

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHARACTERS = string.ascii_letters + string.digits
END, MASK = 62, 63


def character_tokenizer():
    vocabulary = {character: index for index, character in enumerate(CHARACTERS)} | {"<end>": END, "<mask>": MASK}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", mask_token="<mask>", pad_token="<end>", unk_token="<end>"
    )


def text_of(ids):
    return "".join(CHARACTERS[i] if i < END else "." for i in ids)


class RememberingStreamer:
    """Notes every `put`; transformers' streamers want 1-D tensors, the prompt first."""

    def __init__(self):
        self.puts, self.ended = [], False

    @property
    def tokens(self):
        """All tokens so far, the prompt's too."""
        return [token for put in self.puts for token in put]

    def put(self, value):
        assert not self.ended
        assert isinstance(value, torch.Tensor)
        assert value.ndim == 1
        self.puts.append(value.tolist())

    def end(self):
        self.ended = True


class DraftStreamer(RememberingStreamer):
    """As above, and takes the drafts."""

    def __init__(self):
        super().__init__()
        self.drafts = []

    def put_draft(self, value, **kwargs):
        self.drafts.append((len(self.tokens), value.flatten().tolist()))
