"""The Triton kernels against their torch twins under Triton's interpreter.

Not collected by name: the interpreter must be chosen before Triton is first imported, so `test_interpreter.py` runs
this file in a process of its own. Every allocation of a launcher is poisoned with NaN and fenced by canaries.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"


import pytest
import torch
from inputs import (
    ATTENTION_SHAPES,
    attention_inputs,
    inside_nan,
    logits_of,
    noise_of,
)
from mrp_kernels import (
    NoiseKey,
    mrp_input,
    packed_block_attention,
    qk_norm_rope,
    residual_kl,
    reveal_statistics,
    shortlist,
    shortlist_residual,
)
from mrp_kernels import packed_block_attention_triton as attention_module
from twins_and_kernels import both, fenced  # noqa: F401  (a fixture)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def assert_fields_close(twin, kernel, rtol: float = 2e-5, atol: float = 2e-5) -> None:
    for name in twin._fields:
        torch.testing.assert_close(
            getattr(kernel, name),
            getattr(twin, name),
            rtol=rtol,
            atol=atol,
            equal_nan=True,
            msg=lambda m, n=name: n + m,
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab"), [(5, 1003), (3, 9001), (4, 16)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask_token_id": 0, "runner_up": False, "entropy": False},
        {"mask_token_id": -1, "residual_scale": 0.7},
        {"mask_token_id": 5, "temperature": 1.3},
        {"temperature": 2.0, "top_k": 3, "residual_scale": -1.0},
        {"temperature": 3.0, "top_p": 0.8, "top_k": 9, "mask_token_id": 2},
    ],
)
def test_statistics(dtype, rows, vocab, options):
    options = dict(options)
    if "mask_token_id" in options:
        options["mask_token_id"] %= vocab
    if "temperature" in options:
        options["noise"] = noise_of(rows)
    if "residual_scale" in options:
        options["residual"] = inside_nan(
            torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3)).to(dtype)
        )
    assert_fields_close(*both(reveal_statistics, logits_of(rows, vocab, dtype), **options))


def test_statistics_at_the_full_vocabulary():
    logits = logits_of(1, 151936, torch.bfloat16)
    assert_fields_close(*both(reveal_statistics, logits, mask_token_id=151669))
    assert_fields_close(*both(reveal_statistics, logits, mask_token_id=7, temperature=1.5, noise=noise_of(1)))


def test_statistics_at_the_edges():
    """A likeliest mask token, near-certain rows, ties across splits, a NaN, rows that are all one token."""
    logits = torch.zeros(6, 9000)
    logits[0, 8999] = 50.0
    logits[1, 3] = 25.0
    logits[2, [100, 5000, 8500]] = 2.0
    logits[3, 4097] = torch.nan
    logits[4] = -torch.inf
    logits[4, [4096, 8192]] = 1.0
    logits[5, 17] = 200.0
    twin, kernel = both(reveal_statistics, logits, mask_token_id=8999)
    assert kernel.log_sum_exp.isnan().tolist() == [False, False, False, True, False, False]
    assert 0 <= kernel.token[3] < 9000
    assert kernel.token.tolist()[:3] + kernel.token.tolist()[4:] == [0, 3, 100, 4096, 17]
    assert kernel.runner_up.tolist()[:3] + kernel.runner_up.tolist()[4:] == [1, 0, 5000, 8192, 0]
    good = [0, 1, 2, 4, 5]
    assert_fields_close(type(twin)(*(x[good] for x in twin)), type(kernel)(*(x[good] for x in kernel)))


def test_sampled_tokens_equal_the_twins_and_follow_the_softmax():
    rows = 3000
    logits = torch.tensor([3.0, 0.5, 2.4, 9.0, -1.0, 1.5, 0.1, 0.0]).repeat(rows, 1)
    order = torch.arange(rows)
    noise = NoiseKey(11, order % 7, order, order % 5)
    options = {"mask_token_id": 3, "temperature": 1.5, "runner_up": False, "entropy": False}
    twin, kernel = both(reveal_statistics, logits, noise=noise, **options)
    assert torch.equal(twin.token, kernel.token)
    kept = [0, 1, 2, 4, 5, 6, 7]
    counts = torch.bincount(kernel.token, minlength=8)[kept]

    def statistic(temperature: float) -> float:
        expected = (logits[0, kept] / temperature).double().softmax(0) * rows
        return ((counts - expected) ** 2 / expected).sum().item()

    assert statistic(1.5) < 33.1  # the 1 - 1e-5 quantile at six degrees of freedom
    # So many draws do tell a temperature that is off by a fifth.
    assert min(statistic(1.2), statistic(1.8)) > 33.1


def test_sampled_tokens_equal_the_twins_for_every_kind_of_seed():
    rows = 12
    logits = torch.randn(rows, 40, generator=torch.Generator().manual_seed(5))
    order = torch.arange(rows)
    for seed in (2**63 + 9, torch.tensor(-3), order * 2**33 + 5):
        noise = NoiseKey(seed, order % 7, order * 2**31, order % 5)
        twin, kernel = both(reveal_statistics, logits, temperature=1.5, top_k=9, noise=noise)
        assert torch.equal(twin.token, kernel.token)


@pytest.fixture(params=["one launch", "chunks of 16", "one chunk"])
def attention_path(request, monkeypatch) -> bool:
    """Takes the choice between one launch and two from the kernel; whether it is one."""
    chunk = 16 if request.param == "chunks of 16" else 512
    whole = request.param == "one launch"
    monkeypatch.setattr(attention_module, "chunk_size", lambda *_: chunk)
    monkeypatch.setattr(attention_module, "one_launch", lambda *_: whole)
    return whole


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """Names of the attention's kernels, in the order in which they are launched."""
    names: list[str] = []

    class Recorded:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            names.append(self.kernel.fn.__name__)
            return self.kernel[grid]

    for name in ("_attention_kernel", "_combine_kernel"):
        monkeypatch.setattr(attention_module, name, Recorded(getattr(attention_module, name)))
    return names


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ATTENTION_SHAPES)
@pytest.mark.parametrize("commits", [False, True])
def test_attention(dtype, shape, commits, attention_path, launched):
    arguments, options = attention_inputs(*shape, dtype)
    commit = torch.tensor([shape[3] - 1, -1, 0][: shape[0]]) if commits else None
    results = []
    for kernels in ("torch", "triton"):
        own = {**options, **{name: options[name].clone() for name in ("cache_key", "cache_value")}}
        output = packed_block_attention(*arguments, commit=commit, kernels=kernels, **own)
        results.append((output, own["cache_key"], own["cache_value"]))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for twin, kernel in zip(results[0][1:], results[1][1:], strict=True):
        torch.testing.assert_close(kernel, twin, rtol=0, atol=0, equal_nan=True)
    rows = shape[1] // shape[2] * shape[3] * shape[4]
    one_tile = rows <= attention_module.tile_sizes(rows, shape[5], dtype, 90)[0]
    assert (len(launched) == 1) == (attention_path and (one_tile or not commits))


