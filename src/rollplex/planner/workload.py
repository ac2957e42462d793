"""A recipe's step as the planner runs it: what it is fed, under any arrangement of devices, in virtual time. Pure.

An `Arrangement` says where both sides run; a `Workload` is everything that does not depend on that. `Workload.on` gives
what `planner/simulate.py` and a cost table need.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import ceil, isfinite

from rollplex.config import Config
from rollplex.errors import ConfigError
from rollplex.memory.step_shape import StepShape
from rollplex.planner.bounds import Stage, stages
from rollplex.planner.cost import Side, StepCost
from rollplex.planner.decoding import Rows
from rollplex.planner.engine import StepTable
from rollplex.planner.flops import ModelCounts
from rollplex.planner.hardware import Hardware
from rollplex.planner.lengths import LogNormal
from rollplex.planner.load import GroupLoad, video_prompt
from rollplex.planner.memory import step_shape
from rollplex.planner.parallel import Parallel
from rollplex.planner.pass_times import PassTimes
from rollplex.planner.passes import Algorithm
from rollplex.planner.publishing import colocated_bytes, disaggregated_bytes
from rollplex.planner.simulate import Feed, Layout, PhaseSeconds, Simulation, simulate
from rollplex.schedule.hybrid import Hybrid
from rollplex.schedule.pools import RolloutPipe
from rollplex.schedule.registry import POOL_SCHEDULES, SCHEDULES, schedule_named
from rollplex.schedule.run import Async, RunSchedule
from rollplex.schedule.spec import REFERENCE, Phase, StepSpec
from rollplex.schedule.spec_from_config import steps_of_rollout
from rollplex.schedule.step import Limits, Schedule

COLOCATED = tuple(SCHEDULES)
HYBRID = Hybrid.name
POOLS = (*POOL_SCHEDULES, Async.name)
SIMULATED = (*COLOCATED, HYBRID, *POOLS)


@dataclass(frozen=True, slots=True)
class Arrangement:
    """One way to use devices: a schedule and the degrees of both sides, on the same devices or on two pools.

    Colocated, a block is one training replica with whole rollout engines on its devices. scoring: the reference on
    devices of its own beside the blocks (schedule `hybrid`); its replicas are dealt out evenly over the blocks, or the
    other way round. Raises ConfigError where the sides do not fit together.
    """

    schedule: str
    train: Parallel
    rollout: Parallel
    scoring: Parallel | None = None

    def __post_init__(self) -> None:
        if (self.scoring is not None) is not (self.schedule == HYBRID):
            raise ConfigError(
                f"schedule {self.schedule!r} with devices of the reference's own: {self.scoring}; {HYBRID!r} needs "
                "them, the others have none"
            )
        if self.scoring is not None and self.scoring.data % self.train.data and self.train.data % self.scoring.data:
            raise ConfigError(
                f"{self.scoring.data} replicas of the reference cannot be shared evenly by {self.train.data} blocks"
            )
        if not self.pools and (self.train.replica % self.rollout.replica or self.train.devices != self.rollout.devices):
            raise ConfigError(
                f"engines of {self.rollout.replica} devices do not fill training replicas of {self.train.replica}, or "
                f"{self.rollout.devices} devices sample and {self.train.devices} train: a block is one replica "
                "with whole engines on its devices"
            )

    @property
    def pools(self) -> bool:
        """Whether sampling and training have devices of their own."""
        return self.schedule in POOLS

    @property
    def on_policy(self) -> bool:
        """Whether every group is sampled by the weights that its update starts from."""
        return self.schedule != Async.name

    @property
    def devices(self) -> int:
        """All devices."""
        others = self.rollout if self.pools else self.scoring
        return self.train.devices + (0 if others is None else others.devices)

    @property
    def publish_span(self) -> int:
        """Devices from the first to the last between which new weights travel."""
        if self.pools:
            return self.devices
        return max(self.train.span(axis) for axis in ("tensor", "expert", "pipeline"))

    @property
    def engines(self) -> int:
        """Of a block, or of the rollout pool."""
        return self.rollout.data if self.pools else self.train.replica // self.rollout.replica


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What a recipe does not say.

    response_tokens: median of the responses; None: half of rollout.max_completion_length, at which they are cut.
    spread: of their logarithm. contention: virtual.py.
    """

    hardware: Hardware
    response_tokens: float | None = None
    spread: float = 0.5
    contention: float = 1.2
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError, naming the option, for what is no number or out of range."""
        tokens = self.response_tokens
        if tokens is not None and not (isfinite(tokens) and tokens > 0):
            raise ConfigError(f"--response-tokens is {tokens:g}, needed a number above 0")
        for option, value, least in (("--spread", self.spread, 0), ("--contention", self.contention, 1)):
            if not (isfinite(value) and value >= least):
                raise ConfigError(f"{option} is {value:g}, needed a number of {least} or more")


@dataclass(frozen=True)
class Arranged:
    """A workload on devices: what a simulation takes, and the cost table behind it."""

    schedule: Schedule | RunSchedule
    spec: StepSpec
    feed: Feed
    layout: Layout
    cost: StepCost
    seconds: PhaseSeconds
    table: StepTable

    def simulate(self, steps: int, traced: Collection[int] = ()) -> Simulation:
        """Run `steps` steps; spans are kept of those in `traced`."""
        return simulate(
            self.schedule,
            self.spec,
            self.feed,
            self.layout,
            seconds=self.seconds,
            table=self.table,
            steps=steps,
            traced=traced,
        )


class Workload:
    """The recipe's model, prompts and responses.

    All prompts have data.max_prompt_tokens, of which memory.visual_share are one video. Raises ConfigError for what
    cannot be counted or simulated.
    """

    def __init__(self, config: Config, assumed: Assumptions):
        self.config, self.assumed, self.shape = config, assumed, step_shape(config)
        shape: StepShape = self.shape
        experts = shape.model.text.experts
        self.counts = ModelCounts(shape.model, shape.dtype_bytes, experts, vision_trained=shape.vision_trained)
        cap, prompt = shape.response_tokens, video_prompt(shape.prompt_tokens, shape.visual_tokens, shape.model.vision)
        self.median = max(1.0, cap / 2) if assumed.response_tokens is None else assumed.response_tokens
        self.feed = Feed([prompt], shape.generations, LogNormal(self.median, assumed.spread, cap), assumed.seed)
        self.typical = GroupLoad(prompt, (max(1, min(cap, round(self.median))),) * shape.generations)
        self._tables: dict[Parallel, StepTable] = {}
        steps = config.algorithm.steps_per_generation * config.algorithm.num_iterations
        if steps != 1:
            raise ConfigError(
                f"simulated are rollouts with one optimizer step, found {steps} (algorithm.steps_per_generation x "
                "num_iterations); set both to 1"
            )
        self.whole = self.spec(shape.prompts)

    @property
    def shared_prompts(self) -> bool:
        """Whether an engine reads a prompt's cache once for its group: the local one does, paged attention does not."""
        return self.shape.local_engine

    def refusal(self, schedule: str) -> str | None:
        """Why `schedule` cannot run this step on any devices; None: it can."""
        try:
            self._schedule(schedule, 1).check(self.whole, Limits())
        except ConfigError as error:
            return str(error)
        return None

    def _schedule(self, name: str, engines: int) -> Schedule | RunSchedule:
        if name == RolloutPipe.name:  # strictly as published it would leave the engines all but idle
            rows = engines * self.config.rollout.max_decode_rows
            return RolloutPipe(floor=ceil(rows / self.shape.generations))
        return Async() if name == Async.name else schedule_named(name)

    def on(self, plan: Arrangement) -> Arranged:
        """The workload under `plan`. Raises ConfigError where its replicas do not divide the prompts."""
        blocks = 1 if plan.pools else plan.train.data
        if self.shape.prompts % blocks:
            raise ConfigError(
                f"rollout.prompts_per_step {self.shape.prompts} is not a multiple of the {blocks} training replicas; "
                "change it, or memory.devices"
            )
        cost, groups = self.cost(plan), self.shape.prompts // blocks
        times = PassTimes(cost)
        # A block's prefills are one after another in its main lane; its engines take them in turn, each a whole one.
        prefilled = 1.0 if plan.pools else ceil(groups / plan.engines) / groups

        # Blocks that share a replica of the reference get their part of its time.
        slots = 1 if plan.scoring is None else max(1, plan.scoring.data // blocks)
        sharing = 1 if plan.scoring is None else blocks * slots // plan.scoring.data

        def seconds(phase: Phase, load: GroupLoad | None) -> float:
            alone_s = times.of(phase, load)
            if phase is Phase.PREFILL:
                return alone_s * prefilled
            return alone_s * sharing if phase in REFERENCE else alone_s

        layout = Layout(
            engines=plan.engines,
            blocks=blocks,
            trainers=plan.train.data if plan.pools else 1,
            places=self.config.rollout.max_decode_rows,
            shared_prompts=self.shared_prompts,
            contention=self.assumed.contention if plan.scoring is None else 1.0,
            limits=Limits(window=slots),
            window_apart=plan.scoring is not None,
        )
        schedule = self._schedule(plan.schedule, layout.engines)
        return Arranged(schedule, self.spec(groups), self.feed, layout, cost, seconds, self.table(cost.rollout))

    def cost(self, plan: Arrangement) -> StepCost:
        """Times of all tasks, for groups of typical length."""
        if plan.pools:
            published = disaggregated_bytes(self.counts, plan.rollout)
        else:
            published = colocated_bytes(self.counts, plan.train, plan.rollout)
        spec = self.whole
        algorithm = Algorithm(
            reference=spec.reference,
            old_logps=spec.old_logps,
            prefix=spec.prefix,
            activations=self.shape.activations,
            prefill_is_actor_prefix=spec.prefill_is_actor_prefix,
            micro_batch_tokens=self.shape.micro_batch_tokens,
        )
        return StepCost(
            Side(self.counts, self.assumed.hardware, plan.train),
            Side(self.counts, self.assumed.hardware, plan.rollout),
            algorithm,
            (self.typical,) * self.shape.prompts,
            max_rows=self.config.rollout.max_decode_rows,
            publish_bytes=published,
            publish_within_node=plan.publish_span <= self.assumed.hardware.devices_per_node,
            shard_optimizer=self.shape.shard_optimizer,
            scoring=None if plan.scoring is None else Side(self.counts, self.assumed.hardware, plan.scoring),
        )

    def stages(self, plan: Arrangement) -> tuple[Stage, ...]:
        """Each stage by itself, for groups of typical length, with the cache read as in the simulation."""
        return stages(replace(self.cost(plan), shared_prompts=self.shared_prompts))

    def table(self, rollout: Side) -> StepTable:
        """Decode steps of one engine around the typical context; one table for all arrangements with that engine."""
        if rollout.plan in self._tables:
            return self._tables[rollout.plan]

        def step(rows: Rows) -> float:
            return rollout.decode_step(rows).total

        prompt, half = self.typical.prompt.tokens, self.typical.responses[0] / 2
        read = prompt / (self.shape.generations if self.shared_prompts else 1) + half
        table = StepTable(step, context_tokens=prompt + half, read_tokens=read)
        self._tables[rollout.plan] = table
        return table

    def spec(self, groups: int) -> StepSpec:
        """The step over that many groups, as a run of the recipe has it."""
        local = self.shape.local_engine  # one device, and the engine decodes on the update's own prefixes
        (spec,) = steps_of_rollout(self.config, prefill_is_actor_prefix=local, minibatches=[groups])
        return replace(spec, trained=None)  # all of them: pools know steps of no other form
