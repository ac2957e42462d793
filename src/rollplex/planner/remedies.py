"""Nothing fits: which single change would make it fit. Pure.

Tried in this order, each by itself and no further than needed: settings that change no update (training's sequence
parallelism, sharded optimizer state, shorter micro-batches), then more devices (beyond one node whole nodes), then a
larger cap, then fewer prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil

from rollplex.config import Config
from rollplex.errors import ConfigError
from rollplex.planner.search import GIB, Fitting, cap_of, on_devices, to_consider
from rollplex.planner.workload import HYBRID, Arrangement, Assumptions, Workload

_DOUBLINGS = 5  # of devices
_BETWEEN = 8  # numbers of devices that are tried between one and its double


def refusal(config: Config, devices: int, assumed: Assumptions) -> ConfigError:
    """What nothing fitted into, what would be needed, and which options change that."""
    cap = cap_of(config, assumed)
    least, plan, where = _least(config, devices, assumed)
    found = [
        f"--gpus {devices} --hardware {assumed.hardware.name}: nothing fits under {cap / GIB:.2f} GiB a device; the "
        f"least that any arrangement needs is {least / GIB:.2f} GiB ({where} under {plan.schedule}, training at "
        f"{plan.train}, rollout at {plan.rollout})"
    ]
    tokens, prompts = config.train.micro_batch_tokens, config.rollout.prompts_per_step

    def shorter(micro_batch: int) -> bool:
        train = config.train.model_copy(update={"micro_batch_tokens": micro_batch})
        return _fits(config.model_copy(update={"train": train}), devices, assumed)

    def fewer(count: int) -> bool:
        rollout = config.rollout.model_copy(update={"prompts_per_step": count})
        return _fits(config.model_copy(update={"rollout": rollout}), devices, assumed)

    changes = [
        *_settings(config, devices, assumed),
        *(f"train.micro_batch_tokens={less} (of {tokens})" for less in _most(range(1, tokens), shorter)),
        *_larger(config, devices, assumed, least),
        *(f"rollout.prompts_per_step={n} (of {prompts}; another update)" for n in _most(range(1, prompts), fewer)),
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


def _most(rising: Sequence[int], fits: Callable[[int], bool]) -> Iterator[int]:
    """The largest that fits, of values of which more needs more; nothing where none does.

    From the top in halves, since what is small may not divide; then between the first that fits and the last that does
    not.
    """
    place = len(rising)
    while place:
        above, place = place, place // 2
        if fits(rising[place]):
            while above - place > 1:
                middle = (place + above) // 2
                place, above = (middle, above) if fits(rising[middle]) else (place, middle)
            yield rising[place]
            return


def _larger(config: Config, devices: int, assumed: Assumptions, least: int) -> Iterator[str]:
    for less in (devices << n for n in range(_DOUBLINGS)):
        if _fits(config, 2 * less, assumed):
            between = _between(less, 2 * less, assumed.hardware.devices_per_node)
            yield f"--gpus {next((n for n in between if _fits(config, n, assumed)), 2 * less)}"
            break
    cap_gib = ceil(100 * least / GIB) / 100
    if cap_gib <= assumed.hardware.memory_bytes / 1e9:
        yield f"memory.cap_gib={cap_gib:.2f}"
    else:
        yield f"a --hardware with {cap_gib:.2f} GiB a device, and memory.cap_gib at that or left out"


def _between(few: int, many: int, node: int) -> list[int]:
    """Numbers of devices between two, rising: each within a node, beyond it whole nodes, a handful of them."""
    every = [n for n in range(few + 1, many) if n <= node or n % node == 0]
    return every[:: ceil(len(every) / _BETWEEN) or 1]


def _plans(config: Config, devices: int, assumed: Assumptions) -> tuple[Workload, list[Arrangement]]:
    workload = Workload(on_devices(config, devices), assumed)
    return workload, to_consider(workload, devices).plans


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
    """`async` and `disaggregated` hold the same, `rolloutpipe` not less; `stream` and `rollplex` never hold less than
    `serial` does. `hybrid`, which may need less on every device, comes last: there are most of it."""
    kinds = ("serial", "disaggregated", HYBRID)
    return sorted((plan for plan in plans if plan.schedule in kinds), key=lambda plan: kinds.index(plan.schedule))
