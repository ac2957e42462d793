"""Packed causal attention and shared-prefix attention against plain softmax over whole rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.models import partial_attention
from rollplex.models.attention import GroupRows, PrefixKV, SharedPrefixAttention, causal_attention
from rollplex.models.partial_attention import _plain, _plain_backward, attend, attend_backward
from rollplex.models.row_chunks import RowChunks

HEAD_DIM = 8
SCALING = 0.37


def _draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _row_by_row(q_HD, k_KPD, v_KPD):
    """One query over its keys, each head by itself."""
    repeat = q_HD.shape[0] // k_KPD.shape[0]
    outs = []
    for head, q_D in enumerate(q_HD):
        k_PD, v_PD = k_KPD[head // repeat], v_KPD[head // repeat]
        outs.append((k_PD @ q_D * SCALING).softmax(0) @ v_PD)
    return torch.cat(outs)


def _causal_by_hand(q_THD, k_TKD, v_TKD, lengths):
    outs, start = [], 0
    for length in lengths:
        for place in range(start, start + length):
            keys = slice(start, place + 1)
            outs.append(_row_by_row(q_THD[place], k_TKD[keys].transpose(0, 1), v_TKD[keys].transpose(0, 1)))
        start += length
    return torch.stack(outs)


@pytest.mark.parametrize("limit", [None, 1, 2, 3, 100])
@pytest.mark.parametrize("lengths", [[1], [3], [2, 2], [4, 1, 1, 3], [1, 2, 3], [9, 4, 4]])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 1), (6, 3), (4, 4)])
def test_causal_attention_stays_inside_its_sequence(lengths, heads, kv_heads, limit):
    """Whole and in chunks of queries: the output, and the gradients of q, k and v."""
    total = sum(lengths)
    inputs = [_draw(total, n, HEAD_DIM, seed=s).requires_grad_() for s, n in enumerate((heads, kv_heads, kv_heads))]
    found = causal_attention(*inputs, RowChunks.of(lengths, limit, inputs[0]), SCALING)
    wanted = _causal_by_hand(*inputs, lengths)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)
    upstream = _draw(total, heads * HEAD_DIM, seed=9)
    for got, true in zip(*(torch.autograd.grad(out, inputs, upstream) for out in (found, wanted)), strict=True):
        torch.testing.assert_close(got, true, rtol=0, atol=1e-12)


def test_chunks_of_queries_by_the_mask_that_a_gpu_takes():
    """There the mask is a name of its shape; the CPU writes it out."""
    q, k, v = (_draw(9, 2, HEAD_DIM, seed=s) for s in range(3))
    banded = RowChunks.of([9], 4, q)
    named = RowChunks(banded.lengths, banded.limit, None)
    assert banded.band is not None
    found, wanted = (causal_attention(q, k, v, chunks, SCALING) for chunks in (named, banded))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize("limit", [1, 4])
def test_no_call_takes_more_queries_than_a_chunk_has(limit, monkeypatch):
    lengths, sizes = [9, 2, 2, 2, 4], []
    real = torch.nn.functional.scaled_dot_product_attention

    def seen(q, *args, **kwargs):
        sizes.append(q.shape[0] * q.shape[2])
        return real(q, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    q = _draw(sum(lengths), 2, HEAD_DIM)
    causal_attention(q, q, q, RowChunks.of(lengths, limit, q), SCALING)
    assert sum(sizes) == sum(lengths) and max(sizes) <= limit


@st.composite
def _blocks(draw):
    """Groups as the response pass packs them: (prompt length, groups, responses per group, their lengths)."""
    blocks = []
    for _ in range(draw(st.integers(1, 3))):
        groups, responses = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        count = groups * responses
        lengths = draw(st.lists(st.integers(1, 5), min_size=count, max_size=count))
        blocks.append((draw(st.integers(1, 6)), groups, tuple(lengths)))
    return blocks


@settings(max_examples=40, derandomize=True)
@given(
    blocks=_blocks(),
    heads=st.sampled_from([(2, 1), (4, 2), (3, 3)]),
    cut=st.sampled_from([1 << 26, 7]),
    plain=st.booleans(),
)
def test_shared_prefix_attention_equals_whole_rows(blocks, heads, cut, plain):
    """Outputs, gradients of q, k, v, and the prefixes' gradients, for any shape of blocks and both kernels."""
    total = sum(sum(lengths) for _, _, lengths in blocks)
    inputs = [_draw(total, n, HEAD_DIM, seed=s).requires_grad_() for s, n in enumerate((heads[0], heads[1], heads[1]))]
    rows, kvs, start = [], [], 0
    for number, (prompt, groups, lengths) in enumerate(blocks):
        rows.append(GroupRows(start, lengths, groups))
        kvs.append([_draw(groups, heads[1], prompt, HEAD_DIM, seed=10 + 2 * number + i) for i in range(2)])
        start += sum(lengths)
    prefixes = [PrefixKV(k, v, torch.ones_like(k), torch.ones_like(v)) for k, v in kvs]
    upstream = _draw(total, heads[0] * HEAD_DIM, seed=99)
    anchor = torch.zeros(1, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        if plain:  # what other devices run, in blocks of few queries
            patch.setattr(partial_attention, "MAX_SCORE_ELEMENTS", cut)
            patch.setattr("rollplex.models.attention.attend", _plain_attend)
            patch.setattr("rollplex.models.attention.attend_backward", _plain_attend_backward)
        out = SharedPrefixAttention.apply(*inputs, anchor, rows, prefixes, SCALING)
        out.backward(upstream)
    found = [t.grad.clone() for t in inputs]
    for tensor in inputs:
        tensor.grad = None
    leaves = [[t.clone().requires_grad_() for t in pair] for pair in kvs]
    wanted_rows = []
    for row, (k, v) in zip(rows, leaves, strict=True):
        place, each = row.start, len(row.lengths) // row.num_groups
        for number, length in enumerate(row.lengths):
            group = number // each
            for token in range(length):
                own = slice(place, place + token + 1)
                keys = torch.cat([k[group], inputs[1][own].transpose(0, 1)], dim=1)
                values = torch.cat([v[group], inputs[2][own].transpose(0, 1)], dim=1)
                wanted_rows.append(_row_by_row(inputs[0][place + token], keys, values))
            place += length
    wanted = torch.stack(wanted_rows)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    wanted.backward(upstream)
    for got, tensor in zip(found, inputs, strict=True):
        torch.testing.assert_close(got, tensor.grad, rtol=0, atol=1e-12)
    for prefix, (k, v) in zip(prefixes, leaves, strict=True):  # added to what was there
        torch.testing.assert_close(prefix.grad_k_GKPD - 1, k.grad, rtol=0, atol=1e-12)
        torch.testing.assert_close(prefix.grad_v_GKPD - 1, v.grad, rtol=0, atol=1e-12)


def _plain_attend(q, k, v, *, causal, scaling):
    return _plain(q, k, v, causal, scaling)


def _plain_attend_backward(*tensors, causal, scaling):
    return _plain_backward(*tensors, causal, scaling)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str
)
def test_both_kernels_agree(causal, dtype, bound):
    """The fused CPU kernel and the plain formulas other devices use: out, log-sum-exp and the three gradients."""
    q, k, v, grad = (_draw(2, 3, 5, HEAD_DIM, seed=s, dtype=dtype) for s in range(4))
    out, lse = attend(q, k, v, causal=causal, scaling=SCALING)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for got, wanted in zip((out, lse), _plain(q, k, v, causal, SCALING), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=bound)
    found = attend_backward(grad, q, k, v, out, lse, causal=causal, scaling=SCALING)
    for got, wanted in zip(found, _plain_backward(grad, q, k, v, out, lse, causal, SCALING), strict=True):
        torch.testing.assert_close(got.double(), wanted.double(), rtol=0, atol=4 * bound)


