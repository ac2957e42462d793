"""The hand-over after an optimizer step: training's ranks write, the block exchanges what the rollout lacks, once.

    all devices of the block mark their weights as half written, and wait for each other
    each training rank writes its own slices (the optimizer, in place); from here on training may read them
    in a thread: rows that a rollout shard lacks come from the device that has them, in rounds; rebuilt rows are copied
    all have everything: only then caches of older weights are dropped, and each device counts the new version

Until its device counts the new version, a reader gets no weights: it finds them locked, or half written. A device that
ends half-way keeps all others from counting; what is left must be loaded again as a whole.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rollplex.errors import ConfigError, StateError
from rollplex.models.shard_plan import Kind
from rollplex.parallel.waits import Peers
from rollplex.weights.layout import SharingPlan
from rollplex.weights.share import Backing
from rollplex.weights.transfer import Move, local_moves, publish_rounds

DEFAULT_BUCKET_BYTES = 64 << 20
# One round travels while the one before it is put in place. Each takes half a bucket for what a device sends and half a
# bucket for what it receives, so both together take two buckets.
_ROUNDS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What one hand-over did on this device."""

    version: int
    received_bytes: int  # from other devices
    buffer_bytes: int  # that the exchange took, beyond the weights
    rounds: int


@dataclass(frozen=True, slots=True)
class HandOver:
    """A hand-over on its way: training's rows are written, the rollout's are not all there yet."""

    version: int  # that its end makes
    _report: Future[PublishReport]

    def finish(self) -> PublishReport:
        """Wait until the rollout may read. Raises what the exchange did: see `Publisher.begin`."""
        return self._report.result()  # every wait of the exchange has a deadline


