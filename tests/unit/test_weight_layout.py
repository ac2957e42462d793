"""The layout algebra, carried out with small numpy arrays: every slice, view and copy, for all degrees and layouts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from rollplex.config import BuildConfig, SharingConfig
from rollplex.errors import ConfigError
from rollplex.models.shapes import ModelShape, shape_from_build, shape_from_hf
from rollplex.models.shard_plan import Kind, ShardPlan, shard_plan
from rollplex.weights.conventions import Layout, check_degrees, padded_vocabs, piece, units
from rollplex.weights.layout import DeviceLayout, Placed, Sharing, SharingPlan, Store, plan_sharing
from rollplex.weights.pieces import PADDING, Parameter, Run, Unit
from rollplex.weights.transfer import Copy, publish_copies, received_numel

Array = NDArray[np.int64]
LAYOUTS = ("hf", "megatron", "vllm")
DEGREES = (1, 2, 4, 8)
UNWRITTEN = -1


def _plan(
    heads: int = 8, kv_heads: int = 2, vocab: int = 301, tied: bool = False, family: str = "qwen2_5_vl"
) -> ShardPlan:
    width = 2 * heads
    text = {"hidden_size": width, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "head_dim": 4, "vocab_size": vocab}  # fmt: skip
    vision = {"depth": 1, "hidden_size": 2, "intermediate_size": 3, "num_heads": 1, "out_hidden_size": width,
              "patch_size": 2, "num_position_embeddings": 4, "deepstack_visual_indexes": [0]}  # fmt: skip
    config = {"model_type": family, "text_config": text, "vision_config": vision, "tie_word_embeddings": tied}
    return shard_plan(shape_from_hf(config, "test"))


def _sharing(t: int, s: int, train: str = "megatron", rollout: str = "vllm", padding: str = "shared") -> SharingConfig:
    return SharingConfig(
        train_tp=t,
        rollout_tp=s,
        train_layout=train,
        rollout_layout=rollout,
        vocab_padding=padding,  # type: ignore[arg-type]
    )


@st.composite
def _plans(draw: st.DrawFn) -> SharingPlan:
    """Any degrees, layouts and padding that are not refused."""
    kv_heads = draw(st.sampled_from([1, 2, 4, 8, 3]))
    heads = kv_heads * draw(st.integers(1, 4))
    plan = _plan(
        heads,
        kv_heads,
        draw(st.integers(65, 330)),
        draw(st.booleans()),
        draw(st.sampled_from(["qwen2_5_vl", "qwen3_vl"])),
    )
    sharing = _sharing(
        draw(st.sampled_from(DEGREES)), draw(st.sampled_from(DEGREES)), draw(st.sampled_from(LAYOUTS)),
        draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(["shared", "hf", "engine"])),
    )  # fmt: skip
    try:
        return plan_sharing(plan, sharing)
    except ConfigError:
        assume(False)
        raise


def _full(plan: ShardPlan) -> dict[str, Array]:
    """Every element of every tensor has a value of its own."""
    full, at = {}, 0
    for tensor in plan.tensors:
        full[tensor.name] = np.arange(at, at + tensor.numel, dtype=np.int64).reshape(tensor.shape)
        at += tensor.numel
    return full


def _content(unit: Unit, parameter: Parameter, full: dict[str, Array]) -> Array:
    """What a parameter must hold, as positions first: its runs of the full tensors, zero for padding."""
    parts = []
    for run in parameter.runs:
        if run.tensor == PADDING:
            parts.append(np.zeros((run.length, *unit.trailing), dtype=np.int64))
        else:
            parts.append(np.moveaxis(full[run.tensor], unit.dim, 0)[run.start : run.stop])
    return np.concatenate(parts)


class Device:
    """Storages of one device and its layout."""

    def __init__(self, layout: DeviceLayout):
        self.layout = layout
        self.stores = {
            Store.BACKING: np.full(layout.backing_numel, UNWRITTEN, dtype=np.int64),
            Store.BUFFER: np.full(layout.buffer_numel, UNWRITTEN, dtype=np.int64),
        }

    def view(self, placed: Placed) -> Array:
        """The view itself: writing to it writes to the storage."""
        view = placed.view
        last = view.offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
        assert 0 <= view.offset <= last < self.stores[placed.store].size, "a view that leaves its storage"
        return as_strided(self.stores[placed.store][view.offset :], view.shape, [8 * stride for stride in view.strides])

    def read(self, unit: Unit, placed: Placed) -> Array:
        """Positions first."""
        view = self.view(placed)
        return view.T.copy() if unit.dim else view.reshape(placed.parameter.length, *unit.trailing).copy()

    def write(self, unit: Unit, placed: Placed, rows: Array) -> None:
        view = self.view(placed)
        view[...] = rows.T if unit.dim else rows.reshape(view.shape)


def _devices(plan: SharingPlan) -> list[Device]:
    return [Device(plan.device(index)) for index in range(plan.num_devices)]


def _write_training(devices: list[Device], full: dict[str, Array]) -> None:
    for device in devices:
        for placement in device.layout.placements:
            for placed in placement.train:
                device.write(placement.unit, placed, _content(placement.unit, placed.parameter, full))


def _covers(placed: Placed, at: int) -> bool:
    return placed.parameter.at <= at < placed.parameter.at + placed.parameter.length


def _carry_out(
    copy: Copy, unit: Unit, source: tuple[Device, tuple[Placed, ...]], target: tuple[Device, tuple[Placed, ...]]
) -> None:
    device, parameters = source
    placed = next(p for p in parameters if _covers(p, copy.source_at))
    start = copy.source_at - placed.parameter.at
    rows = device.read(unit, placed)[start : start + copy.length]
    device, parameters = target
    placed = next(p for p in parameters if _covers(p, copy.target_at))
    start = copy.target_at - placed.parameter.at
    held = device.read(unit, placed)
    held[start : start + copy.length] = rows
    device.write(unit, placed, held)


def _publish(plan: SharingPlan, devices: list[Device]) -> None:
    for index, classified in enumerate(plan.units):
        for device in devices:
            placement = device.layout.placements[index]
            assert (placement.unit, placement.sharing) == (classified.unit, classified.sharing)
            for copy in publish_copies(plan, classified.unit, classified.sharing, device.layout.device):
                source = devices[copy.source]
                _carry_out(
                    copy, placement.unit, (source, source.layout.placements[index].train), (device, placement.rollout)
                )


@settings(max_examples=150)
@given(_plans())
def test_hand_over(plan: SharingPlan) -> None:
    """Training's pieces are written through its views, publish is carried out: both sides then hold what they must."""
    full, devices = _full(plan.plan), _devices(plan)
    _write_training(devices, full)
    _publish(plan, devices)
    for device in devices:
        for placement in device.layout.placements:
            unit = placement.unit
            for placed in placement.train:
                assert np.array_equal(device.read(unit, placed), _content(unit, placed.parameter, full)), unit.name
            for placed in placement.rollout:
                found, wanted = device.read(unit, placed), _content(unit, placed.parameter, full)
                padding = found == UNWRITTEN  # rows that no token has: a runtime zeroes them once
                assert np.array_equal(np.where(padding, 0, found), wanted), unit.name
                assert not padding.any() or any(run.tensor == PADDING for run in placed.parameter.runs)