def test_no_prefix_gradient_is_computed_where_none_is_wanted():
    q, k, v = (_draw(3, 2, HEAD_DIM, seed=s) for s in range(3))
    prefix = PrefixKV(_draw(1, 2, 4, HEAD_DIM), _draw(1, 2, 4, HEAD_DIM), None, None)
    rows = [GroupRows(0, (3,), 1)]
    out = SharedPrefixAttention.apply(q.requires_grad_(), k, v, torch.zeros(1), rows, [prefix], SCALING)
    out.sum().backward()
    assert q.grad is not None and float(q.grad.abs().max()) > 0


def test_extreme_scores_stay_finite():
    """A prefix that takes or gives all the weight: the join of the two parts must not overflow."""
    for scale in (1e3, -1e3):
        q, k, v = (torch.ones(2, 1, HEAD_DIM, dtype=torch.float32) for _ in range(3))
        prefix = PrefixKV(scale * torch.ones(1, 1, 3, HEAD_DIM), 5 * torch.ones(1, 1, 3, HEAD_DIM), None, None)
        out = SharedPrefixAttention.apply(q, k, v, torch.zeros(1), [GroupRows(0, (2,), 1)], [prefix], 1.0)
        torch.testing.assert_close(out, torch.full_like(out, 5.0 if scale > 0 else 1.0))
