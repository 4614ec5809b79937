"""Ends act as if tokens had been produced one by one from the left; streams, handles and lengths follow from that."""

import pytest
import torch
from character_tokenizer import DraftStreamer, RememberingStreamer, character_tokenizer, text_of
from test_padding import MODES, random_prompts
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import StoppingCriteria, TextIteratorStreamer

from benchmarks.fuzz_losslessness import pad_prompts
from benchmarks.random_models import random_model, shared_model

BLOCK, NEW = 4, 14


def generate(prompts, model=None, **arguments):
    ids, mask = pad_prompts(prompts, True, pad=arguments.get("pad_token_id", 0))
    model = shared_model(8) if model is None else model
    return model.generate(ids, attention_mask=mask, **({"max_new_tokens": NEW} | arguments))


def new_tokens(prompts, **arguments):
    """(new tokens of each row, output)."""
    out = generate(prompts, return_dict_in_generate=True, **arguments)
    width = max(map(len, prompts))
    rows = zip(out.sequences[:, width:].tolist(), out.new_tokens.tolist(), strict=True)
    return [tokens[:count] for tokens, count in rows], out


@pytest.mark.parametrize("mode", MODES)
def test_end_token_at_every_position(mode):
    """Guards what follows the end token: inside a block, at its border, in a drafted block, and forwards after it."""
    (prompt,) = random_prompts(6)
    (whole,), full = new_tokens([prompt], **MODES[mode])
    for place, token in enumerate(whole):
        wanted = whole[: whole.index(token) + 1]
        (got,), out = new_tokens([prompt], eos_token_id=[token, 62], **MODES[mode])
        assert got == wanted, place
        assert out.total_forwards <= full.total_forwards
        assert out.sequences.shape[1] == len(prompt) + len(wanted)


@pytest.mark.parametrize("mode", MODES)
def test_end_token_in_a_batch(mode):
    """Guards pad tokens inside answers, tokens after an end, and a row that ends with its neighbour."""
    prompts = random_prompts(3, 8, 5)
    whole, _ = new_tokens(prompts, **MODES[mode])
    for stop in {whole[0][0], whole[1][5], whole[2][-1]}:
        wanted = [row[: row.index(stop) + 1] if stop in row else row for row in whole]
        got, out = new_tokens(prompts, eos_token_id=stop, pad_token_id=stop, **MODES[mode])
        assert got == wanted
        tail = out.sequences[:, max(map(len, prompts)) :]
        for row, tokens in zip(tail.tolist(), wanted, strict=True):
            assert row == tokens + [stop] * (len(row) - len(tokens))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("new", [1, 2, 3, 7])
def test_max_new_tokens_is_exact(mode, new):
    """Guards lengths rounded up to whole blocks."""
    prompts = random_prompts(3, 8)
    got, out = new_tokens(prompts, max_new_tokens=new, **MODES[mode])
    assert out.sequences.shape[1] == 8 + new
    whole, _ = new_tokens(prompts, **MODES[mode])
    assert got == [row[:new] for row in whole]


def test_max_length_counts_the_padded_prompt():
    """Guards lm_eval's call, whose only length is `max_length`, even against a config's `max_new_tokens`."""
    prompts = random_prompts(3, 8)
    assert torch.equal(generate(prompts, max_new_tokens=None, max_length=13), generate(prompts, max_new_tokens=5))
    model = random_model(8)
    model.generation_config.max_new_tokens = 2
    assert generate(prompts, model, max_new_tokens=None, max_length=13).shape[1] == 13


@pytest.mark.parametrize("mode", MODES)
def test_stop_strings_end_the_text_exactly(mode):
    """Guards stop strings inside a block, across a border, at the first token, and text after them."""
    tokenizer, (prompt,) = character_tokenizer(), random_prompts(6)
    (whole,), _ = new_tokens([prompt], **MODES[mode])
    text = text_of(whole)
    # The prompt of 6 leaves 2 places in its block: borders lie behind new tokens 2, 6 and 10.
    for begin, length in ((0, 1), (0, 2), (1, 2), (3, 2), (5, 3), (8, 4), (NEW - 1, 1)):
        string = text[begin : begin + length]
        end = text.index(string) + length
        streamer = RememberingStreamer()
        (got,), _ = new_tokens(
            [prompt], stop_strings=["nevermore", string], tokenizer=tokenizer, streamer=streamer, **MODES[mode]
        )
        assert text_of(got) == text[:end]
        assert streamer.tokens[len(prompt) :] == got
        assert streamer.ended


def test_stop_string_in_the_prompt_does_not_end():
    """Guards a stop string that ended before the answer began; one that the answer completes does end it."""
    tokenizer, (prompt,) = character_tokenizer(), random_prompts(6)
    (whole,), _ = new_tokens([prompt])
    inside = text_of(prompt[2:5])
    (got,), _ = new_tokens([prompt], stop_strings=inside, tokenizer=tokenizer)
    assert got == whole
    across = text_of([prompt[-1], whole[0]])
    (got,), _ = new_tokens([prompt], stop_strings=across, tokenizer=tokenizer)
    assert got == whole[:1]