@settings(max_examples=100)
@given(_plans())
def test_a_write_through_the_training_view_is_seen_by_the_rollout(plan: SharingPlan) -> None:
    for device in _devices(plan):
        for placement in device.layout.placements:
            if placement.sharing is Sharing.REBUILT:
                assert {placed.store for placed in placement.train} == {Store.BACKING}
                assert {placed.store for placed in placement.rollout} == {Store.BUFFER}
                continue
            before = device.stores[Store.BACKING].copy()
            small, large = sorted(
                (placement.train, placement.rollout), key=lambda side: sum(p.view.numel for p in side)
            )
            for placed in small:
                device.view(placed)[...] += 5
            touched = int((device.stores[Store.BACKING] != before).sum())
            seen = sum(int((device.view(placed) == UNWRITTEN + 5).sum()) for placed in large)
            assert touched == seen == sum(placed.view.numel for placed in small)
            device.stores[Store.BACKING][:] = UNWRITTEN


@settings(max_examples=100)
@given(_plans())
def test_storages_are_filled_once_by_their_larger_pieces(plan: SharingPlan) -> None:
    for device in _devices(plan):
        used = {store: np.zeros(array.size, dtype=np.int64) for store, array in device.stores.items()}
        for placement in device.layout.placements:
            stored = [placement.train, placement.rollout]
            if placement.sharing is not Sharing.REBUILT:
                stored = [max(stored, key=lambda side: sum(placed.view.numel for placed in side))]
            for placed in itertools.chain(*stored):
                device.stores[placed.store][:] = 0
                device.view(placed)[...] += 1
                used[placed.store] += device.stores[placed.store]
        for store, counts in used.items():
            assert counts.max(initial=0) <= 1, "two parameters share elements"
            gaps = int((counts == 0).sum())
            assert gaps < 128 * len(device.layout.placements), f"{store} has room that nothing uses"


