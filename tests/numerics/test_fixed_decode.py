"""Decode steps of fixed shapes against lean ones: the same logits, tokens and log-probs, whatever is padded.

On a CPU no graph is captured, so `Recorder` does what capture would: it keeps the operations of a step and repeats
them on the same tensors. A step that looked at anything but its buffers would go wrong here as it would on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from numerics.cases import FAMILIES, Rig, tiny_rig
from rollplex.models.policy import Policy
from rollplex.models.precision import full_float64
from rollplex.models.prefix import PrefixPack, compute_prefix
from rollplex.rollout.decode import DecodeModel, LiveRows
from rollplex.rollout.decode_buckets import Limits
from rollplex.rollout.decode_graphs import DecodeGraphs, FixedRows
from rollplex.rollout.engine import SamplingParams
from rollplex.rollout.grown_rows import GrownRows
from rollplex.rollout.local_engine import LocalEngine
from rollplex.types import PromptSpec, Response

NAMES = ("short_text", "two_images", "image", "video", "text", "odd_image", "video_image", "image_video_image")
LONGEST = 70  # tokens of a response: suffixes outgrow three buckets of SMALL_PLACES and more
SMALL_PLACES = 16


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


class Recorder:
    """A Capturer of operations: a replay makes them anew on the tensors they were made on."""

    def __init__(self) -> None:
        self.recorded = 0

    def captured(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        with _Operations() as operations:
            work()
        self.recorded += 1

        def replay() -> None:
            for func, args, kwargs, out in operations.calls:
                for held, fresh in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(held, torch.Tensor) and held.data_ptr() != fresh.data_ptr():
                        held.copy_(fresh)

        return replay

    def release(self) -> None:
        pass


@pytest.fixture(params=FAMILIES)
def made(request: pytest.FixtureRequest) -> Rig:
    return tiny_rig(request.param, num_layers=2, num_heads=4, num_kv_heads=2)


def _run(
    policy: Policy,
    specs: list[PromptSpec],
    params: SamplingParams,
    *,
    max_rows: int = 64,
    graphs: DecodeGraphs | None = None,
    late: bool = False,
) -> tuple[dict[tuple[int, int], Response], list[torch.Tensor]]:
    """{(rollout id, index): response} and each step's logits; late: a prompt every third step."""
    engine = LocalEngine(policy, params, max_rows=max_rows, graphs=graphs)
    waiting = list(range(len(specs)))
    found: dict[tuple[int, int], Response] = {}
    logits: list[torch.Tensor] = []
    while engine.busy or waiting:
        while waiting and (not late or len(logits) % 3 == 0 or not engine.busy):
            engine.admit(waiting[0], specs[waiting.pop(0)])
            if late:
                break
        for finished in engine.step():
            found[finished.rollout_id, finished.response.index] = finished.response
        logits.append(torch.empty(0) if engine.logits_BV is None else engine.logits_BV.clone())
    return found, logits