class CountCalls(StoppingCriteria):
    """Stops each row once its text holds the row's token; notes what it saw."""

    def __init__(self, width, stops=()):
        self.width, self.stops, self.lengths = width, stops, []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1] - self.width)
        rows = zip(input_ids[:, self.width :], self.stops, strict=True)
        return torch.tensor([bool((row == stop).any()) for row, stop in rows])


@pytest.mark.parametrize("mode", MODES)
def test_stopping_criteria_see_growing_prefixes(mode):
    """Guards criteria that are called once a block: they see every length, one token at a time, all rows alike."""
    prompts = random_prompts(3, 8, 5)
    whole, _ = new_tokens(prompts, **MODES[mode])
    stops = [whole[0][2], whole[1][7], 62]
    criterion = CountCalls(8, stops)
    got, out = new_tokens(prompts, stopping_criteria=[criterion], **MODES[mode])
    assert got == [row[: row.index(s) + 1] if s in row else row for row, s in zip(whole, stops, strict=True)]
    assert criterion.lengths == list(range(1, criterion.lengths[-1] + 1))
    assert out.new_tokens.tolist() == [len(row) for row in got]


class HarnessCriterion(StoppingCriteria):
    """lm_eval's protocol: decodes the last few tokens of every row, remembers who is done, answers once for all."""

    def __init__(self, width, string, rows):
        self.width, self.string, self.done = width, string, [False] * rows

    def __call__(self, input_ids, scores, **kwargs):
        for row, ids in enumerate(input_ids[:, self.width :][:, -len(self.string) - 1 :].tolist()):
            self.done[row] = self.done[row] or self.string in text_of(ids)
        return all(self.done)


@pytest.mark.parametrize("mode", ["none", "lattice", "direct", "remask"])
def test_scalar_criterion_of_the_harness(mode):
    """Guards a criterion that looks only at the tail and answers for the whole batch: no stop is missed."""
    prompts = random_prompts(3, 8)
    whole, _ = new_tokens(prompts, **MODES[mode])
    common = set(text_of(whole[0])) & set(text_of(whole[1]))
    string = sorted(common)[0] if common else text_of(whole[0])[3]
    ends = [text_of(row).index(string) + 1 if string in text_of(row) else NEW for row in whole]
    got, _ = new_tokens(prompts, stopping_criteria=[HarnessCriterion(8, string, 2)], **MODES[mode])
    assert [len(row) for row in got] == [max(ends)] * 2
    assert got == [row[: max(ends)] for row in whole]


@pytest.mark.parametrize("mode", MODES)
def test_stream_equals_returned_text(mode):
    """Guards streams with gaps, repetitions, masked places or tokens after the end: prompt first, then 1-D tokens."""
    (prompt,) = random_prompts(6)
    (whole,), _ = new_tokens([prompt], **MODES[mode])
    streamer = DraftStreamer()
    (got,), _ = new_tokens([prompt], streamer=streamer, eos_token_id=whole[9], **MODES[mode])
    assert streamer.ended
    assert streamer.puts[0] == list(prompt)
    assert streamer.tokens[len(prompt) :] == got == whole[: whole.index(whole[9]) + 1]


def test_text_streamer_of_transformers():
    """Guards the protocol of transformers' own streamers."""
    tokenizer, (prompt,) = character_tokenizer(), random_prompts(6)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=5)
    (got,), _ = new_tokens([prompt], streamer=streamer)
    assert "".join(streamer) == text_of(got)


def test_drafts_are_streamed_where_they_are_wanted():
    """Guards put_draft: transformers' `TextDiffusionStreamer` decodes what it gets and shows it behind the confirmed
    text, so it must be ids (the mask token's at masked places) and begin where that text ends."""
    (prompt,) = random_prompts(6)
    streamer = DraftStreamer()
    generate([prompt], streamer=streamer, mrp_mode="none")
    assert len(streamer.drafts) > 3
    shown = 0
    for count, draft in streamer.drafts:
        assert all(0 <= token < 64 for token in draft)
        for place, token in enumerate(draft):
            if token != 63:
                shown += 1
                assert streamer.tokens[count + place] == token
    assert shown > 3


