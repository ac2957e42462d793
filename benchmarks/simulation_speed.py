"""CPU seconds of simulated runs: 32 devices for 1,000 steps, 16,384 devices for 10.

`python benchmarks/simulation_speed.py [SCHEDULE,DEVICES,STEPS ...]` prints one JSON object a line. Times of passes are
fixed: what is measured is schedules, states, engines and the clock. docs/simulation.md has figures.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from typing import Any

from rollplex.planner.engine import StepTable
from rollplex.planner.lengths import LogNormal
from rollplex.planner.load import Prompt
from rollplex.planner.simulate import Feed, Layout, simulate
from rollplex.schedule.pools import RolloutPipe
from rollplex.schedule.registry import POOL_SCHEDULES, schedule_named
from rollplex.schedule.spec import Phase, StepSpec

RUNS = [
    *((name, 32, 1000) for name in ("serial", "rollplex", "stream")),
    *((name, 16384, 10) for name in ("rollplex", "disaggregated")),
]
SECONDS = {
    Phase.PREFILL: 0.3,
    Phase.REWARD: 0.01,
    Phase.REF_PREFIX: 0.5,
    Phase.ACTOR_PREFIX: 0.5,
    Phase.REF_RESPONSE: 0.1,
    Phase.ACTOR_RESPONSE: 0.4,
    Phase.PREFIX_BACKWARD: 1.5,
    Phase.OPTIMIZER: 1.0,
    Phase.PUBLISH: 0.2,
}
REPLICA = 8  # devices, with eight groups of eight responses each
FEED = Feed([Prompt(1000), Prompt(4000)], 8, LogNormal(300, 0.7, 2048))


def decode_table() -> StepTable:
    """10 ms a decode step, and a little for each row and each token in its cache."""
    return StepTable(lambda rows: 0.01 + 1e-5 * rows.rows + 1e-9 * rows.cached_tokens, context_tokens=2000)


def measure(name: str, devices: int, steps: int) -> dict[str, Any]:
    """One run, without spans: its CPU seconds, in all and by event."""
    blocks = devices // REPLICA
    schedule, spec = schedule_named(name), StepSpec(num_groups=REPLICA, reference=True)
    layout = Layout(engines=2, blocks=blocks, contention=1.2)
    if name in POOL_SCHEDULES:
        spec = StepSpec(num_groups=REPLICA * blocks, reference=True)
        layout = Layout(engines=blocks, trainers=max(1, blocks // 2), places=64)
    if name == "rolloutpipe":
        schedule = RolloutPipe(unit=2, floor=REPLICA * blocks)
    start = time.process_time()
    found = simulate(
        schedule,
        spec,
        FEED,
        layout,
        seconds=lambda phase, load: SECONDS[phase],
        table=decode_table(),
        steps=steps,
        traced=(),
    )
    cpu_s = time.process_time() - start
    return {
        "source": "measured",
        "schedule": name,
        "devices": devices,
        "steps": steps,
        "cpu_s": round(cpu_s, 2),
        "events": found.events,
        "us_per_event": round(cpu_s / found.events * 1e6, 1),
        "python": platform.python_version(),
    }


def main() -> None:
    """Every run named on the command line, or RUNS."""
    asked = [(name, int(devices), int(steps)) for name, devices, steps in (arg.split(",") for arg in sys.argv[1:])]
    for run in asked or RUNS:
        print(json.dumps(measure(*run)), flush=True)


if __name__ == "__main__":
    main()