@dataclass(frozen=True, slots=True)
class _Room:
    """The buffers of one round, used again by the next but one: flat, as long as the largest round of this device."""

    outgoing: torch.Tensor
    incoming: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Of both."""
        return self.outgoing.nbytes + self.incoming.nbytes


@dataclass(frozen=True, slots=True)
class _Round:
    """One exchange on its way."""

    what: str
    works: tuple[Any, ...]
    incoming: tuple[tuple[torch.Tensor, list[torch.Tensor]], ...]  # a part of a room, and the views that it is for


class Publisher:
    """Hands the weights of one block over. Every device of the block makes its own and calls it alike.

    block: the processes of the block, in the order of their devices; nobody else may use their group while a hand-over
    is on its way. dependents: called in each hand-over before anyone can read the new version, to drop what was
    computed from older weights. check: compare hashes of both sides in each hand-over (reads all weights).
    Raises ConfigError when the block has another size than the plan.
    """

    def __init__(
        self,
        plan: SharingPlan,
        backing: Backing,
        block: Peers,
        *,
        dependents: Sequence[Callable[[], None]] = (),
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        check: bool = False,
    ):
        if block.size != plan.num_devices:
            raise ConfigError(
                f"a block of {plan.num_devices} devices (sharing.train_tp {plan.sharing.train_tp}, sharing.rollout_tp "
                f"{plan.sharing.rollout_tp}) got {block.size} processes; start one for each device"
            )
        self.plan, self.backing, self.block = plan, backing, block
        self.dependents, self.check = tuple(dependents), check
        self.local = local_moves(plan, block.rank)
        self.rounds = publish_rounds(plan, max(1, bucket_bytes // _ROUNDS_IN_FLIGHT // backing.dtype.itemsize))
        self._thread = ThreadPoolExecutor(1, "rollplex-publish")  # ends with the publisher

    def publish(self, write: Callable[[], None], *, wait_s: float = 0.0) -> PublishReport:
        """`begin`, and wait for the end."""
        return self.begin(write, wait_s=wait_s).finish()

    def begin(self, write: Callable[[], None], *, wait_s: float = 0.0) -> HandOver:
        """Run `write` (the optimizer step, on all ranks) and begin to hand over what it wrote: a new version on all
        devices. Meanwhile training may read its weights; the rollout's readers, and the next writer, wait for the end.

        wait_s: how long readers may go on. Raises DeadlineError when they do for longer. Here or in `finish`: PeerError
        or DeadlineError when another device ends or stops, StateError when the hashes differ. After an error the
        weights are half written, save after TrainingError of `write`: then nothing was changed, and the old version
        stays.
        """
        with ExitStack() as stack, torch.no_grad():
            new = stack.enter_context(self.backing.version.writing("publish", wait_s=wait_s))
            self.block.barrier(f"publish of v{new}: start")
            write()
            self.backing.synchronize()
            hold = stack.pop_all()
        return HandOver(new, self._thread.submit(self._complete, new, hold))

    def _complete(self, new: int, hold: ExitStack) -> PublishReport:
        """The rest, in the thread. `hold` is the writer's lock: its end counts the version."""
        with hold, torch.no_grad(), self._side_stream():
            self.block.barrier(f"publish of v{new}: end of all writes")
            received, buffers = self._exchange(new)
            if self.check:
                self._check(new)
            self.backing.synchronize()
            self.block.barrier(f"publish of v{new}: end of the exchange")
            for drop in self.dependents:
                drop()
        return PublishReport(new, received, buffers, len(self.rounds))

    def _side_stream(self) -> AbstractContextManager[object]:
        """On an accelerator, a stream beside that of training. What `write` wrote is there already."""
        device = next(iter(self.backing.stores.values())).device
        return nullcontext() if device.type == "cpu" else torch.Stream(device)

    def _exchange(self, version: int) -> tuple[int, int]:
        """(bytes received from others, bytes of buffers)"""
        rooms, received = self._rooms(), 0
        flying: deque[_Round] = deque()
        for number, moves in enumerate(self.rounds):
            if len(flying) == len(rooms):
                self._land(flying.popleft())
            what = f"publish of v{version}: round {number + 1} of {len(self.rounds)}"
            flying.append(self._post(moves, rooms[number % len(rooms)], what))
            received += sum(part.nbytes for part, _ in flying[-1].incoming)
        for move in self.local:
            for source, target in zip(self._source(move), self._target(move), strict=True):
                target.copy_(source)
        while flying:
            self._land(flying.popleft())
        return received, sum(room.nbytes for room in rooms)

    def _rooms(self) -> list[_Room]:
        """Allocated once: what the system holds is what is counted, whatever an allocator keeps of freed memory."""
        store, own = next(iter(self.backing.stores.values())), self.block.rank
        sent = max((sum(m.numel for m in moves if m.copy.source == own) for moves in self.rounds), default=0)
        received = max((sum(m.numel for m in moves if m.copy.target == own) for moves in self.rounds), default=0)
        count = min(_ROUNDS_IN_FLIGHT, len(self.rounds))
        return [_Room(store.new_empty(sent), store.new_empty(received)) for _ in range(count)]

    def _post(self, moves: Sequence[Move], room: _Room, what: str) -> _Round:
        """Send, and expect, what one round moves to and from this device."""
        own, group = self.block.rank, self.block.group
        operations, incoming, sent, received = list[dist.P2POp](), [], 0, 0
        for peer in range(self.block.size):
            leaving = [m for m in moves if (m.copy.source, m.copy.target) == (own, peer)]
            if leaving:
                views = [view.reshape(-1) for move in leaving for view in self._source(move)]
                part = room.outgoing[sent : sent + sum(move.numel for move in leaving)]
                operations.append(dist.P2POp(dist.isend, torch.cat(views, out=part), group=group, group_peer=peer))
                sent += part.numel()
            arriving = [m for m in moves if (m.copy.source, m.copy.target) == (peer, own)]
            if arriving:
                part = room.incoming[received : received + sum(move.numel for move in arriving)]
                operations.append(dist.P2POp(dist.irecv, part, group=group, group_peer=peer))
                incoming.append((part, [view for move in arriving for view in self._target(move)]))
                received += part.numel()
        works: Sequence[Any] = ()
        if operations:
            with self.block.waiting(what):
                works = dist.batch_isend_irecv(operations)
        return _Round(what, tuple(works), tuple(incoming))

    def _land(self, arriving: _Round) -> None:
        """Wait for a round and put what it brought in place."""
        for work in arriving.works:
            self.block.wait(work, arriving.what)
        for part, targets in arriving.incoming:
            for rows, view in zip(part.split([view.numel() for view in targets]), targets, strict=True):
                view.copy_(rows.view(view.shape))

    def _source(self, move: Move) -> list[torch.Tensor]:
        placement, at = self.backing.layout.placements[move.unit], move.copy.source_at
        return list(self.backing.rows(placement.unit, placement.train, at, at + move.copy.length))

    def _target(self, move: Move) -> list[torch.Tensor]:
        placement, at = self.backing.layout.placements[move.unit], move.copy.target_at
        return list(self.backing.rows(placement.unit, placement.rollout, at, at + move.copy.length))

    def _check(self, version: int) -> None:
        """Raises StateError when rows arrived otherwise than they left, or whole tensors differ between devices."""
        own, sent, arrived = self.block.rank, dict[object, str](), dict[object, str]()
        for move in [*self.local, *(move for moves in self.rounds for move in moves)]:
            if move.copy.source == own:
                sent[move.copy] = _digest(self._source(move))
            if move.copy.target == own:
                arrived[move.copy] = _digest(self._target(move))
        whole = {
            p.unit.name: _digest([self.backing.view(placed) for placed in p.train])
            for p in self.backing.layout.placements
            if p.unit.kind in (Kind.REPLICATED, Kind.VISION)
        }
        found = self.block.exchange((sent, arrived, whole), f"publish of v{version}: exchange of hashes")
        left = {copy: digest for part in found for copy, digest in part[0].items()}
        for device, (_, got, theirs) in enumerate(found):
            for copy, digest in got.items():
                if left[copy] != digest:
                    raise StateError(f"publish of v{version}: {copy} arrived otherwise on device {device} than it left")
            for name, digest in theirs.items():
                if whole[name] != digest:
                    raise StateError(
                        f"publish of v{version}: {name} is whole on every device, yet differs between devices "
                        f"{own} and {device}: training's ranks have drifted apart"
                    )


def _digest(views: Sequence[torch.Tensor]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for view in views:
        found.update(view.detach().reshape(-1).cpu().view(torch.uint8).numpy().data)
    return found.hexdigest()
