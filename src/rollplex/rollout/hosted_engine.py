"""Rollouts by engines with weights of their own: who samples what, when weights are pushed, who is started again.

A host whose process ends is named in the log, started again, given the current weights, and asked again for the
responses that it had not delivered, with the same random keys. Residency of each host's weights and KV cache is a state
machine (memory/states.py), so that nothing is sampled from weights that were not, or only half, pushed. Layers that
read training's storage itself (weights/lending.py) need no push; `writing` keeps it still while hosts sample.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from typing import Any

import torch

from rollplex.errors import DeadlineError, PeerError, StateError
from rollplex.memory.states import Residency, ResidencyStates
from rollplex.models.policy import Policy
from rollplex.models.save import merged_tensors
from rollplex.models.tensor_files import StoredTensor
from rollplex.rollout.engine import Finished, SamplingParams
from rollplex.rollout.hosting import Host, HostDied, Request, WeightBucket
from rollplex.rollout.weight_push import DirectBucket, bucket_bytes, fill, in_buckets
from rollplex.types import PromptSpec
from rollplex.weights.lending import EngineSharing, Way
from rollplex.weights.loan import LentWeights
from rollplex.weights.segment import Segment

# New processes in one push or one rollout; a host that keeps ending has a cause that a new start does not remove.
MAX_RESTARTS = 3
# How long `step` waits for news of processes before it gives the caller room for other work.
_TICK_S = 0.02

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Place:
    """One host with what it holds and what it owes."""

    number: int
    host: Host
    version: int | None = None  # of the policy weights that it holds; None: none, or half of them
    sharing: EngineSharing | None = None  # what it takes from training's storage; None: it was not told of that
    states: ResidencyStates = field(default_factory=ResidencyStates)
    owed: dict[tuple[int, int], Request] = field(default_factory=dict)  # (rollout id, response index) -> asked by
    reading: ExitStack = field(default_factory=ExitStack)  # open while it samples


class HostedEngine:
    """Hosts, and the weights in them. Between rollouts `open` brings them to the policy's weights.

    start: makes the host of a number (again, after one died). direct: hosts read this process's own tensors; else they
    map a bucket. lent: what hosts may use in place; absent: nothing. Raises what the hosts raise while they start.
    """

    def __init__(
        self,
        policy: Policy,
        start: Callable[[int], Host],
        num_hosts: int,
        *,
        bucket_limit: int,
        timeout_s: float,
        direct: bool,
        lent: LentWeights | None = None,
    ):
        self.policy, self.start = policy, start
        self.bucket_limit, self.timeout_s, self.direct, self.lent = bucket_limit, timeout_s, direct, lent
        self.places: list[_Place] = []
        self.restarts = 0
        self._pushed_bytes, self._publish_s = 0, 0.0  # of the newest publish, into all hosts
        self._metrics: dict[str, float] = {}  # of the one that the newest rollout is under
        self._closed = False
        self._thread = ThreadPoolExecutor(1, "rollplex-hand-over")
        self._handing: Future[None] | None = None  # a publish that runs beside other work
        try:
            for number in range(num_hosts):  # processes start side by side
                self.places.append(_Place(number, start(number)))
            for place in self.places:
                place.host.wait_ready()
        except BaseException:
            self.close()
            raise

    def open(self, params: SamplingParams) -> HostedRollout:
        """A rollout under the policy's present weights. Wakes the hosts and publishes weights where they are not there.

        Waits for a publish that was begun before, and raises what it did.
        """
        self._settle()
        for place in self.places:
            if place.states.weights is not Residency.RESIDENT:
                place.host.call("wake_weights")()
                place.states.wake_weights()
        if any(place.version != self.policy.weight_version for place in self.places):
            self.publish()
        for place in self.places:
            if place.states.kv is not Residency.RESIDENT:
                place.host.call("wake_kv")()
                place.states.wake_kv()
        shared = [place.sharing for place in self.places if place.sharing is not None]
        self._metrics = {
            "publish/aliased_bytes": float(sum(sharing.nbytes(Way.ALIASED) for sharing in shared)),
            "publish/packed_bytes": float(sum(sharing.nbytes(Way.PACKED) for sharing in shared)),
            "publish/pushed_bytes": float(self._pushed_bytes),
            "publish/seconds": self._publish_s,
        }
        return HostedRollout(self, params)

    def publish(self) -> None:
        """Bring the policy's weights to every host and drop what the hosts computed from older ones.

        Raises StateError while one samples. After any error the hosts' weights are invalid until a publish succeeds.
        """
        self._settle()
        self._publish()

    def begin_publish(self) -> None:
        """Begin `publish` in a thread, where the hosts work beside this process: in processes of their own, and awake.
        The next `open` waits for its end. Until then the policy's weights must stand still: `writing` sees to it."""
        beside = all(place.host.connection is not None for place in self.places)
        if beside and all(place.states.weights is Residency.RESIDENT for place in self.places):
            self._settle()
            self._handing = self._thread.submit(self._publish, self._loading(self.places))

    @contextmanager
    def writing(self, who: str) -> Iterator[None]:
        """The policy's weights change in this block. Raises StateError while a host samples from them or takes them; an
        error in the block leaves the hosts' weights invalid until the next publish, as they may read them in place."""
        with ExitStack() as stack:
            for place in self.places:
                if place.states.weights is Residency.RESIDENT:
                    stack.enter_context(place.states.writing(who))
            yield

    def metrics(self) -> dict[str, float]:
        """Of the publish that the newest rollout is under, all hosts together: bytes of parameters by the way that new
        weights reach them, bytes that were sent, and seconds from begin to end."""
        return self._metrics

    def sleep(self) -> None:
        """Give the hosts' memory back: weights and KV cache lose their content. `open` wakes them."""
        for place in self.places:
            place.states.release_kv()
            place.states.release_weights()
            place.version = None
        _on_all(self.places, "sleep")

    def close(self) -> None:
        """End all hosts, and a publish that runs."""
        self._closed = True
        ended = [place.host for place in self.places]
        for place in self.places:
            place.reading.close()
            place.host.close()
        self._thread.shutdown()  # a publish that waits for a host has heard of its end
        for place in self.places:
            if place.host not in ended:  # it had just been started again
                place.host.close()
        self.places = []

    def revive(self, place: _Place, version: int) -> None:
        """A new host in `place`, with the current weights, asked for all that the old one owed under v`version`.

        Raises StateError when the policy has moved on: the rest of the rollout would come from other weights.
        """
        if self.policy.weight_version != version:
            raise StateError(
                f"{place.host.name} ended while it sampled under weights v{version}; the policy has "
                f"v{self.policy.weight_version} by now, so what it owed cannot be sampled again"
            )
        self._start_again(place)
        self._push([place], self._loading([place]))
        requests = _regrouped(place.owed)
        place.owed.clear()
        for request in requests:
            self.ask(place, request)

    def ask(self, place: _Place, request: Request) -> None:
        """Let the host of `place` sample `request`. Raises StateError when it may not."""
        if place.version != self.policy.weight_version:
            raise StateError(
                f"{place.host.name} holds weights v{place.version}, the policy has v{self.policy.weight_version}; open "
                "a new rollout after an optimizer step"
            )
        if not place.owed:
            place.reading.enter_context(place.states.generating(place.host.name))
        try:
            place.host.submit([request])
        except BaseException:
            if not place.owed:
                place.reading.close()
            raise
        place.owed |= {(request.rollout_id, index): request for index in request.indices}

    def _settle(self) -> None:
        """Wait for the publish that was begun; each of its waits has a deadline and names its host."""
        handing, self._handing = self._handing, None
        if handing is not None:
            try:
                handing.result()
            except Exception as error:
                error.add_note("in the publish that ran beside the work after the optimizer step")
                raise

    def _publish(self, hold: ExitStack | None = None) -> None:
        """hold: what `_loading` gave for all places, so that a publish is under way before its thread runs."""
        begin_s = time.monotonic()
        for _ in range(MAX_RESTARTS + 1):
            try:
                self._pushed_bytes = self._push(self.places, hold or self._loading(self.places))
                self._publish_s = time.monotonic() - begin_s
                return
            except HostDied as death:
                hold = None
                if self._closed:
                    raise
                self._replace_dead(death)
        raise PeerError(f"hosts ended in each of {MAX_RESTARTS + 1} pushes of the weights; the log says how")

    def _loading(self, places: Sequence[_Place]) -> ExitStack:
        """The weights of `places` as somebody's who replaces them, until it is closed. Raises StateError."""
        with ExitStack() as stack:
            for place in places:
                what = f"the push of v{self.policy.weight_version} into {place.host.name}"
                stack.enter_context(place.states.loading(what))
            for place in places:
                place.version = None
            return stack.pop_all()

    def _push(self, places: Sequence[_Place], hold: ExitStack) -> int:
        """Weights to the hosts of `places`: all, or those that they do not take from training's storage; bytes sent."""
        sent = 0
        with hold, torch.no_grad():
            version, tensors = self.policy.weight_version, merged_tensors(self.policy.model)
            told = [place for place in places if place.sharing is not None]
            untold = [place for place in places if place.sharing is None]
            if self.lent is not None:
                self.lent.settle()  # hosts see what the optimizer wrote
            if told:
                left = frozenset[str]().union(*(place.sharing.pushed_sources for place in told if place.sharing))
                sent += self._load(told, [item for item in tensors if item.name in left])
            if untold:
                sent += self._load(untold, tensors)
                self._share(untold)
        for place in places:
            place.version = version
        return sent

    def _load(self, places: Sequence[_Place], tensors: Sequence[StoredTensor]) -> int:
        """`tensors` to all of `places`; bytes sent."""
        buckets = list(in_buckets(tensors, self.bucket_limit))
        _on_all(places, "begin_load")
        memory = None
        if buckets and not self.direct:
            memory = Segment.create(max(map(bucket_bytes, buckets)), torch.device("cpu"))
        for stored in buckets:
            bucket: WeightBucket = DirectBucket(tuple(stored)) if memory is None else fill(memory, stored)
            _on_all(places, "load", bucket)
        _on_all(places, "end_load")
        return len(places) * sum(item.num_bytes for item in tensors)

    def _share(self, places: Sequence[_Place]) -> None:
        """Let hosts that just got all weights take from training's storage what they can."""
        if self.lent is None:
            return
        loan = self.lent.loan(direct=self.direct)
        for place, sharing in zip(places, _on_all(places, "share", loan), strict=True):
            place.sharing = sharing
            ways = ", ".join(f"{sharing.nbytes(way):,} bytes {way}" for way in Way)
            _log.info("weights of %s: %s", place.host.name, ways)
            for reason, nbytes in sharing.reasons.items():
                _log.info("pushed into %s, %s bytes: %s", place.host.name, f"{nbytes:,}", reason)

    def _replace_dead(self, death: HostDied) -> None:
        for place in self.places:
            if place.host.name == death.host_name:
                _log.warning("%s while weights were pushed; started again", death)
                self._start_again(place)

    def _start_again(self, place: _Place) -> None:
        place.reading.close()
        place.host.close()
        place.version = place.sharing = None
        place.states = ResidencyStates()
        place.states.release_weights()  # the new host's weights are not valid before a push
        place.states.wake_weights()
        place.host = self.start(place.number)
        if self._closed:  # by another thread, which may not have seen this host
            raise HostDied(place.host.name, "was started again while all were closed")
        place.host.wait_ready()
        self.restarts += 1


