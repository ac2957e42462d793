"""CUDA graphs on a model of what torch asks of who records them; tests/gpu records real ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import pytest
import torch

from numerics.cases import tiny_rig
from rollplex.rollout.capture import CudaGraphs
from rollplex.rollout.decode_buckets import Bucket
from rollplex.rollout.decode_graphs import DecodeGraphs
from rollplex.rollout.engine import SamplingParams
from rollplex.rollout.local_engine import LocalEngine


@dataclass(eq=False)
class _Stream:
    device: torch.device
    priority: int = 0
    waited: list[_Stream] = field(default_factory=list)
    synchronized: bool = False

    def wait_stream(self, other: _Stream) -> None:
        self.waited.append(other)

    def synchronize(self) -> None:
        self.synchronized = True


class _Cuda:
    """Streams, and graphs in pools. A pool whose graphs are all gone takes no other (CUDACachingAllocator.cpp), and
    nothing is recorded on a lane's own stream, which others use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.lane = _Stream(torch.device("cuda", 0), priority=-1)
        self.current, self.made, numbers = self.lane, list[_Stream](), count()
        self.live: dict[int, weakref.WeakSet[object]] = {}  # graphs by pool
        self.recording = False
        fake = self

        class Graph:
            def capture_begin(self, pool: int | None, capture_error_mode: str) -> None:
                assert fake.current is not fake.lane and fake.lane in fake.current.waited and fake.current.synchronized
                assert capture_error_mode == "thread_local"
                assert pool is None or fake.live[pool], "use_count > 0"
                self.number = next(numbers) if pool is None else pool
                fake.recording = True

            def capture_end(self) -> None:
                fake.live.setdefault(self.number, weakref.WeakSet()).add(self)
                fake.recording = False

            def pool(self) -> int:
                return self.number

            def replay(self) -> None:
                assert fake.current is fake.lane and fake.made[-1] in fake.lane.waited

        def stream(device: torch.device, priority: int) -> _Stream:
            self.made.append(_Stream(device, priority))
            return self.made[-1]

        monkeypatch.setattr("torch.cuda.CUDAGraph", Graph)
        monkeypatch.setattr("torch.cuda.Stream", stream)
        monkeypatch.setattr("torch.cuda.stream", self._on)
        monkeypatch.setattr("torch.cuda.current_stream", lambda _: self.current)

    @contextmanager
    def _on(self, stream: _Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> _Cuda:
    return _Cuda(monkeypatch)


def test_recorded_beside_the_lane_at_its_priority_after_a_first_run(cuda: _Cuda) -> None:
    graphs, runs = CudaGraphs(cuda.lane.device), list[bool]()
    replay = graphs.captured(lambda: runs.append(cuda.recording))
    assert runs == [False, True]
    replay()
    graphs.captured(lambda: None)
    assert [stream.priority for stream in cuda.made] == [-1]


def test_one_pool_until_it_is_released(cuda: _Cuda) -> None:
    graphs = CudaGraphs(cuda.lane.device)
    kept = [graphs.captured(lambda: None) for _ in range(3)]
    kept.clear()  # caches grew: nothing that was recorded may be replayed
    kept.append(graphs.captured(lambda: None))
    assert list(cuda.live) == [0]
    graphs.release()
    kept.clear()
    assert not cuda.live[0]  # torch may have its memory
    kept.append(graphs.captured(lambda: None))
    assert list(cuda.live) == [0, 1]


def test_a_rollout_that_outgrows_its_caches_goes_on_in_its_pool(cuda: _Cuda) -> None:
    made = tiny_rig("qwen2_5_vl", torch.float32)

    class OnCpu(CudaGraphs):
        """A replay of the model does nothing, so the work is called in its place."""

        def captured(self, work: Callable[[], None]) -> Callable[[], None]:
            replay = super().captured(work)

            def called() -> None:
                replay()
                work()

            return called

    graphs = DecodeGraphs(made.policy, OnCpu(cuda.lane.device))
    engine = LocalEngine(made.policy, SamplingParams(num_generations=2, max_tokens=70), max_rows=4, graphs=graphs)
    engine.admit(0, made.specs(("text",))[0])
    capacities = set[Bucket]()
    while engine.busy:
        engine.step()
        assert graphs.caches is not None
        capacities.add(graphs.caches.capacity)
    assert len(capacities) > 1 and list(cuda.live) == [0]