def _copies_of(plan: SharingPlan, unit: Unit, tensor: str, side: int) -> int:
    """How often a side holds each element of a tensor over all its ranks."""
    degree = (plan.sharing.train_tp, plan.sharing.rollout_tp)[side]
    if unit.kind in (Kind.REPLICATED, Kind.VISION):
        return degree
    heads = next(member.heads for member in unit.members if member.name == tensor)
    if heads and plan.layouts[side] is not Layout.MEGATRON:
        return max(1, degree // heads)
    return 1


@settings(max_examples=100)
@given(_plans(), st.sampled_from([0, 1]))
def test_pieces_of_all_ranks_make_up_the_full_tensors(plan: SharingPlan, side: int) -> None:
    full = _full(plan.plan)
    degree = (plan.sharing.train_tp, plan.sharing.rollout_tp)[side]
    for unit in units(plan.plan, plan.layouts):
        pieces = [piece(unit, plan.layouts[side], rank, degree, plan.padded[side]) for rank in range(degree)]
        assert len({p.length for p in pieces}) == 1, "ranks hold different sizes"
        for member in unit.members:
            made, counts = np.full(member.shape, -1, dtype=np.int64), np.zeros(member.shape, dtype=np.int64)
            for run in (run for p in pieces for run in p.runs if run.tensor == member.name):
                rows = np.moveaxis(made, unit.dim, 0)
                rows[run.start : run.stop] = np.moveaxis(full[member.name], unit.dim, 0)[run.start : run.stop]
                np.moveaxis(counts, unit.dim, 0)[run.start : run.stop] += 1
            assert np.array_equal(made, full[member.name])
            assert (counts == _copies_of(plan, unit, member.name, side)).all(), member.name


@settings(max_examples=100)
@given(_plans())
def test_bytes_received_are_those_of_the_copies(plan: SharingPlan) -> None:
    for classified in plan.units:
        unit = classified.unit
        for device in range(plan.num_devices):
            copies = publish_copies(plan, unit, classified.sharing, device)
            moved = sum(copy.length * unit.cross for copy in copies if copy.source != device)
            assert moved == received_numel(plan, unit, device)
            if plan.sharing.train_tp <= plan.sharing.rollout_tp and plan.padded[0] == plan.padded[1]:
                if classified.sharing is not Sharing.REBUILT:
                    assert moved == 0, "the larger training shard holds all that the rollout needs"


def _textbook(layout: str, plan: ShardPlan, full: dict[str, Array], rank: int, degree: int) -> dict[str, Array]:
    """q, k, v and gate, up of one rank as the engines' own loaders cut them, written down independently."""
    root, text = "model.language_model.layers.0.", plan.shape.text
    q, k, v = (full[f"{root}self_attn.{letter}_proj.weight"] for letter in "qkv")
    gate, up = (np.split(full[f"{root}mlp.{name}_proj.weight"], degree)[rank] for name in ("gate", "up"))
    if layout == "megatron":
        width, groups = q.shape[1], text.num_kv_heads
        mixed = np.concatenate([part.reshape(groups, -1, width) for part in (q, k, v)], axis=1).reshape(-1, width)
        return {"qkv": np.split(mixed, degree)[rank], "gate_up": np.concatenate([gate, up])}
    copies = max(1, degree // text.num_kv_heads)
    q = np.split(q, degree)[rank]
    k, v = (np.split(part, degree // copies)[rank // copies] for part in (k, v))
    if layout == "vllm":
        return {"qkv": np.concatenate([q, k, v]), "gate_up": np.concatenate([gate, up])}
    return {"q": q, "k": k, "v": v, "gate": gate, "up": up}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("degree", DEGREES)
def test_pieces_are_those_of_the_engines(layout: str, degree: int) -> None:
    plan = _plan()
    full = _full(plan)
    found = {unit.name: unit for unit in units(plan, (Layout(layout), Layout(layout)))}
    for rank in range(degree):
        for name, wanted in _textbook(layout, plan, full, rank, degree).items():
            folder = "mlp" if name in ("gate", "up", "gate_up") else "self_attn"
            unit = found[f"model.language_model.layers.0.{folder}.{name}_proj.weight"]
            (parameter,) = piece(unit, Layout(layout), rank, degree, plan.shape.text.vocab_size).parameters
            assert np.array_equal(_content(unit, parameter, full), wanted), (name, rank)


def _shape_32b() -> ModelShape:
    return shape_from_build(
        BuildConfig(
            hidden_size=5120,
            intermediate_size=27648,
            num_layers=64,
            num_heads=40,
            num_kv_heads=8,
            vocab_size=152064,
            vision_depth=1,
        )  # fmt: skip
    )


def _language(plan: SharingPlan) -> Iterator[tuple[Unit, Sharing]]:
    return ((c.unit, c.sharing) for c in plan.units if c.unit.kind is not Kind.VISION)


def test_published_figures_of_the_32b() -> None:
    plan = plan_sharing(shard_plan(_shape_32b()), _sharing(8, 4))
    total = sum(unit.numel for unit, _ in _language(plan))
    assert total == 32_763_876_352
    shares = {
        kind: round(100 * sum(unit.numel for unit, sharing in _language(plan) if sharing is kind) / total, 2)
        for kind in Sharing
    }
    assert shares == {Sharing.ALIGNED: 60.06, Sharing.TRANSPOSED: 32.77, Sharing.REBUILT: 7.17}
    rebuilt = {re.sub(r"\d+", "N", unit.name) for unit, sharing in _language(plan) if sharing is Sharing.REBUILT}
    assert rebuilt == {f"model.language_model.layers.N.self_attn.qkv_proj.{part}" for part in ("weight", "bias")}


@pytest.mark.parametrize("padding", ["shared", "engine"])
def test_vocabulary_of_the_32b_nests_only_when_padded_alike(padding: str) -> None:
    plan = plan_sharing(shard_plan(_shape_32b()), _sharing(8, 4, padding=padding))
    assert plan.padded == ((152064, 152064) if padding == "shared" else (152576, 152064))
    (sharing,) = {c.sharing for c in plan.units if c.unit.kind is Kind.VOCAB}
    assert sharing is (Sharing.ALIGNED if padding == "shared" else Sharing.REBUILT)
    if padding == "engine":
        reason = next(c.reason for c in plan.units if c.unit.kind is Kind.VOCAB)
        assert "152576" in reason and "152064" in reason and "vocab_padding=shared" in reason


@pytest.mark.parametrize(("t", "s"), list(itertools.product(DEGREES, DEGREES)))
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_hugging_face_layout_on_both_sides_rebuilds_nothing(t: int, s: int, kv_heads: int) -> None:
    plan = plan_sharing(_plan(kv_heads=kv_heads), _sharing(t, s, "hf", "hf"))
    assert all(classified.sharing is not Sharing.REBUILT for classified in plan.units)
    transposed = {c.unit.name.split(".")[-2] for c in plan.units if c.sharing is Sharing.TRANSPOSED}
    assert transposed == (set() if t == s else {"o_proj", "down_proj"})


def test_equal_degrees_and_layouts_need_neither_copy_nor_transposition() -> None:
    for layout, degree in itertools.product(LAYOUTS, DEGREES):
        plan = plan_sharing(_plan(), _sharing(degree, degree, layout, layout))
        assert {classified.sharing for classified in plan.units} == {Sharing.ALIGNED}
        assert sum(received_numel(plan, c.unit, d) for c in plan.units for d in range(degree)) == 0


def test_fused_gate_up_is_a_strided_view_for_training_but_not_for_vllm() -> None:
    name = "model.language_model.layers.0.mlp.gate_up_proj.weight"
    down = plan_sharing(_plan(), _sharing(4, 2))
    placement = next(p for p in down.device(1).placements if p.unit.name == name)
    assert placement.sharing is Sharing.ALIGNED
    assert placement.train[0].view.shape == (2, 6, 16)
    assert placement.train[0].view.strides == (12 * 16, 16, 1)
    up = next(c for c in plan_sharing(_plan(), _sharing(2, 4)).units if c.unit.name == name)
    assert up.sharing is Sharing.REBUILT
    assert "vllm multiplies it as one matrix" in up.reason and "2 blocks" in up.reason


def test_key_value_heads_on_more_ranks_than_heads() -> None:
    plan = plan_sharing(_plan(heads=8, kv_heads=2), _sharing(8, 4))
    (reason,) = {c.reason for c in plan.units if c.sharing is Sharing.REBUILT}
    assert "2 key/value heads on more ranks" in reason and "inside a head" in reason
    packed = next(u for u in units(plan.plan, plan.layouts) if u.name.endswith("qkv_proj.weight"))
    keys = [[run for run in piece(packed, Layout.VLLM, rank, 4, 0).runs if "k_proj" in run.tensor] for rank in range(4)]
    assert [(run.start, run.stop) for (run,) in keys] == [(0, 2), (0, 2), (2, 4), (2, 4)]


@pytest.mark.parametrize(
    ("t", "s", "model", "words"),
    [
        (3, 1, {}, ("sharing.train_tp 3", "8 query heads", "1, 2, 4, 8")),
        (1, 3, {}, ("sharing.rollout_tp 3", "8 query heads", "1, 2, 4, 8")),
        (4, 4, {"heads": 12, "kv_heads": 6}, ("sharing.train_tp 4", "6 key/value heads", "1, 2, 3, 6, 12")),
        (2, 3, {"heads": 12, "kv_heads": 6}, ("train_tp 2", "rollout_tp 3", "rollout_tp to one of 1, 2, 6, 12")),
        (9, 9, {"heads": 9, "kv_heads": 9}, ("sharing.train_tp 9", "MLP width 24", "1, 3")),
    ],
)  # fmt: skip
def test_degrees_that_do_not_divide_are_refused(t: int, s: int, model: dict[str, int], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_sharing(_plan(**model), _sharing(t, s))
    assert all(word in str(caught.value) for word in words), str(caught.value)


@settings(max_examples=200)
@given(st.integers(1, 24), st.integers(1, 24), st.sampled_from([(8, 2), (12, 6), (6, 6), (12, 4)]))
def test_the_degrees_that_a_refusal_names_work(t: int, s: int, heads: tuple[int, int]) -> None:
    plan, sharing = _plan(*heads), _sharing(t, s)
    for _ in range(3):  # train_tp, rollout_tp, and the two against each other
        try:
            check_degrees(plan, sharing)
            return
        except ConfigError as error:
            match = re.search(r"set sharing\.(\w+) to one of ([\d, ]+)$", str(error))
            assert match, str(error)
            name, values = match[1], [int(value) for value in match[2].split(", ")]
            sharing = sharing.model_copy(update={name: values[-1]})
    check_degrees(plan, sharing)


@pytest.mark.parametrize(
    ("sharing", "words"),
    [
        (
            _sharing(2, 1, "hf", "hf", "hf"),
            ("train_tp 2", "301 rows", "under hf", "set sharing.vocab_padding to shared"),
        ),
        (
            _sharing(1, 2, "hf", "hf", "engine"),
            ("rollout_tp 2", "301 rows", "hf layout", "set sharing.vocab_padding to shared"),
        ),
        (_sharing(1, 1, "hf", "vllm", "hf"), ("301", "multiple of 64", "set sharing.vocab_padding to shared")),
    ],
)
def test_vocabulary_that_may_not_be_padded_is_refused(sharing: SharingConfig, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_sharing(_plan(vocab=301), sharing)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@given(st.integers(65, 400), st.sampled_from(DEGREES), st.sampled_from(DEGREES))
def test_padding_rules(vocab: int, t: int, s: int) -> None:
    plan = _plan(vocab=vocab)
    train, rollout = padded_vocabs(plan, _sharing(t, s, padding="engine"))
    assert (train % (128 * t), rollout % 64) == (0, 0)
    assert 0 <= train - vocab < 128 * t and 0 <= rollout - vocab < 64
    shared = padded_vocabs(plan, _sharing(t, s, "hf", "hf"))
    assert shared[0] == shared[1] and shared[0] % max(t, s) == 0 and shared[0] - vocab < max(t, s)


def test_tied_head_is_held_once() -> None:
    tied, untied = (plan_sharing(_plan(tied=tied), _sharing(4, 2)) for tied in (True, False))
    extra = {c.unit.name for c in untied.units} - {c.unit.name for c in tied.units}
    assert extra == {"lm_head.weight"}


def test_padding_is_no_tensor() -> None:
    plan = _plan(vocab=301)
    (head,) = (u for u in units(plan, (Layout.HF, Layout.HF)) if u.name == "lm_head.weight")
    last = piece(head, Layout.HF, 3, 4, 304)
    assert last.runs == (Run("lm_head.weight", 228, 301, 0), Run(PADDING, 301, 304, 73))
    assert (last.length, last.tensor_rows()) == (76, 73)
