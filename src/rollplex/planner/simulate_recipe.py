"""A recipe in virtual time: `rollplex simulate`. From its numbers to a layout of devices, times of passes and a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rollplex.config import Config
from rollplex.errors import ConfigError
from rollplex.memory.step_shape import StepShape
from rollplex.planner.hardware import Hardware
from rollplex.planner.parallel import Parallel
from rollplex.planner.simulate import Simulation
from rollplex.planner.workload import COLOCATED, HYBRID, POOLS, SIMULATED, Arrangement, Assumptions, Workload


@dataclass(frozen=True)
class Request:
    """What a recipe does not say.

    response_tokens: median of the responses; None: half of rollout.max_completion_length, at which they are cut.
    spread: of their logarithm. contention: virtual.py. rollout_devices: of the rollout pool; None: half. steps: of the
    run; the spans of the last are kept. Under `hybrid` the reference has the fewest whole replicas beside which
    blocks divide the prompts and can share them evenly.
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
    if request.rollout_devices is not None and request.schedule not in POOLS:
        raise ConfigError(
            f"--rollout-devices {request.rollout_devices} does nothing under --schedule {request.schedule}, which has "
            f"no rollout pool; needed one of {', '.join(POOLS)}, or no --rollout-devices"
        )
    if request.steps < 1:
        raise ConfigError(f"--steps is {request.steps}, needed 1 or more")
    assumed = Assumptions(request.hardware, request.response_tokens, request.spread, request.contention, request.seed)
    workload = Workload(config, assumed)
    if request.schedule == HYBRID:
        plan = _hybrid(workload.shape, request)
    else:
        plan = (_blocks if request.schedule in COLOCATED else _pools)(workload.shape, request)
    return workload.on(plan).simulate(request.steps, traced=(request.steps - 1,))


def _blocks(shape: StepShape, request: Request) -> Arrangement:
    """Every device samples and trains: one training replica with its engines to a block."""
    train, rollout = _colocated(shape, shape.devices)
    return Arrangement(request.schedule, train, rollout)


def _hybrid(shape: StepShape, request: Request) -> Arrangement:
    """Some whole replicas for the reference, the others as blocks."""
    replicas = shape.devices // shape.train_tp
    for own in range(1, replicas):
        blocks = replicas - own
        if shape.prompts % blocks == 0 and (own % blocks == 0 or blocks % own == 0):
            train, rollout = _colocated(shape, blocks * shape.train_tp)
            scoring = Parallel(shape.train_tp, data=own, sequence=shape.sequence_parallel)
            return Arrangement(request.schedule, train, rollout, scoring)
    raise ConfigError(
        f"--schedule hybrid: of {replicas} replicas of {shape.train_tp} devices (memory.devices, sharing.train_tp) "
        f"none is left for the reference beside blocks that divide {shape.prompts} prompts (rollout.prompts_per_step)"
    )


def _colocated(shape: StepShape, devices: int) -> tuple[Parallel, Parallel]:
    if shape.train_tp % shape.rollout_tp:
        raise ConfigError(
            f"sharing.rollout_tp {shape.rollout_tp} does not divide train_tp {shape.train_tp}: a block is one "
            "training replica with whole engines on its devices"
        )
    train = Parallel(shape.train_tp, data=devices // shape.train_tp, sequence=shape.sequence_parallel)
    return train, Parallel(shape.rollout_tp, data=devices // shape.rollout_tp)


def _pools(shape: StepShape, request: Request) -> Arrangement:
    """Some devices sample, the others train."""
    sampling = shape.devices // 2 if request.rollout_devices is None else request.rollout_devices
    training = shape.devices - sampling
    if (
        sampling < shape.rollout_tp
        or training < shape.train_tp
        or sampling % shape.rollout_tp
        or training % shape.train_tp
    ):
        raise ConfigError(
            f"{shape.devices} devices (memory.devices) with {sampling} for the rollout pool (--rollout-devices) are no "
            f"whole engines of {shape.rollout_tp} and training replicas of {shape.train_tp} (sharing)"
        )
    train = Parallel(shape.train_tp, data=training // shape.train_tp, sequence=shape.sequence_parallel)
    return Arrangement(request.schedule, train, Parallel(shape.rollout_tp, data=sampling // shape.rollout_tp))


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