@pytest.mark.parametrize("max_rows", [64, 5])
@pytest.mark.parametrize("late", [False, True])
def test_engines_sample_the_same(made: Rig, max_rows: int, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of all kinds, responses that end one after another, buckets outgrown in every size."""
    monkeypatch.setattr("rollplex.rollout.decode_buckets.LEAST_PLACES", SMALL_PLACES)
    specs = made.specs(NAMES)
    params = SamplingParams(
        num_generations=3,
        max_tokens=LONGEST,
        temperature=0.8,
        top_p=0.95,
        repetition_penalty=1.1,
        stop_token_ids=tuple(range(0, made.plain_vocab, 60)),
        banned_token_ids=made.policy.adapter.vision_token_ids,
        seed=3,
    )
    with full_float64():
        wanted, lean = _run(made.policy, specs, params, max_rows=max_rows, late=late)
        recorder = Recorder()
        graphs = DecodeGraphs(made.policy, recorder)
        found, fixed = _run(made.policy, specs, params, max_rows=max_rows, late=late, graphs=graphs)
        grown = len(graphs.steps)  # those before had caches that were too small
        again, _ = _run(made.policy, specs, params, max_rows=max_rows, late=late, graphs=graphs)
    lengths = {len(response.token_ids) for response in wanted.values()}
    assert max(lengths) == LONGEST and min(lengths) < 30  # else nothing retires, or no suffix outgrows its bucket
    assert {key: r.token_ids for key, r in found.items()} == {key: r.token_ids for key, r in wanted.items()}
    assert all(found[key].finish == response.finish for key, response in wanted.items())
    for key, response in wanted.items():
        assert found[key].logps == pytest.approx(response.logps, abs=1e-12)
    assert len(lean) == len(fixed)
    for ours, theirs in zip(fixed, lean, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert again == found  # to the bit, though other captures made it
    kinds = list(graphs.steps)
    assert {bucket.suffix for bucket in kinds} == {SMALL_PLACES, 32, 64, LONGEST}
    varied = ("rows", "groups", "prompt") if late or max_rows < 64 else ("rows",)  # all join at once
    assert min(len({getattr(bucket, name) for bucket in kinds}) for name in varied) > 1
    assert grown < len(kinds) < recorder.recorded <= 2 * len(kinds)


class Events:
    """Joins, ends and tokens of a keyed rollout, the same for each LiveRows."""

    def __init__(self, pack: PrefixPack, seed: int, limits: Limits, vocab: int):
        self.pack, self.limits, self.vocab = pack, limits, vocab
        self.rng = np.random.default_rng(seed)
        self.owners: list[int] = []
        self.fed: list[int] = []
        self.rollouts = 0

    def between_steps(self, everyone: list[LiveRows]) -> None:
        """Rows end, prompts join; at least one row is live then."""
        for row in range(len(self.owners) - 1, -1, -1):
            if self.fed[row] == self.limits.suffix or self.rng.random() < 0.08:
                self._end(row, everyone)
        while not self.owners or (self.rng.random() < 0.3 and len(self.owners) < self.limits.rows):
            self._join(everyone)

    def tokens(self) -> list[int]:
        """One for each row."""
        self.fed = [fed + 1 for fed in self.fed]
        return [int(token) for token in self.rng.integers(0, self.vocab, len(self.owners))]

    def _end(self, row: int, everyone: list[LiveRows]) -> None:
        for rows in everyone:
            if self.owners.count(self.owners[row]) == 1:
                rows.leave(self.owners[row])
            rows.drop(row)
        for values in (self.owners, self.fed):
            values[row] = values[-1]
            values.pop()

    def _join(self, everyone: list[LiveRows]) -> None:
        number = int(self.rng.integers(len(self.pack.specs)))
        room = min(self.limits.width, self.limits.rows - len(self.owners))
        count = int(self.rng.integers(1, room + 1))
        for rows in everyone:
            rows.join(self.rollouts, self.pack, number)
            rows.add([self.rollouts] * count, [self.pack.specs[number].next_position] * count)
        self.owners += [self.rollouts] * count
        self.fed += [0] * count
        self.rollouts += 1


Check = Callable[[FixedRows, torch.Tensor, torch.Tensor], None]


def _drive(
    made: Rig,
    seed: int,
    limits: Limits,
    check: Check,
    *,
    steps: int = 60,
    before: Callable[[FixedRows], None] = lambda rows: None,
) -> None:
    """A keyed rollout in fixed and in lean caches: `before` each step, then `check` with the logits of both."""
    with torch.inference_mode():
        pack = compute_prefix(made.policy, made.specs(NAMES), "none")
        fixed = DecodeGraphs(made.policy, Recorder()).open(limits)
        lean = GrownRows(DecodeModel(made.policy), limits.suffix)
        events = Events(pack, seed, limits, made.plain_vocab)
        for _ in range(steps):
            events.between_steps([fixed, lean])
            tokens = events.tokens()
            before(fixed)
            check(fixed, fixed.forward(tokens), lean.forward(tokens))


@settings(max_examples=8, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 999), rows=st.integers(1, 12), width=st.integers(1, 5), suffix=st.integers(1, 70))
def test_any_order_of_joins_and_ends(made: Rig, seed: int, rows: int, width: int, suffix: int) -> None:
    def check(_: FixedRows, found: torch.Tensor, wanted: torch.Tensor) -> None:
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)

    with full_float64():
        _drive(made, seed, Limits(rows, width, suffix), check, steps=24)


BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_other_dtypes_differ_by_rounding(family: str, dtype: torch.dtype) -> None:
    """Relative to the largest logit: four units in the last place of bfloat16 and of float16."""

    def check(_: FixedRows, found: torch.Tensor, wanted: torch.Tensor) -> None:
        assert found.dtype == dtype and bool(torch.isfinite(found).all())
        assert float((found - wanted).abs().max()) <= BOUNDS[dtype] * float(wanted.abs().max())

    _drive(tiny_rig(family, dtype, num_layers=2, num_heads=4, num_kv_heads=2), 1, Limits(10, 4, 80), check, steps=100)


def _live(rows: FixedRows) -> dict[str, torch.Tensor]:
    """Which places of each cache belong to live rows and groups."""
    caches = rows.caches
    suffix = torch.zeros(caches.suffix_keys.shape, dtype=torch.bool)
    for row, length in enumerate(rows.lengths[: caches.capacity.rows]):  # others are new
        suffix[:, row, :, :length] = True
    keys = torch.zeros(caches.prompt_keys.shape, dtype=torch.bool)
    for number, group in enumerate(rows.groups[: caches.capacity.groups]):
        keys[:, number, :, :, : group.pack.lengths[group.number]] = group.placed
    return {"prompt_keys": keys, "prompt_values": keys.transpose(3, 4), "suffix_keys": suffix, "suffix_values": suffix}


def test_no_live_row_sees_what_lies_in_places_of_nobody(made: Rig) -> None:
    """Other numbers there: the same bits."""
    quiet: list[torch.Tensor] = []
    _drive(made, 5, Limits(7, 3, 40), lambda rows, found, _: quiet.append(found.clone()))
    loud: list[torch.Tensor] = []
    filled = 0

    def fill(rows: FixedRows, found: torch.Tensor, _: torch.Tensor) -> None:
        nonlocal filled
        loud.append(found.clone())
        for name, live in _live(rows).items():
            getattr(rows.caches, name).masked_fill_(~live, 1e6)
            filled += int((~live).sum())

    _drive(made, 5, Limits(7, 3, 40), fill)
    assert filled > 0
    assert [number for number, (a, b) in enumerate(zip(quiet, loud, strict=True)) if not torch.equal(a, b)] == []


def test_a_step_writes_one_place_of_each_live_row_and_nothing_else_that_is_live(made: Rig) -> None:
    held: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    fed: list[int] = []

    def before(rows: FixedRows) -> None:
        fed[:] = rows.lengths
        for name, live in _live(rows).items():
            held[name] = live, getattr(rows.caches, name).clone()

    def check(rows: FixedRows, _: torch.Tensor, __: torch.Tensor) -> None:
        for name, (live, content) in held.items():
            now = getattr(rows.caches, name)[tuple(slice(size) for size in content.shape)]
            assert torch.equal(now[live], content[live]), name
        for row, place in enumerate(fed):
            assert bool((rows.caches.suffix_keys[:, row, :, place] != 0).all())

    _drive(made, 8, Limits(7, 3, 40), check, before=before)
