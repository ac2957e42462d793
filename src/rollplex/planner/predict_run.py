"""What a step of a run in this process will take: its own schedule in virtual time, on a measured machine. Pure.

From the run's configuration and the lengths of its prompts and responses (a row of metrics.jsonl), none of its times.
Not in it: what a run does between the tasks of a step, reward functions, and prompts that are not ready in time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rollplex.config import Config
from rollplex.planner.cost import StepCost
from rollplex.planner.decoding import Rows
from rollplex.planner.engine import Engine, StepTable
from rollplex.planner.hardware import Hardware
from rollplex.planner.load import GroupLoad
from rollplex.planner.traced_run import run_cost, run_side
from rollplex.planner.virtual import VirtualExecutor
from rollplex.schedule.registry import schedule_named
from rollplex.schedule.spec import PER_STEP, Phase, Task
from rollplex.schedule.spec_from_config import steps_of_rollout
from rollplex.schedule.step import Limits, run_step
from rollplex.trace import Span
from rollplex.train.microbatch import pack_by_tokens


@dataclass(frozen=True, slots=True)
class Machine:
    """A device as `calibrate` found it, and what its two lanes cost each other (beside.py).

    eager: passes run without fused attention kernels, as on a CPU.
    """

    device: Hardware
    decode_contention: float
    window_contention: float
    eager: bool


def predicted_step(config: Config, row: Mapping[str, float], machine: Machine) -> tuple[float, tuple[Span, ...]]:
    """Seconds of the step that `row` tells the lengths of, and what would run when.

    Raises ConfigError for a run whose lengths are not in the row, or whose schedule cannot run its step.
    """
    side = run_side(config, machine.device, eager=machine.eager)
    cost = run_cost(config, row, config.rollout.prompts_per_step, side, pack=1)
    budget = min(config.schedule.unit_tokens, config.train.micro_batch_tokens)
    units = pack_by_tokens([group.prompt.tokens for group in cost.groups], budget)
    cost = replace(cost, algorithm=replace(cost.algorithm, pack_groups=max(map(len, units))))
    loads = [_together([cost.groups[member] for member in unit]) for unit in units]

    def seconds(step: int, task: Task) -> float:
        if task.phase is Phase.REWARD:
            return 0.0
        if task.group is None or task.phase in PER_STEP:
            return cost.task(task).total
        return sum(cost.task(Task(task.phase, member)).total for member in units[task.group])

    engine = Engine(_table(cost), places=cost.max_rows, shared_prompts=True)
    executor = VirtualExecutor(
        seconds, lambda step: loads, [engine], machine.decode_contention, machine.window_contention
    )
    merged = cost.algorithm.prefill_is_actor_prefix
    (spec,) = steps_of_rollout(config, prefill_is_actor_prefix=merged, minibatches=[len(units)])
    window = 0 if config.schedule.overlap == "off" else 1
    run_step(schedule_named(config.schedule.name), executor.of_step(0), spec, Limits(window=window))
    return executor.now_s, tuple(executor.spans)


def _together(groups: list[GroupLoad]) -> GroupLoad:
    """Prompts of one pass as the engine gets them: equally long, decoded together."""
    return GroupLoad(groups[0].prompt, tuple(tokens for group in groups for tokens in group.responses))


def _table(cost: StepCost) -> StepTable:
    """Decode steps around the typical context; a prompt is read once for the rows of its group."""
    rows = sum(len(group.responses) for group in cost.groups)
    prompt, half = cost.groups[0].prompt.tokens, sum(group.response_tokens for group in cost.groups) / rows / 2

    def step(rows: Rows) -> float:
        return cost.rollout.decode_step(rows).total

    return StepTable(step, context_tokens=prompt + half, read_tokens=prompt * len(cost.groups) / rows + half)
