"""Backings on one device: what the views show, where they lie, and who may read or write when."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

from cluster.handover import full_tensors, sharing_plan, small_plan
from rollplex.config import SharingConfig
from rollplex.errors import ConfigError, DeadlineError, StateError, TrainingError
from rollplex.weights.layout import Sharing, SharingPlan, Store, plan_sharing
from rollplex.weights.pieces import PADDING, Parameter, Unit
from rollplex.weights.segment import Segment
from rollplex.weights.share import Backing, Side
from rollplex.weights.transfer import local_moves, publish_rounds, received_numel
from rollplex.weights.versions import SharedVersion

CPU = torch.device("cpu")
PAIRS = list(itertools.product((1, 2, 4), (1, 2, 4)))
LAYOUTS = [("hf", "hf"), ("megatron", "vllm"), ("hf", "vllm")]


def _backings(plan: SharingPlan) -> list[Backing]:
    return [Backing.create(plan, device, torch.float32, CPU) for device in range(plan.num_devices)]


def _content(unit: Unit, parameter: Parameter, full: dict[str, torch.Tensor]) -> torch.Tensor:
    """What a parameter must hold, positions first, from the full tensors."""
    parts = []
    for run in parameter.runs:
        if run.tensor == PADDING:
            parts.append(torch.zeros(run.length, *unit.trailing))
        else:
            parts.append(full[run.tensor].movedim(unit.dim, 0)[run.start : run.stop])
    return torch.cat(parts)


@pytest.mark.parametrize(("t", "s"), PAIRS)
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_load_fills_both_sides(t: int, s: int, layouts: tuple[str, str], tied: bool) -> None:
    plan = sharing_plan(t, s, layouts, tied=tied)
    full = full_tensors(plan.plan, 3)
    for backing in _backings(plan):
        assert not backing.version.readable
        backing.load(full, "test")
        for side in Side:
            for unit, part in backing.placements(side):
                for placed in part:
                    view, wanted = backing.view(placed), _content(unit, placed.parameter, full)
                    found = view.t() if unit.dim else view.reshape(wanted.shape)
                    assert torch.equal(found, wanted), placed.parameter.name


@pytest.mark.parametrize(("t", "s"), PAIRS)
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_training_writes_through_into_the_rollout_in_the_same_memory(t: int, s: int, layouts: tuple[str, str]) -> None:
    plan = sharing_plan(t, s, layouts)
    for backing in _backings(plan):
        store = backing.stores[Store.BACKING]
        first, last = store.data_ptr(), store.data_ptr() + store.nbytes
        for placement in backing.layout.placements:
            for placed in placement.train:
                view = backing.view(placed)
                end = view.data_ptr() + 4 * sum((n - 1) * k for n, k in zip(view.shape, view.stride(), strict=True))
                assert first <= view.data_ptr() <= end < last
                view.fill_(7.0)
            seen = sum(int((backing.view(placed) == 7.0).sum()) for placed in placement.rollout)
            held = [sum(placed.view.numel for placed in side) for side in (placement.train, placement.rollout)]
            assert seen == (0 if placement.sharing is Sharing.REBUILT else min(held)), placement.unit.name
            store.zero_()


def test_modules_get_each_matrix_as_a_view_where_the_layout_keeps_its_rows_together() -> None:
    plan = sharing_plan(4, 2, ("hf", "vllm"))
    full = full_tensors(plan.plan, 4)
    backing = Backing.create(plan, 1, torch.float32, CPU)
    backing.load(full, "test")
    root = "model.language_model.layers.0."
    rollout = backing.tensors(Side.ROLLOUT)
    assert set(rollout) == {tensor.name for tensor in plan.plan.tensors}
    k = rollout[f"{root}self_attn.k_proj.weight"]  # rollout rank 0 of 2: the first of 2 key/value heads of 2 rows
    assert torch.equal(k, full[f"{root}self_attn.k_proj.weight"][:2])
    assert torch.equal(rollout[f"{root}mlp.up_proj.weight"], full[f"{root}mlp.up_proj.weight"][:12])
    down = backing.tensors(Side.TRAIN)[f"{root}mlp.down_proj.weight"]  # training rank 1 of 4
    assert torch.equal(down, full[f"{root}mlp.down_proj.weight"][:, 6:12]) and down.stride() == (1, 16)
    other = Backing.create(sharing_plan(1, 1, ("megatron", "vllm")), 0, torch.float32, CPU)
    with pytest.raises(ConfigError, match=r"q_proj.*sharing\.train_layout to hf or vllm"):
        other.tensors(Side.TRAIN)


@pytest.mark.parametrize(
    ("t", "s", "words"), [(3, 1, r"train_tp 3.*set sharing\.train_tp to one of 1, 2, 4, 8"), (1, 3, "rollout_tp 3")]
)
def test_degrees_that_do_not_divide_are_refused(t: int, s: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sharing_plan(t, s)


def test_a_vocabulary_that_may_not_be_padded_is_refused() -> None:
    sharing = SharingConfig(train_tp=2, rollout_tp=1, vocab_padding="hf")
    with pytest.raises(ConfigError, match=r"301 rows.*set sharing\.vocab_padding to shared"):
        plan_sharing(small_plan(), sharing)


@pytest.mark.parametrize(("t", "s"), PAIRS)
@pytest.mark.parametrize("bucket", [16, 100, 10**6])
def test_rounds_move_everything_once_and_keep_to_their_buckets(t: int, s: int, bucket: int) -> None:
    plan = sharing_plan(t, s, ("megatron", "vllm"))
    rounds = publish_rounds(plan, bucket)
    for moves in rounds:
        for device in range(plan.num_devices):
            for end in ("source", "target"):
                sizes = [move.numel for move in moves if getattr(move.copy, end) == device]
                assert sum(sizes) <= bucket or len(sizes) == 1
    for device in range(plan.num_devices):
        moved = sum(move.numel for moves in rounds for move in moves if move.copy.target == device)
        assert moved == sum(received_numel(plan, c.unit, device) for c in plan.units)
        assert all(move.copy.source == device for move in local_moves(plan, device))


def test_readers_share_and_a_writer_is_alone() -> None:
    version = SharedVersion.create()
    with pytest.raises(StateError, match="decode needs whole weights"), version.reading("decode"):
        pass
    with version.writing("load", replaces_all=True) as new:
        assert new == 1
        with pytest.raises(DeadlineError, match="decode waited 0.0 s to read.*load"), version.reading("decode"):
            pass
    with version.reading("decode") as first, version.reading("score") as second:
        assert (first, second) == (1, 1)
        with pytest.raises(DeadlineError, match=r"optimizer waited 0\.1 s to write.*decode, score"):
            with version.writing("optimizer", wait_s=0.1):
                pass
    assert version.current == 1 and version.readable


def test_a_writer_waits_for_its_readers_and_goes_before_later_ones() -> None:
    version = SharedVersion.create()
    with version.writing("load", replaces_all=True):
        pass
    waiting, order = threading.Event(), list[str]()

    def write() -> None:
        waiting.set()
        with version.writing("optimizer", wait_s=120.0):
            order.append("write")

    writer = threading.Thread(target=write)
    with version.reading("decode"):
        writer.start()
        waiting.wait(120.0)
        late = DeadlineError
        while late is DeadlineError:  # until the writer has the gate, readers still get in
            try:
                with version.reading("late"):
                    pass
            except DeadlineError:
                break
        order.append("read")
    writer.join(120.0)
    assert order == ["read", "write"] and version.current == 2


def test_a_failed_write_leaves_nothing_to_read_unless_it_changed_nothing() -> None:
    version = SharedVersion.create()
    with version.writing("load", replaces_all=True):
        pass
    with pytest.raises(TrainingError), version.writing("optimizer"):
        raise TrainingError("the gradient norm is nan")
    assert version.readable and version.current == 1
    with pytest.raises(KeyboardInterrupt), version.writing("optimizer"):
        raise KeyboardInterrupt
    with pytest.raises(StateError, match="half written since v1"), version.writing("optimizer"):
        pass
    with version.writing("load", replaces_all=True):
        pass
    assert version.readable and version.current == 2


def test_a_handle_of_a_process_that_ended_is_refused() -> None:
    segment = Segment.create(16, CPU)
    handle = segment.handle
    again = Segment.attach(handle)
    segment.memory.fill_(3)
    assert again.memory.tolist() == [3] * 16
    gone = type(handle)(2**22 + 1, handle.fd, handle.nbytes)  # beyond the largest process number
    with pytest.raises(StateError, match="cannot be mapped.*it ended"):
        Segment.attach(gone)


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a GPU: weights shared through CUDA IPC")
def test_views_on_a_gpu() -> None:
    plan = sharing_plan(2, 1)
    full = full_tensors(plan.plan, 5)
    backing = Backing.create(plan, 0, torch.bfloat16, torch.device("cuda"))
    backing.load(full, "test")
    assert backing.segments[Store.BACKING].handle  # an IPC handle was made
    found = backing.tensors(Side.TRAIN)["model.language_model.norm.weight"]
    assert torch.equal(found.cpu(), full["model.language_model.norm.weight"].bfloat16())
