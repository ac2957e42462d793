"""What each schedule takes on 32 to 16,384 GPUs, in virtual time: seconds, their causes, what is hidden.

usage: python benchmarks/scale_study.py [CASE ...]      simulates the cases (all) and writes results/scale_study.json
       python benchmarks/scale_study.py --tables        prints the tables of docs/scale-study.md from that file

One model, one kind of device, the same degrees for all schedules: what differs is the schedule. Pools are split where
that schedule is fastest, looked for up to 512 GPUs and kept beyond; under `hybrid` half of the devices have the
reference. Everything is "simulated".
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollplex.config import Config
from rollplex.errors import ConfigError
from rollplex.planner.breakdown import Breakdown, breakdown
from rollplex.planner.fit import Fit
from rollplex.planner.hardware import hardware
from rollplex.planner.parallel import Parallel
from rollplex.planner.search import GIB, Fitting, cap_of, on_devices, step_seconds
from rollplex.planner.workload import COLOCATED, HYBRID, POOLS, SIMULATED, Arrangement, Assumptions, Workload
from rollplex.recipes.load import load_config
from rollplex.recipes.packaged import packaged_recipe

FILE = Path(__file__).resolve().parent / "results" / "scale_study.json"
GPUS = (32, 128, 512, 2048, 16384)
ROLLOUT_TP = 4
# Training's degrees, tensor x context: the first under which a case fits.
TRAIN = ((8, 1), (8, 2), (8, 4))
SPLITS = (2, 4, 6)  # eighths of the devices that sample: whole replicas of 8 on 32 devices
# Nothing apart, or half of the devices for the reference: beside fewer, blocks do not divide the prompts.
FIXED: dict[str, Sequence[int | None]] = {**dict.fromkeys(COLOCATED, (None,)), HYBRID: (4,)}
SCHEDULES = SIMULATED
MOST_SEARCHED = 512  # GPUs up to which the split is looked for


@dataclass(frozen=True, slots=True)
class Case:
    """What is trained on: prompts of `prompt_tokens`, all video, and responses log-normal around `response_tokens`.

    prompts: of a step; None: as many as GPUs.
    """

    prompt_tokens: int
    response_tokens: int
    longest: int
    prompts: int | None = None

    def config(self, gpus: int) -> Config:
        """The Rollplex paper's recipe with these sizes."""
        return load_config(
            packaged_recipe("rollplex_32b"),
            [
                f"data.max_prompt_tokens={self.prompt_tokens}",
                f"rollout.max_completion_length={self.longest}",
                f"rollout.prompts_per_step={self.prompts or gpus}",
                "memory.sequence_parallel=on",
                "memory.shard_optimizer=on",
            ],
        )

    def workload(self, gpus: int) -> Workload:
        """On that many H800."""
        assumed = Assumptions(hardware("h800"), response_tokens=self.response_tokens, spread=0.7)
        return Workload(on_devices(self.config(gpus), gpus), assumed)


CASES: dict[str, Case] = {
    "base": Case(4096, 256, 2048),
    "video x 10": Case(40960, 256, 2048),
    "response x 10": Case(4096, 2560, 20480),
    "fixed batch": Case(4096, 256, 2048, prompts=2048),
}