@pytest.mark.parametrize("tiles", [1, 2])
def test_attention_commits_segments_that_lie_in_the_cache(tiles, monkeypatch, launched):
    """As `PackedCache` leaves them: behind the longest prefix, so that the place of the commit overlaps them."""
    monkeypatch.setattr(attention_module, "one_launch", lambda *_: True)
    segments, block, dim, prefixes = 2, 4 * tiles, 16, [9, 7]
    tokens, scratch = segments * block, max(prefixes)
    (query, *new), options = attention_inputs(2, 2, 1, segments, block, dim, prefixes, torch.float32, scratch + tokens)
    results = []
    for kernels in ("torch", "triton"):
        caches = [options[name].clone() for name in ("cache_key", "cache_value")]
        views = [cache[:, :, scratch:].copy_(x) for cache, x in zip(caches, new, strict=True)]
        own = {**options, "cache_key": caches[0], "cache_value": caches[1], "max_prefix_length": scratch}
        commit = torch.tensor([1, 0])
        results.append((packed_block_attention(query, *views, commit=commit, kernels=kernels, **own), *caches))
    for twin, kernel in zip(*results, strict=True):
        torch.testing.assert_close(kernel, twin, rtol=2e-5, atol=2e-5, equal_nan=True)
    assert len(launched) == tiles


