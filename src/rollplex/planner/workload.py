"""A recipe's step as the planner runs it: what it is fed, under any arrangement of devices, in virtual time. Pure.

An `Arrangement` says where both sides run; a `Workload` is everything that does not depend on that. `Workload.on` gives
what `planner/simulate.py` and a cost table need.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import ceil

from rollplex.config import Config
from rollplex.errors import ConfigError
from rollplex.memory.step_shape import StepShape
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
from rollplex.schedule.spec import REFERENCE, AdvantageScope, Phase, PrefixMode, StepSpec
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
        self.median = assumed.response_tokens or max(1.0, cap / 2)
        self.feed = Feed([prompt], shape.generations, LogNormal(self.median, assumed.spread, cap), assumed.seed)
        self.typical = GroupLoad(prompt, (max(1, min(cap, round(self.median))),) * shape.generations)
        self._tables: dict[Parallel, StepTable] = {}
        self.prefix = PrefixMode.SHARED if config.train.share_prefix else PrefixMode.WHOLE
        steps = config.algorithm.steps_per_generation * config.algorithm.num_iterations
        if steps != 1:
            raise ConfigError(
                f"simulated are rollouts with one optimizer step, found {steps} (algorithm.steps_per_generation x "
                "num_iterations); set both to 1"
            )

    def on(self, plan: Arrangement) -> Arranged:
        """The workload under `plan`. Raises ConfigError where its replicas do not divide the prompts."""
        blocks = 1 if plan.pools else plan.train.data
        if self.shape.prompts % blocks:
            raise ConfigError(
                f"rollout.prompts_per_step {self.shape.prompts} is not a multiple of the {blocks} training replicas; "
                "change it, or memory.devices"
            )
        cost = self.cost(plan)
        times = PassTimes(cost)
        # A block's prefills are one after another in its main lane; its engines share them.
        shared_by = 1 if plan.pools else plan.engines

        # Blocks that share a replica of the reference get their part of its time.
        slots = 1 if plan.scoring is None else max(1, plan.scoring.data // blocks)
        sharing = 1 if plan.scoring is None else blocks * slots // plan.scoring.data

        def seconds(phase: Phase, load: GroupLoad | None) -> float:
            alone_s = times.of(phase, load)
            if phase is Phase.PREFILL:
                return alone_s / shared_by
            return alone_s * sharing if phase in REFERENCE else alone_s

        layout = Layout(
            engines=plan.engines,
            blocks=blocks,
            trainers=plan.train.data if plan.pools else 1,
            places=self.config.rollout.max_decode_rows,
            contention=self.assumed.contention if plan.scoring is None else 1.0,
            limits=Limits(window=slots),
            window_apart=plan.scoring is not None,
        )
        schedule: Schedule | RunSchedule = Async() if plan.schedule == Async.name else schedule_named(plan.schedule)
        if plan.schedule == RolloutPipe.name:  # strictly as published it would leave the engines all but idle
            rows = layout.engines * self.config.rollout.max_decode_rows
            schedule = RolloutPipe(floor=ceil(rows / self.shape.generations))
        spec = self._spec(self.shape.prompts // blocks)
        return Arranged(schedule, spec, self.feed, layout, cost, seconds, self.table(cost.rollout))

    def cost(self, plan: Arrangement) -> StepCost:
        """Times of all tasks, for groups of typical length."""
        if plan.pools:
            published = disaggregated_bytes(self.counts, plan.rollout)
        else:
            published = colocated_bytes(self.counts, plan.train, plan.rollout)
        algorithm = Algorithm(
            reference=self.shape.reference,
            prefix=self.prefix,
            activations=self.shape.activations,
            micro_batch_tokens=self.shape.micro_batch_tokens,
        )
        return StepCost(
            Side(self.counts, self.assumed.hardware, plan.train),
            Side(self.counts, self.assumed.hardware, plan.rollout),
            algorithm,
            (self.typical,) * self.shape.prompts,
            publish_bytes=published,
            publish_within_node=not plan.pools,
            scoring=None if plan.scoring is None else Side(self.counts, self.assumed.hardware, plan.scoring),
        )

    def table(self, rollout: Side) -> StepTable:
        """Decode steps of one engine around the typical context; one table for all arrangements with that engine."""
        if rollout.plan in self._tables:
            return self._tables[rollout.plan]

        def step(rows: Rows) -> float:
            return rollout.decode_step(rows).total

        load = self.typical
        table = StepTable(step, context_tokens=load.prompt.tokens + load.responses[0] / 2)
        self._tables[rollout.plan] = table
        return table

    def _spec(self, groups: int) -> StepSpec:
        algorithm = self.config.algorithm
        by_batch = algorithm.loss_type == "reinforce_pp" or algorithm.scale_rewards == "batch"
        return StepSpec(
            num_groups=groups,
            reference=self.shape.reference,
            prefix=self.prefix,
            advantage=AdvantageScope.BATCH if by_batch else AdvantageScope.GROUP,
            resampling=algorithm.dynamic_sampling == "resample",
        )
