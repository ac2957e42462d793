"""Decoding and prompt passes give the same bits on any number of threads, however few rows they have: what runs beside
them, and in which lane they run, decides over threads."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch

from numerics.cases import ASK, FAMILIES, IMAGE, Rig, picture, relative_error, tiny_rig
from rollplex.models.policy import Policy
from rollplex.models.prefix import compute_prefix
from rollplex.models.steady import missing_rows, product
from rollplex.rollout.decode_graphs import DecodeGraphs
from rollplex.rollout.engine import SamplingParams
from rollplex.rollout.local_engine import LocalEngine
from rollplex.types import Example, PromptSpec

pytestmark = pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
NAMES = ("image", "text", "video")
Bits = dict[tuple[int, int], tuple[tuple[int, ...], tuple[float, ...]]]


def _decoded(made: Rig, responses: int, prompts: int, threads: int, graphs: DecodeGraphs | None) -> Bits:
    params = SamplingParams(num_generations=responses, max_tokens=6, stop_token_ids=tuple(range(0, 300, 13)))
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # for the prompts
    try:
        engine = LocalEngine(made.policy, params, max_rows=64, graphs=graphs)
        for number, spec in enumerate(made.specs(NAMES[:prompts])):
            engine.admit(number, spec)
        found: Bits = {}
        while engine.busy:
            for done in engine.step():
                response = done.response
                found[done.rollout_id, response.index] = response.token_ids, response.logps
            torch.set_num_threads(threads)
    finally:
        torch.set_num_threads(before)
    return found


@pytest.mark.parametrize("fixed", [False, True], ids=["lean", "fixed"])
@pytest.mark.parametrize(
    "options", [{}, {"num_heads": 7, "num_kv_heads": 1, "hidden_size": 112}], ids=["tiny", "1 KV head"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_on_one_thread_and_on_two(family: str, options: dict[str, int], fixed: bool) -> None:
    """One prompt with up to 12 responses, and three whose rows come down through 11 .. 5 as they end."""
    made = tiny_rig(family, torch.float32, num_layers=2, **options)
    for responses, prompts in [(n, 1) for n in range(1, 13)] + [(5, 3)]:
        graphs = DecodeGraphs(made.policy) if fixed else None
        one, two = (_decoded(made, responses, prompts, threads, graphs) for threads in (1, 2))
        assert one == two, f"{responses} responses to {prompts} prompts"


def test_products_that_need_no_rows_get_none() -> None:
    like = torch.zeros(1)
    assert [missing_rows(rows, like) for rows in range(13)] == [0, 0, 0, 0, 0, 3, 2, 1, 0, 3, 2, 1, 0]
    assert missing_rows(5, like.double()) == missing_rows(5, like.bfloat16()) == 0


@pytest.mark.parametrize("batch", [(), (1,), (1, 1), (2,)])
@pytest.mark.parametrize("rows", [1, 5, 8, 11])
def test_products_are_products(batch: tuple[int, ...], rows: int) -> None:
    left, right = torch.randn(*batch, rows, 16), torch.randn(*batch, 16, 24)
    assert product(left, right).shape == (*batch, rows, 24)
    torch.testing.assert_close(product(left, right), left @ right)


def _few_tokens(made: Rig, tokens: int) -> PromptSpec:
    """A prompt with a picture of one row of so many visual tokens."""
    vision = made.policy.model.config.vision_config
    side = vision.patch_size * vision.spatial_merge_size
    message = {"role": "user", "content": [IMAGE, ASK]}
    spec = made.builder.build(Example(0, [message], (picture(side * tokens, side),), ()))
    assert int((spec.token_types > 0).sum()) == tokens
    return spec


def _boundary(policy: Policy, specs: Sequence[PromptSpec], threads: int) -> list[torch.Tensor]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        pack = compute_prefix(policy, specs, "none")
    finally:
        torch.set_num_threads(before)
    return [*pack.keys, *pack.values, pack.hidden_GC]


@pytest.mark.parametrize(
    "options", [{}, {"num_heads": 7, "num_kv_heads": 1, "hidden_size": 448}], ids=["tiny", "7 to 1"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_passes_on_one_thread_and_on_two(family: str, options: dict[str, int]) -> None:
    """The window's passes have fewer threads than the main lane's. Up to 12 prompts, of which the last layer has a row
    each, and pictures of up to 12 visual tokens."""
    made = tiny_rig(family, torch.float32, num_layers=2, **options)
    passes = [made.specs(("short_text",) * count) for count in range(1, 13)]
    passes += [[_few_tokens(made, tokens)] for tokens in range(2, 13)]
    for specs in passes:
        one, two = (_boundary(made.policy, specs, threads) for threads in (1, 2))
        assert all(a.equal(b) for a, b in zip(one, two, strict=True)), f"{len(specs)} of {specs[0].num_tokens} tokens"


@pytest.mark.parametrize("tokens", [5, 8, 11])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_blank_picture_changes_nothing_but_bits(family: str, tokens: int) -> None:
    """Features and gradients of few visual tokens in fp32, beside a blank picture, and in fp64, without one."""
    found = []
    for dtype in (torch.float32, torch.float64):
        made = tiny_rig(family, dtype)
        features = made.policy.encode([_few_tokens(made, tokens)])
        assert features is not None and len(features.embeds) == tokens
        parts = [features.embeds, *features.deepstack]
        draw = torch.Generator().manual_seed(1)
        sum((part * torch.randn(part.shape, generator=draw).to(dtype)).sum() for part in parts).backward()
        tower = made.policy.adapter.visual
        gradients = {name: p.grad for name, p in tower.named_parameters() if p.grad is not None}
        found.append(({str(n): part.detach() for n, part in enumerate(parts)}, gradients))
    for wide, narrow in zip(found[1], found[0], strict=True):
        assert relative_error(narrow, wide) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_passes_in_chunks_on_one_thread_and_on_two(family: str) -> None:
    """Where a cut at every `limit` rows would leave a rest of 1 to 3, whose attention has other bits on other numbers
    of threads: parts are even. Forward: backward passes of the window belong to `stream`, which has no such promise."""
    made = tiny_rig(family, torch.float32)
    specs = made.specs(("image", "two_images", "text", "video_image"))
    lengths = [spec.num_tokens for spec in specs]
    limits = [limit for limit in range(7, max(lengths)) if any(n > limit and n % limit in {1, 2, 3} for n in lengths)]
    assert len(limits) > 3
    for limit in (limits[0], *limits[-3:]):
        policy = Policy(made.policy.model, chunk_tokens=limit)
        one, two = (_boundary(policy, specs, threads) for threads in (1, 2))
        assert all(map(torch.equal, one, two)), limit