@pytest.mark.parametrize("mode", ["none", "lattice", "chain", "direct", "remask"])
@pytest.mark.parametrize("rows", [1, 3])
def test_cache_handle_continues_a_conversation(mode, rows):
    """Guards a second prefill of the shared prefix, keys of another row after rows have left, a head whose prefix is
    behind, and a handle that claims what a later call has overwritten."""
    prompts = random_prompts(7, 12, 9)[:rows]
    model, arguments = shared_model(8), MODES[mode]
    ids, mask = pad_prompts(prompts, True)
    stop = int(model.generate(ids, attention_mask=mask, max_new_tokens=NEW, **arguments)[0, ids.shape[1] + 4])
    first = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, eos_token_id=stop, pad_token_id=61, return_cache=True,
        return_dict_in_generate=True, **arguments,
    )  # fmt: skip
    history = [
        [*prompt, *row[:count]]
        for prompt, row, count in zip(
            prompts, first.sequences[:, ids.shape[1] :].tolist(), first.new_tokens.tolist(), strict=True
        )
    ]
    following = [tuple(row + list(more)) for row, more in zip(history, random_prompts(5, 2, 6, seed=9), strict=False)]
    ids, mask = pad_prompts(following, True)
    call = {"attention_mask": mask, "max_new_tokens": NEW, "return_dict_in_generate": True, **arguments}
    anew = model.generate(ids, **call)
    again = model.generate(ids, past_key_values=first.cache, return_cache=True, **call)
    assert torch.equal(again.sequences, anew.sequences)
    # A handle is good for one call; used again it must not claim what that call has overwritten.
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % 60
    assert torch.equal(
        model.generate(other, past_key_values=first.cache, **call).sequences, model.generate(other, **call).sequences
    )
    longer = torch.cat([again.sequences, ids[:, :3]], dim=1)
    mask = torch.cat([mask, torch.ones(rows, longer.shape[1] - mask.shape[1], dtype=torch.long)], dim=1)
    call["attention_mask"] = mask
    third = model.generate(longer, past_key_values=again.cache, **call)
    assert torch.equal(third.sequences, model.generate(longer, **call).sequences)


def test_cache_handle_spares_the_prefill(monkeypatch):
    """Guards a handle that is accepted and ignored."""
    model, (prompt,) = shared_model(8), random_prompts(40)
    ids = torch.tensor([prompt])
    first = model.generate(ids, max_new_tokens=8, mrp_mode="none", return_cache=True, return_dict_in_generate=True)
    read = []
    original = model.backbone
    monkeypatch.setattr(model, "backbone", lambda ids, *a, **k: read.append(ids.shape[1]) or original(ids, *a, **k))
    longer = torch.cat([first.sequences, ids[:, :4]], dim=1)
    model.generate(longer, max_new_tokens=1, mrp_mode="none", past_key_values=first.cache)
    assert read[0] <= 12
    assert read[1:] == [4] * (len(read) - 1)


def test_num_return_sequences():
    """Guards copies that draw the same noise, and greedy copies that pretend to be samples."""
    (prompt,) = random_prompts(5)
    ids = torch.tensor([prompt, prompt[::-1]])
    arguments = {"do_sample": True, "temperature": 1.5, "max_new_tokens": NEW, "seed": 4}
    out = shared_model(8).generate(ids, num_return_sequences=3, **arguments)
    assert out.shape[0] == 6
    assert torch.equal(out[:, :5], ids.repeat_interleave(3, dim=0))
    assert len({tuple(row) for row in out.tolist()}) == 6
    with pytest.raises(ValueError, match="num_return_sequences=3"):
        shared_model(8).generate(ids, num_return_sequences=3, max_new_tokens=NEW)


def test_seeds():
    """Guards noise outside torch's generator: the same seed gives the same text, another one another."""
    (prompt,) = random_prompts(5)
    texts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        texts.append(generate([prompt], do_sample=True, temperature=1.5).tolist())
    assert texts[0] == texts[1] != texts[2]
    assert generate([prompt], do_sample=True, seed=3).tolist() == generate([prompt], do_sample=True, seed=3).tolist()


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize("mode", ["none", "lattice"])
def test_long_prompts_make_no_quadratic_tensor(mode):
    """Guards masks and scores of prompt length squared: the largest tensor grows with the length, not its square."""
    model = random_model(0, max_position_embeddings=8192)
    sizes = []
    for length in (1536, 3072):
        ids = torch.randint(0, 62, (1, length), generator=torch.Generator().manual_seed(0))
        with LargestTensor() as watched:
            model.generate(ids, max_new_tokens=6, **MODES[mode])
        sizes.append(watched.largest)
    assert sizes[1] <= 2.2 * sizes[0]
    assert sizes[1] < 3072**2


def test_long_prompt_equals_one_forward():
    """Guards chunked prefill: positions, masks and blocks behind the first chunk."""
    model = random_model(0, max_position_embeddings=2048)
    ids = torch.randint(0, 62, (1, 1201), generator=torch.Generator().manual_seed(0))
    out = model.generate(ids, max_new_tokens=3, mrp_mode="none", block_length=4, return_dict_in_generate=True,
                         output_trace=True)  # fmt: skip
    assert out.prefill_forwards == 3
    tokens = torch.cat([ids, torch.full((1, 3), 63)], dim=1)
    with torch.no_grad():
        logits = model(tokens, block_length=4).logits[0, 1201:]
    # The confidence is the raw softmax's, in which the mask token has its share; it is never chosen.
    first = int(logits.log_softmax(-1)[:, :63].max(-1).values.argmax())
    assert int(out.reveal_step[0, 1201 + first]) == 0
    assert int(out.sequences[0, 1201 + first]) == int(logits[first, :63].argmax())
