"""Nothing fits: which single change would make it fit. Pure.

Tried in this order, each by itself and no further than needed: settings that change no update (training's sequence
parallelism, sharded optimizer state, shorter micro-batches), then more devices, then a larger cap, then fewer prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from rollplex.config import Config
from rollplex.errors import ConfigError
from rollplex.planner.arrangements import arrangements
from rollplex.planner.search import GIB, Fitting, cap_of, degrees_of, on_devices
from rollplex.planner.workload import Arrangement, Assumptions, Workload

_DOUBLINGS = 5  # of devices, and halvings of micro-batches and prompts


def refusal(config: Config, devices: int, assumed: Assumptions) -> ConfigError:
    """What nothing fitted into, what would be needed, and which options change that."""
    cap = cap_of(config, assumed)
    least, plan, where = _least(config, devices, assumed)
    found = [
        f"--gpus {devices} --hardware {assumed.hardware.name}: nothing fits under {cap / GIB:.2f} GiB a device; the "
        f"least that any arrangement needs is {least / GIB:.2f} GiB ({where} under {plan.schedule}, training at "
        f"{plan.train}, rollout at {plan.rollout})"
    ]
    shorter = _halved(config, "train", "micro_batch_tokens", devices, assumed)
    fewer = _halved(config, "rollout", "prompts_per_step", devices, assumed)
    changes = [
        *_settings(config, devices, assumed),
        *(f"train.micro_batch_tokens={tokens} (of {before})" for tokens, before in shorter),
        *_larger(config, devices, assumed, least),
        *(f"rollout.prompts_per_step={prompts} (of {before}; another update)" for prompts, before in fewer),
    ]
    found.append(f"the smallest change that would fit: {changes[0]}")
    found += [f"or: {change}" for change in changes[1:]]
    return ConfigError("\n".join(found))


def _settings(config: Config, devices: int, assumed: Assumptions) -> Iterator[str]:
    """Each of two ways to share out more, or else both."""
    memory = config.memory
    off = [option for option in ("sequence_parallel", "shard_optimizer") if not getattr(memory, option)]

    def on(*options: str) -> bool:
        changed = memory.model_copy(update=dict.fromkeys(options, True))
        return _fits(config.model_copy(update={"memory": changed}), devices, assumed)

    alone = [option for option in off if on(option)]
    yield from (f"memory.{option}=on" for option in alone)
    if len(off) > 1 and not alone and on(*off):
        yield " ".join(f"memory.{option}=on" for option in off)


def _halved(config: Config, section: str, option: str, devices: int, assumed: Assumptions) -> Iterator[tuple[int, int]]:
    """The largest half, quarter, ... of an option that fits, and what it was; nothing where none does."""
    before: int = getattr(getattr(config, section), option)
    for less in (before >> n for n in range(1, _DOUBLINGS + 1)):
        changed = getattr(config, section).model_copy(update={option: less})
        if less and _fits(config.model_copy(update={section: changed}), devices, assumed):
            yield less, before
            return


def _larger(config: Config, devices: int, assumed: Assumptions, least: int) -> Iterator[str]:
    for more in (devices << n for n in range(1, _DOUBLINGS + 1)):
        if _fits(config, more, assumed):
            yield f"--gpus {more}"
            break
    cap_gib = ceil(100 * least / GIB) / 100
    if cap_gib <= assumed.hardware.memory_bytes / 1e9:
        yield f"memory.cap_gib={cap_gib:.2f}"
    else:
        yield f"a --hardware with {cap_gib:.2f} GiB a device, and memory.cap_gib at that or left out"


def _plans(config: Config, devices: int, assumed: Assumptions) -> tuple[Workload, list[Arrangement]]:
    workload = Workload(on_devices(config, devices), assumed)
    shape = workload.shape
    found = arrangements(degrees_of(workload), shape.prompts, devices)
    return workload, found.plans


def _fits(config: Config, devices: int, assumed: Assumptions) -> bool:
    workload, plans = _plans(config, devices, assumed)
    fitting = Fitting(workload, cap_of(config, assumed))
    return any(fitting.of(plan) is not None for plan in _one_of_each_need(plans))


def _least(config: Config, devices: int, assumed: Assumptions) -> tuple[int, Arrangement, str]:
    """The smallest cap that any arrangement works under, that arrangement, and which of its devices needs it."""
    workload, plans = _plans(config, devices, assumed)
    fitting, best = Fitting(workload, 0), None
    for plan in _one_of_each_need(plans):
        each = fitting.needs(plan)
        if best is not None and max(need.least_bytes for need in each) >= best[0]:
            continue
        size, where = max((need.smallest_cap, need.where) for need in each)
        if best is None or size < best[0]:
            best = (size, plan, where)
    assert best is not None  # there are arrangements, or the search had said so
    return best


def _one_of_each_need(plans: list[Arrangement]) -> list[Arrangement]:
    """`async` and `disaggregated` hold the same; `stream` and `rollplex` never hold less than `serial` does."""
    return [plan for plan in plans if plan.schedule in ("serial", "disaggregated")]