class HostedRollout:
    """RolloutEngine on the hosts of a HostedEngine, for one kind of sampling."""

    def __init__(self, engine: HostedEngine, params: SamplingParams):
        self.engine, self.params = engine, params
        self.version = engine.policy.weight_version
        self.restarts_left = MAX_RESTARTS

    @property
    def busy(self) -> bool:
        """Whether any response is unfinished."""
        return any(place.owed for place in self.engine.places)

    def admit(self, rollout_id: int, spec: PromptSpec) -> None:
        """Queue all responses of a prompt, on the host that owes least: one host shares the prompt among them."""
        place = min(self.engine.places, key=lambda place: len(place.owed))
        request = Request(rollout_id, spec, self.params, tuple(range(self.params.num_generations)))
        self.engine.ask(place, request)

    def step(self) -> list[Finished]:
        """What the hosts finished. Decodes one step in this process, or waits a moment for other processes.

        Raises DeadlineError when a host that owes responses gives no sign of life, PeerError when one ends again and
        again, and what a host raises.
        """
        places = [place for place in self.engine.places if place.owed]
        silent = [place.host.connection for place in places if place.host.connection is not None]
        if silent:
            wait(silent, _TICK_S)
        finished: list[Finished] = []
        for place in places:
            try:
                finished += self._collect(place)
            except HostDied as death:
                self._revive(place, death)
        return finished

    def _collect(self, place: _Place) -> list[Finished]:
        finished = place.host.poll()
        for item in finished:
            del place.owed[item.rollout_id, item.response.index]
        if not place.owed:
            place.reading.close()
        elif place.host.connection is not None:
            silent_s = time.monotonic() - place.host.last_heard_s
            if silent_s > self.engine.timeout_s:
                raise DeadlineError(
                    f"{place.host.name} gave no sign of life for {silent_s:.0f} s while {len(place.owed)} responses of "
                    f"rollouts {sorted({key[0] for key in place.owed})} were awaited (rollout.vllm.call_timeout_s)"
                )
        return finished

    def _revive(self, place: _Place, death: HostDied) -> None:
        rollouts = sorted({key[0] for key in place.owed})
        while True:
            if self.restarts_left == 0:
                raise PeerError(f"{death}; it was end {MAX_RESTARTS + 1} in one rollout, so none is started again")
            self.restarts_left -= 1
            _log.warning(
                "%s; started again, %d responses of rollouts %s are sampled again", death, len(place.owed), rollouts
            )
            try:
                return self.engine.revive(place, self.version)
            except HostDied as another:
                death = another


def _on_all(places: Sequence[_Place], method: str, *args: object) -> list[Any]:
    """What each returns. Raises HostDied only when all have ended: until then one may still read what it was given."""
    deaths: list[HostDied] = []
    results: list[Any] = []
    for waiter in [place.host.call(method, *args) for place in places]:
        try:
            results.append(waiter())
        except HostDied as death:
            deaths.append(death)
    if deaths:
        raise deaths[0]
    return results


def _regrouped(owed: dict[tuple[int, int], Request]) -> list[Request]:
    """One request for each prompt, for the responses that are owed."""
    indices: dict[int, list[int]] = {}
    for rollout_id, index in owed:
        indices.setdefault(rollout_id, []).append(index)
    first = {rollout_id: request for (rollout_id, _), request in reversed(owed.items())}
    return [replace(first[rollout_id], indices=tuple(found)) for rollout_id, found in indices.items()]