def test_attention_with_keys_and_values_of_unlike_strides():
    (query, key, value), options = attention_inputs(2, 4, 2, 2, 3, 16, [5, 0], torch.float32)
    options["cache_value"] = inside_nan(options["cache_value"])
    twin, kernel = both(packed_block_attention, query, key, inside_nan(value), **options)
    torch.testing.assert_close(kernel, twin, rtol=2e-5, atol=2e-5)


def test_attention_is_one_launch_where_splits_save_little():
    """Short prefixes, and as many programs as processors; not a lone program on a long prefix."""

    def alone(programs: int, prefix: int) -> bool:
        return attention_module.one_launch(programs, prefix, attention_module.chunk_size(programs, prefix))

    assert alone(8, 0)
    assert alone(8, 512)
    assert alone(8, 1024)
    assert alone(128, 1024)
    assert alone(128, 8192)
    assert alone(264, 32768)
    assert not alone(8, 2048)
    assert not alone(64, 4096)
    assert not alone(140, 4096)


def test_attention_does_not_write_behind_the_capacity():
    arguments, options = attention_inputs(1, 2, 1, 1, 4, 16, [6], torch.float32, capacity=8)
    buffer = torch.full((1, 1, 20, 16), torch.nan)
    buffer[:, :, :8] = options["cache_key"]
    options["cache_key"] = buffer[:, :, :8]
    packed_block_attention(*arguments, commit=torch.tensor([0]), kernels="triton", **options)
    assert buffer[:, :, 8:].isnan().all()
    assert torch.equal(buffer[:, :, 6:8], arguments[1][:, :, :2])