class Study:
    """One case on one number of GPUs."""

    def __init__(self, case: Case, gpus: int):
        self.gpus, self.workload = gpus, case.workload(gpus)
        self.fitting = Fitting(self.workload, cap_of(self.workload.config, self.workload.assumed))

    def plans(self, schedule: str, eighths: Sequence[int]) -> Iterator[tuple[int | None, Arrangement]]:
        """The arrangements of a schedule that divide, and the eighths apart from training (None: all devices train)."""
        for tensor, context in TRAIN:
            replica = tensor * context
            shares: Sequence[int | None] = FIXED.get(schedule, eighths)
            for share in shares:
                apart = self.gpus * (share or 0) // 8
                training = self.gpus - apart
                sampling = apart if schedule in POOLS else training
                if training % replica or sampling % ROLLOUT_TP:
                    continue
                train = Parallel(tensor, data=training // replica, context=context)
                scoring = Parallel(tensor, data=apart // tensor) if schedule == HYBRID else None
                rollout = Parallel(ROLLOUT_TP, data=sampling // ROLLOUT_TP)
                yield share, Arrangement(schedule, train, rollout, scoring)

    def fitting_plans(self, schedule: str, eighths: Sequence[int]) -> list[tuple[int | None, Arrangement]]:
        """Those that divide the prompts and fit, under the least context parallelism that any of them fits under."""
        found: list[tuple[int | None, Arrangement]] = []
        for share, plan in self.plans(schedule, eighths):
            if found and plan.train.context > found[0][1].train.context:
                break
            if self._divides(plan) and self.fitting.of(plan) is not None:
                found.append((share, plan))
        return found

    def _divides(self, plan: Arrangement) -> bool:
        prompts = self.workload.shape.prompts
        if plan.pools:
            return prompts >= max(plan.train.data, plan.rollout.data)
        return prompts % plan.train.data == 0

    def exposed_s(self, plan: Arrangement) -> float:
        """Seconds that its memory plan shows."""
        return max(fit.plan.exposed_s for fit in self._fits(plan))

    def row(self, schedule: str, plan: Arrangement, share: int | None) -> dict[str, Any]:
        """The figures of one arrangement."""
        where: Breakdown = breakdown(self.workload, plan, self.exposed_s(plan))
        return {
            "gpus": self.gpus,
            "prompts": self.workload.shape.prompts,
            "schedule": schedule,
            "train": {"tensor": plan.train.tensor, "context": plan.train.context, "data": plan.train.data},
            "rollout": {"tensor": plan.rollout.tensor, "data": plan.rollout.data},
            "sampling_eighths": share if plan.pools else None,
            "reference_eighths": None if plan.scoring is None else share,
            "seconds": where.seconds,
            "hidden_s": where.hidden_s,
            "causes": dict(where.causes),
            "phases": dict(where.phases),
            "limit": where.limit,
            "peak_gib": [fit.plan.peak_bytes / GIB for fit in self._fits(plan)],
        }

    def _fits(self, plan: Arrangement) -> tuple[Fit, ...]:
        fits = self.fitting.of(plan)
        if fits is None:
            raise ConfigError(f"{plan} does not fit")
        return fits


def simulate_case(case: Case, gpus: Sequence[int] = GPUS, schedules: Sequence[str] = SCHEDULES) -> list[dict[str, Any]]:
    """Rows of one case: by GPUs, then by schedule; those that do not fit are left out."""
    rows, best_split = list[dict[str, Any]](), dict[str, int | None]()
    for count in gpus:
        study = Study(case, count)
        for schedule in schedules:
            known = best_split.get(schedule)
            plans = study.fitting_plans(schedule, SPLITS if known is None or count <= MOST_SEARCHED else [known])
            if len(plans) > 1:
                plans = [min(plans, key=lambda item: step_seconds(study.workload, item[1]) + study.exposed_s(item[1]))]
            for share, plan in plans:
                best_split[schedule] = share
                rows.append(study.row(schedule, plan, share))
    return rows


def by_gpus(rows: Sequence[dict[str, Any]]) -> dict[int, dict[str, dict[str, Any]]]:
    """Rows by number of GPUs and schedule."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["gpus"], {})[row["schedule"]] = row
    return found


def seconds_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Seconds of a step of each schedule, and of `stream` over `serial`, in Markdown."""
    lines = [
        "| GPUs | prompts | " + " | ".join(SCHEDULES) + " | stream over serial |",
        "|---" * (len(SCHEDULES) + 3) + "|",
    ]
    for gpus, row in by_gpus(rows).items():
        cells = [f"{row[name]['seconds']:.1f}" if name in row else "does not fit" for name in SCHEDULES]
        gain = (
            f"{row['serial']['seconds'] / row['stream']['seconds']:.2f}" if {"serial", "stream"} <= row.keys() else "-"
        )
        prompts = next(iter(row.values()))["prompts"]
        lines.append(f"| {gpus:,} | {prompts:,} | " + " | ".join(cells) + f" | {gain} |")
    return lines


def causes_table(rows: Sequence[dict[str, Any]], schedules: Sequence[str]) -> list[str]:
    """Seconds by cause of some schedules on EXPLAINED_GPUS, in Markdown."""
    causes = list(dict.fromkeys(cause for row in rows for cause in row["causes"]))
    lines = ["| GPUs | schedule | s/step | hidden | " + " | ".join(causes) + " |", "|---" * (len(causes) + 4) + "|"]
    for gpus, row in by_gpus([row for row in rows if row["gpus"] in EXPLAINED_GPUS]).items():
        for name in (name for name in schedules if name in row):
            cells = [f"{row[name]['causes'].get(cause, 0.0):.1f}" for cause in causes]
            head = f"| {gpus:,} | {name} | {row[name]['seconds']:.1f} | {row[name]['hidden_s']:.1f} | "
            lines.append(head + " | ".join(cells) + " |")
    return lines


EXPLAINED, EXPLAINED_GPUS = ("serial", "rollplex", "stream", "rolloutpipe"), (32, 512, 16384)


def tables(facts: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Every table of docs/scale-study.md, under its name."""
    for name, rows in facts["cases"].items():
        yield f"{name}: seconds", seconds_table(rows)
        yield f"{name}: causes", causes_table(rows, EXPLAINED)


def main() -> None:
    """Simulate the cases that were asked for, or print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], help="cases to simulate anew (default: all)")
    parser.add_argument("--tables", action="store_true", help="print the tables of what the file holds")
    arguments = parser.parse_args()
    facts: dict[str, Any] = {"source": "simulated", "cases": {}}
    if FILE.is_file():
        facts = json.loads(FILE.read_text(encoding="utf-8"))
    if arguments.tables:
        for name, lines in tables(facts):
            print(f"\n{name}", *lines, sep="\n")
        return
    for name in arguments.cases or CASES:
        start_s = time.process_time()
        facts["cases"][name] = simulate_case(CASES[name])
        FILE.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        print(json.dumps({"case": name, "cpu_s": round(time.process_time() - start_s, 1)}), flush=True)


if __name__ == "__main__":
    main()
