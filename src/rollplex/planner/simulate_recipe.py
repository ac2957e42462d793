"""A recipe in virtual time: `rollplex simulate`. From its numbers to a layout of devices, times of passes and a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from rollplex.config import Config
from rollplex.errors import ConfigError
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
from rollplex.schedule.pools import RolloutPipe
from rollplex.schedule.registry import POOL_SCHEDULES, schedule_named
from rollplex.schedule.run import Async, RunSchedule
from rollplex.schedule.spec import AdvantageScope, Phase, PrefixMode, StepSpec
from rollplex.schedule.step import Schedule

SIMULATED = ("serial", "rollplex", "stream", *POOL_SCHEDULES, "async")


@dataclass(frozen=True)
class Request:
    """What a recipe does not say.

    response_tokens: median of the responses; None: half of rollout.max_completion_length, at which they are cut.
    spread: of their logarithm. contention: virtual.py. rollout_devices: of the rollout pool; None: half. steps: of the
    run; the spans of the last are kept.
    """

    schedule: str
    hardware: Hardware
    response_tokens: float | None = None
    spread: float = 0.5
    contention: float = 1.2
    rollout_devices: int | None = None
    steps: int = 3
    seed: int = 0


def simulate_recipe(config: Config, request: Request) -> Simulation:
    """Run the recipe's step on `memory.devices` devices under the degrees of `sharing`.

    All prompts have data.max_prompt_tokens, of which memory.visual_share are one video. Raises ConfigError for a layout
    that does not divide the devices or the prompts, and for what the schedule refuses.
    """
    if request.schedule not in SIMULATED:
        raise ConfigError(f"--schedule is {request.schedule!r}; needed one of {', '.join(SIMULATED)}")
    if request.steps < 1:
        raise ConfigError(f"--steps is {request.steps}, needed 1 or more")
    pools = request.schedule == "async" or request.schedule in POOL_SCHEDULES
    recipe = _Recipe(config, request)
    layout, spec, seconds, table = recipe.pools() if pools else recipe.blocks()
    schedule: Schedule | RunSchedule = Async() if request.schedule == "async" else schedule_named(request.schedule)
    if request.schedule == "rolloutpipe":  # strictly as published it would leave the engines all but idle
        rows = layout.engines * config.rollout.max_decode_rows
        schedule = RolloutPipe(floor=ceil(rows / recipe.shape.generations))
    return simulate(
        schedule,
        spec,
        recipe.feed,
        layout,
        seconds=seconds,
        table=table,
        steps=request.steps,
        traced=(request.steps - 1,),
    )


_Run = tuple[Layout, StepSpec, PhaseSeconds, StepTable]


class _Recipe:
    def __init__(self, config: Config, request: Request):
        self.config, self.request, shape = config, request, step_shape(config)
        self.shape, self.counts = (
            shape,
            ModelCounts(shape.model, shape.dtype_bytes, vision_trained=shape.vision_trained),
        )
        cap, prompt = shape.response_tokens, video_prompt(shape.prompt_tokens, shape.visual_tokens, shape.model.vision)
        median = request.response_tokens or max(1.0, cap / 2)
        self.feed = Feed([prompt], shape.generations, LogNormal(median, request.spread, cap), request.seed)
        self.typical = GroupLoad(prompt, (max(1, min(cap, round(median))),) * shape.generations)
        self.prefix = PrefixMode.SHARED if config.train.share_prefix else PrefixMode.WHOLE
        steps = config.algorithm.steps_per_generation * config.algorithm.num_iterations
        if steps != 1:
            raise ConfigError(
                f"simulated are rollouts with one optimizer step, found {steps} (algorithm.steps_per_generation x "
                "num_iterations); set both to 1"
            )

    def blocks(self) -> _Run:
        """Every device samples and trains: one training replica with its engines to a block."""
        shape, devices = self.shape, self.shape.devices
        if shape.train_tp % shape.rollout_tp:
            raise ConfigError(
                f"sharing.rollout_tp {shape.rollout_tp} does not divide train_tp {shape.train_tp}: a block is one "
                "training replica with whole engines on its devices"
            )
        blocks, engines = devices // shape.train_tp, shape.train_tp // shape.rollout_tp
        train, rollout = Parallel(shape.train_tp, data=blocks), Parallel(shape.rollout_tp, data=blocks * engines)
        published = colocated_bytes(self.counts, train, rollout)
        cost = self._cost(train, rollout, published, within_node=True)
        times = PassTimes(cost)

        def seconds(phase: Phase, load: GroupLoad | None) -> float:
            """A block's prefills are one after another in its main lane; its engines share them."""
            return times.of(phase, load) / (engines if phase is Phase.PREFILL else 1)

        spec = self._spec(self._share(blocks, "training replicas"))
        return self._layout(engines, blocks=blocks), spec, seconds, self._table(cost)

    def pools(self) -> _Run:
        """Some devices sample, the others train."""
        shape, devices = self.shape, self.shape.devices
        sampling = devices // 2 if self.request.rollout_devices is None else self.request.rollout_devices
        training = devices - sampling
        if (
            sampling < shape.rollout_tp
            or training < shape.train_tp
            or sampling % shape.rollout_tp
            or training % shape.train_tp
        ):
            raise ConfigError(
                f"{devices} devices (memory.devices) with {sampling} for the rollout pool (--rollout-devices) are no "
                f"whole engines of {shape.rollout_tp} and training replicas of {shape.train_tp} (sharing)"
            )
        train = Parallel(shape.train_tp, data=training // shape.train_tp)
        rollout = Parallel(shape.rollout_tp, data=sampling // shape.rollout_tp)
        cost = self._cost(train, rollout, disaggregated_bytes(self.counts, rollout), within_node=False)
        layout = self._layout(rollout.data, trainers=train.data)
        return layout, self._spec(shape.prompts), PassTimes(cost).of, self._table(cost)

    def _share(self, replicas: int, what: str) -> int:
        if self.shape.prompts % replicas:
            raise ConfigError(
                f"rollout.prompts_per_step {self.shape.prompts} is not a multiple of the {replicas} {what}; change it, "
                "or memory.devices"
            )
        return self.shape.prompts // replicas

    def _layout(self, engines: int, *, blocks: int = 1, trainers: int = 1) -> Layout:
        return Layout(
            engines=engines,
            blocks=blocks,
            trainers=trainers,
            places=self.config.rollout.max_decode_rows,
            contention=self.request.contention,
        )

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

    def _cost(self, train: Parallel, rollout: Parallel, publish_bytes: float, *, within_node: bool) -> StepCost:
        return StepCost(
            Side(self.counts, self.request.hardware, train),
            Side(self.counts, self.request.hardware, rollout),
            Algorithm(
                reference=self.shape.reference,
                prefix=self.prefix,
                activations=self.shape.activations,
                micro_batch_tokens=self.shape.micro_batch_tokens,
            ),
            (self.typical,) * self.shape.prompts,
            publish_bytes=publish_bytes,
            publish_within_node=within_node,
        )

    def _table(self, cost: StepCost) -> StepTable:
        def step(rows: Rows) -> float:
            return cost.rollout.decode_step(rows).total

        load = self.typical
        return StepTable(step, context_tokens=load.prompt.tokens + load.responses[0] / 2)


def simulation_facts(found: Simulation) -> dict[str, Any]:
    """Plain data for JSON. Times are seconds from the beginning of each step."""
    return {
        "source": "simulated",
        "schedule": found.schedule,
        "seconds_per_step": found.seconds_per_step,
        "steps": [
            {
                "start_s": step.start_s,
                "decoded_s": step.decoded_s - step.start_s,
                "first_pass_s": step.dispatch_s - step.start_s,
                "trained_s": step.trained_s - step.start_s,
                "seconds": step.seconds,
                "waiting_ratio": step.waiting_ratio,
            }
            for step in found.steps
        ],
    }


def simulation_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """What `simulation_facts` gave, as text."""
    yield f"schedule {facts['schedule']}, simulated: {facts['seconds_per_step']:.4g} s a step"
    columns = {"step": 4, "seconds": 9, "decoded at": 11, "first pass at": 14, "trained at": 11, "trainers wait": 14}
    yield " ".join(f"{name:>{width}}" for name, width in columns.items())
    for number, step in enumerate(facts["steps"]):
        yield (
            f"{number:>4} {step['seconds']:>9.4g} {step['decoded_s']:>11.4g} {step['first_pass_s']:>14.4g} "
            f"{step['trained_s']:>11.4g} {step['waiting_ratio']:>14.0%}"
        )
