"""One decision of a schedule: launches offered one by one, each taken only if it may start and the step still ends.

Memory cannot deadlock a step. A launch is taken only while the rest of the step, run one task after another in one of
the schedule's orders once all running tasks have ended, stays under the cap: in the first order for which that holds
without the launch. So whenever nothing runs, the next task of that order may start, and what is hoisted never takes the
room that something else must have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollplex.errors import ConfigError
from rollplex.schedule.spec import Phase, StepSpec, Task
from rollplex.schedule.step import Lane, Launch, Limits, StepState


def peak_of_rest(state: StepState, order: Sequence[Task], also: Task | None = None) -> tuple[int, Task | None]:
    """Most bytes held at once, and the task at which, when all running tasks end and the rest runs one by one.

    also: a task taken as running too.
    """
    done = set(state.done) | {launch.task for launch in state.running} | ({also} if also is not None else set())
    used = sum(life.nbytes for life in state.spec.lifetimes if life.producer in done and not life.users <= done)
    peak, where = used, None
    for task in order:
        if task in done:
            continue
        used += state.spec.bytes_started(task)
        if used > peak:
            peak, where = used, task
        done.add(task)
        used -= sum(life.nbytes for life in state.spec.used_by(task) if life.users <= done)
    return peak, where


def check_memory(name: str, spec: StepSpec, limits: Limits, *orders: Sequence[Task]) -> None:
    """Raises ConfigError, with the smallest cap that works, when none of `orders` fits even one task at a time."""
    if limits.memory_bytes is None:
        return
    peak, where = min((peak_of_rest(StepState(spec, limits), order) for order in orders), key=lambda found: found[0])
    if peak > limits.memory_bytes:
        raise ConfigError(
            f"schedule {name!r} needs at least {peak} bytes for {spec.num_groups} groups (reached at {where}), "
            f"Limits.memory_bytes is {limits.memory_bytes}; give it more, or fewer groups (rollout.prompts_per_step)"
        )


class Turn:
    """Collects the launches of one `Schedule.ready`; `state` is the state as if they had started.

    orders: ways in which the schedule could run the step one task at a time, the preferred first. progress: the ledger
    behind `state`, which a schedule of many groups reads directly: it goes on with every launch that is taken.
    """

    __slots__ = ("launches", "order", "orders", "progress", "state")

    def __init__(self, state: StepState, *orders: Sequence[Task]):
        self.state, self.orders, self.order = state, orders, orders[0]
        self.progress = state.progress
        self.launches: list[Launch] = []

    def offer(self, task: Task, lane: Lane) -> bool:
        """Launch `task` in `lane` if it may start now and the rest of the step then still fits."""
        launch = Launch(task, lane)
        if self.state.obstacle(launch) is not None:
            return False
        cap = self.state.limits.memory_bytes
        if cap is not None:
            order = next((o for o in self.orders if peak_of_rest(self.state, o)[0] <= cap), self.order)
            if peak_of_rest(self.state, order, also=task)[0] > cap:
                return False
        self.state = self.state.accept(launch)
        self.launches.append(launch)
        return True

    def has_slot(self, lane: Lane) -> bool:
        """Whether `lane` can take one more task."""
        slots = self.state.limits.slots(lane)
        return slots is None or len(self.progress.in_lane[lane]) < slots

    def offer_pass(self, task: Task) -> bool:
        """Offer a pass over the model: in the window while groups decode, else alone in the main lane."""
        lane = self._pass_lane()
        return lane is not None and self.offer(task, lane)

    def offer_passes(self, *phases: Phase) -> None:
        """Offer the passes of `phases` that may start, in this order, one by one while the device takes another."""
        if self._pass_lane() is None:
            return
        for phase in phases:
            for task in self.pending(phase):
                lane = self._pass_lane()
                if lane is None:
                    return
                self.offer(task, lane)

    def _pass_lane(self) -> Lane | None:
        """Where a pass could start now; None: nowhere."""
        in_lane = self.progress.in_lane
        lane, other = (Lane.WINDOW, Lane.MAIN) if in_lane[Lane.DECODE] else (Lane.MAIN, Lane.WINDOW)
        return lane if not in_lane[other] and self.has_slot(lane) else None

    def offer_rewards(self) -> None:
        """Rewards of complete groups, at once: they run in threads of their own under every schedule."""
        self.offer_all(Phase.REWARD, Lane.REWARD)

    def offer_rollout(self, *, apart: bool = False) -> None:
        """Prefills first, as they are bound by compute; decoding as soon as none can start. The same in every schedule.

        Once groups decode, one that finds room later is prefilled by the engine beside them, in their lane.
        apart: what runs in the window is on other devices.
        """
        in_lane = self.progress.in_lane
        if in_lane[Lane.MAIN]:
            return
        if in_lane[Lane.DECODE] or (in_lane[Lane.WINDOW] and not apart):
            self.offer_all(Phase.DECODE, Lane.DECODE)
            if not self.progress.running_of[Phase.PREFILL]:
                self._offer_prefill(Lane.DECODE)
        elif not self._offer_prefill(Lane.MAIN):
            self.offer_all(Phase.DECODE, Lane.DECODE)

    def _offer_prefill(self, lane: Lane) -> bool:
        """Offer one: the first group that fits."""
        return any(self.offer(task, lane) for task in self.pending(Phase.PREFILL))

    def offer_all(self, phase: Phase, lane: Lane) -> None:
        """Offer every task of `phase` that may start, while `lane` has a slot."""
        if not self.progress.startable[phase]:
            return
        for task in self.pending(phase):
            if not self.has_slot(lane):
                return
            self.offer(task, lane)

    def offer_next(self) -> None:
        """The next passes in exactly this turn's order: sums of gradients then come out the same to the last bit."""
        for task in self.state.unlaunched(self.order):
            if task.phase is not Phase.REWARD and not self.offer_pass(task):
                return

    def pending(self, phase: Phase) -> Iterator[Task]:
        """Tasks of `phase` that were not launched and whose needs are done, in the order of the groups; those launched
        meanwhile are passed over."""
        tasks, passed = self.progress.startable[phase], 0  # the last group first
        while passed < len(tasks):
            task = tasks[-1 - passed]
            yield task
            passed += not self.progress.launched(task)
