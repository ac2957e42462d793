"""Decoding gives the same bits on any number of threads, however few rows are left: what runs beside it may decide.

So do prompt passes in chunks.
"""

from __future__ import annotations

import os

import pytest
import torch

from numerics.cases import FAMILIES, Rig, tiny_rig
from rollplex.models.policy import Policy
from rollplex.models.prefix import compute_prefix
from rollplex.rollout.decode_graphs import DecodeGraphs
from rollplex.rollout.engine import SamplingParams
from rollplex.rollout.local_engine import LocalEngine
from rollplex.rollout.steady import missing_rows, product

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


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_passes_in_chunks_on_one_thread_and_on_two(family: str) -> None:
    """Where a cut at every `limit` rows would leave a rest of very few: parts are even. Forward, since backward passes
    of the window belong to `stream`, which has no such promise."""
    made = tiny_rig(family, torch.float32)
    specs = made.specs(("image", "two_images", "text", "video_image"))
    total = sum(spec.num_tokens for spec in specs)
    for limit in (32, 33, next(n for n in range(32, total) if total % n in {5, 6, 7, 9, 10, 11})):
        found, before = [], torch.get_num_threads()
        try:
            for threads in (1, 2):
                torch.set_num_threads(threads)
                pack = compute_prefix(Policy(made.policy.model, chunk_tokens=limit), specs, "none")
                found.append([*pack.keys, *pack.values, pack.hidden_GC])
        finally:
            torch.set_num_threads(before)
        assert all(map(torch.equal, *found)), limit