def assert_lists_equal(twin, kernel, logits, mask) -> None:
    """The same list, but for which of the tokens that tie are in it, and in which order."""
    assert torch.equal(kernel.logits, twin.logits)
    assert torch.equal(logits.float().gather(1, kernel.tokens), kernel.logits)
    assert all(len(set(row)) == len(row) and mask not in row for row in kernel.tokens.tolist())
    for name in ("rest_log_sum_exp", "rest_mean_logit"):
        torch.testing.assert_close(getattr(kernel, name), getattr(twin, name), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", [None, 0, 1002])
@pytest.mark.parametrize("options", [{}, {"temperature": 2.0}, {"temperature": 2.0, "top_k": 5, "top_p": 0.9}])
def test_shortlist(dtype, mask, options):
    rows, vocab, size, hidden = 5, 1003, 19, 72
    logits = logits_of(rows, vocab, dtype)
    twin, kernel = both(shortlist, logits, size, mask_token_id=mask)
    assert_lists_equal(twin, kernel, logits, mask)
    generator = torch.Generator().manual_seed(4)
    residual = inside_nan(torch.randn(rows, hidden, generator=generator).to(dtype))
    weight = inside_nan((torch.randn(vocab, hidden, generator=generator) * 0.2).to(dtype))
    noise = noise_of(rows) if options else None
    assert_fields_close(*both(shortlist_residual, twin, residual, weight, residual_scale=0.5, noise=noise, **options))


@pytest.mark.parametrize(("vocab", "size"), [(9, 8), (60, 60), (300, 2), (2001, 9), (3000, 200), (151936, 64)])
def test_shortlist_of_any_size(vocab, size):
    """Also lists as long as the vocabulary, the best all in one group, all ties, and a mask token that would lead."""
    rows = 2 if vocab < 2500 else 1
    logits = logits_of(rows, vocab, torch.bfloat16, seed=vocab)
    mask = vocab // 2 if vocab > size else None
    if rows > 1:
        logits[0, : size + 3] += 40
        logits[1] = torch.arange(vocab) % 7
        logits[1, vocab // 2] = 50.0
    twin, kernel = both(shortlist, logits, size, mask_token_id=mask)
    assert_lists_equal(twin, kernel, logits, mask)


def test_a_nan_shows_in_the_shortlist_of_its_row_only():
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(7))
    logits[1, 1234] = torch.nan
    logits[2, 5] = -torch.tensor(torch.nan)
    for kernels in ("torch", "triton"):
        short = shortlist(logits, 16, mask_token_id=3, kernels=kernels)
        found = shortlist_residual(short, torch.randn(4, 8), torch.randn(3000, 8), kernels=kernels)
        assert found.log_sum_exp.isnan().tolist() == [False, True, True, False]
        assert ((found.token >= 0) & (found.token < 3000)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden", "out"), [(3, 72, 40), (37, 128, 80)])
def test_mrp_input(dtype, tokens, hidden, out):
    generator = torch.Generator().manual_seed(hidden)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    ids = torch.randint(30, (2, tokens), generator=generator)
    arguments = (draw(2, tokens, hidden) * 20, inside_nan(draw(30, hidden)), draw(hidden), draw(hidden))
    twin, kernel = both(mrp_input, ids, *arguments, inside_nan(draw(out, 2 * hidden) / 8))
    tolerance = TOLERANCE[dtype] * hidden**0.5 / 2
    torch.testing.assert_close(kernel, twin, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(5, 1, 16), (4, 2, 64), (2, 2, 128), (3, 1, 80)])
def test_qk_norm_rope(dtype, heads, kv_heads, dim):
    draw = lambda *shape: torch.randn(*shape).to(dtype)  # noqa: E731
    for rope_batch in (1, 2):
        arguments = [inside_nan(draw(2, 7, heads, dim)), inside_nan(draw(2, 7, kv_heads, dim)), draw(dim), draw(dim)]
        arguments += [inside_nan(draw(rope_batch, 7, dim).clamp(-1, 1)), draw(rope_batch, 7, dim).clamp(-1, 1)]
        for twin, kernel in zip(*both(qk_norm_rope, *arguments), strict=True):
            tolerance = 3 * TOLERANCE[dtype]
            torch.testing.assert_close(kernel, twin, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(5, 1, 16), (6, 3, 80), (2, 2, 128)])
def test_qk_norm_rope_writes_keys_and_values_into_a_cache(dtype, heads, kv_heads, dim):
    """Only where they belong: the rest of the cache keeps its bits, and rotation is as without a cache."""
    draw = lambda *shape: torch.randn(*shape).to(dtype)  # noqa: E731
    key, value = (inside_nan(draw(2, 7, kv_heads, dim)) for _ in range(2))
    arguments = [inside_nan(draw(2, 7, heads, dim)), key, draw(dim), draw(dim), *draw(2, 1, 7, dim).clamp(-1, 1)]
    plain = qk_norm_rope(*arguments, kernels="triton")
    for kernels in ("torch", "triton"):
        caches = torch.full((2, 3, kv_heads, 20, dim), -7.0, dtype=dtype)
        keys, values = caches[:, :2, :, 9:16]
        query_out, key_out = qk_norm_rope(*arguments, value=value, out=(keys, values), kernels=kernels)
        assert key_out.data_ptr() == keys.data_ptr()
        assert torch.equal(values, value.transpose(1, 2))
        for found, expected in zip((query_out, keys), plain, strict=True):
            tolerance = 0 if kernels == "triton" else 3 * TOLERANCE[dtype]
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
        caches[:, :2, :, 9:16] = -7.0
        assert caches.eq(-7.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "chunk"), [(1003, None), (5000, 2)])
def test_loss(dtype, vocab, chunk):
    generator = torch.Generator().manual_seed(vocab)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    student, target, weight = draw(5, 24).requires_grad_(), draw(5, 24), draw(vocab, 24) / 3
    found = []
    for kernels in ("torch", "triton"):
        loss = residual_kl(student, target, weight, chunk=chunk, kernels=kernels)
        (gradient,) = torch.autograd.grad((loss * torch.arange(5.0)).sum(), student)
        found.append((loss, gradient))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
