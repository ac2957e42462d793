"""What passes beside decoding gain, against a bound from phase times: the CPU analogue of an under-used device.

usage: python benchmarks/overlap.py [--settings S1 S3 S4 S4-tail] [--betas 0 0.04] [--auto]

Decoding may use one core, every other phase two, in all arms. The arms are trainers in this process on the same model
folder, rows and seeds; they take turns step by step. From the serial arm's spans comes the bound: passes that could
start before the last response ends, at the speed of one core, as much of them as the idle core can do while groups
decode. S4-tail: every tenth response is 8 times as long as the others. What there is to hide differs from step to step
there, so savings and bounds are compared step by step; a step's noise is as large as a bound, so each share of one has
an interval. `without_alike` is an estimate with less noise: it leaves out by how much passes differed that both arms
took with the device to themselves, as if hiding changed nothing in them, so it is too high where hiding makes them
slower. That difference stands beside it (`alike_of_bound`, positive: faster). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollplex.config import Config
from rollplex.rollout.engine import SamplingParams
from rollplex.rollout.engines import LocalEngines
from rollplex.rollout.local_engine import LocalEngine, PrefixSource
from rollplex.runtime.trainer import Trainer
from rollplex.trace import Span
from vs_trl_arms.settings import REWARD, SETTINGS, Setting
from vs_trl_arms.summary import block_order, provenance, write_result
from vs_trl_arms.workload import counting_task, save_model, save_rows

RESULTS = Path(__file__).resolve().parent / "results"
TAIL_SHARE, TAIL_FACTOR = 0.1, 8
UNIT_TOKENS = 256  # a prompt each at every setting: what is hidden can then be cut finely
TWO_CORES = {"unit_tokens": UNIT_TOKENS, "decode_threads": 1}  # the window gets the other
AGAIN = "serial again"
COMPARED = ("rollplex", "stream", AGAIN)  # with serial
FEW_STEPS = 4  # of all other arms: they are compared with serial, or tell how much longer a pass takes on one core
SHARE = ("share", "low", "high")
RESAMPLES, INTERVAL = 10_000, (5, 95)  # of the bootstrap, percent
STREAMED = ("ref_response", "actor_response", "prefix_backward")
PREFIXES = ("ref_prefix", "actor_prefix")

ARMS: dict[str, dict[str, dict[str, Any]]] = {
    # share off: today's whole sequences, and prompts once per response in passes that can move; share on: the product
    "whole": {"schedule": {"name": "serial", "overlap": "off"}, "train": {"share_prefix": False}},
    "unshared": {
        "schedule": {"name": "serial", "overlap": "off"},
        "train": {"share_prefix": False, "unshared_prefix": "per_response"},
    },
    "unshared, hoisted": {
        "schedule": {"name": "rollplex", "overlap": "on"},
        "train": {"share_prefix": False, "unshared_prefix": "per_response"},
    },
    "serial": {"schedule": {"name": "serial", "overlap": "off"}},
    "rollplex": {"schedule": {"name": "rollplex", "overlap": "on"}},
    "stream": {"schedule": {"name": "stream", "overlap": "on"}},
}
ARMS[AGAIN] = ARMS["serial"]  # hides nothing: its share of the bound is what the machine makes of none
AUTO_ARMS: dict[str, dict[str, dict[str, Any]]] = {
    "off": {"schedule": {"name": "rollplex", "overlap": "off"}},
    "auto": {"schedule": {"name": "rollplex", "overlap": "auto"}},
}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", nargs="+", default=["S1", "S3", "S4", "S4-tail"])
    parser.add_argument("--betas", nargs="+", type=float, default=[0.0, 0.04])
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each arm (default 20)")
    parser.add_argument("--warmup", type=int, default=1, help="unmeasured steps of each arm (default 1)")
    parser.add_argument("--arms", nargs="+", default=[arm for arm in ARMS if arm != AGAIN], choices=list(ARMS))
    parser.add_argument("--auto", action="store_true", help="compare overlap off and auto instead, all cores for all")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    return parser.parse_args()


def setting_named(name: str) -> tuple[Setting, bool]:
    """A setting, and whether its lengths have a long tail."""
    base, _, tail = name.partition("-")
    if base not in SETTINGS or tail not in ("", "tail"):
        raise SystemExit(f"setting {name!r} is unknown; needed one of {', '.join(SETTINGS)}, each also as NAME-tail")
    return SETTINGS[base], bool(tail)


class TailedEngine(LocalEngine):
    """The local engine with fixed lengths: every response short but for a seeded tenth."""

    def limit(self, rollout_id: int, index: int) -> int:
        """`max_tokens` for the tail, an eighth of it for the rest."""
        is_long = random.Random(rollout_id * 1000 + index).random() < TAIL_SHARE
        return self.params.max_tokens if is_long else self.params.max_tokens // TAIL_FACTOR


class TailedEngines(LocalEngines):
    """Opens those."""

    def open(self, params: SamplingParams, prefix_source: PrefixSource | None = None) -> TailedEngine:
        """As LocalEngines."""
        return TailedEngine(self.policy, params, max_rows=self.max_rows, prefix_source=prefix_source)


@dataclass(frozen=True, slots=True)
class Step:
    """One measured step."""

    seconds: float
    decode_s: float
    exposed_prefix_s: float  # prefix passes with the device to themselves, and waits for those beside decoding
    spans: tuple[Span, ...]


class Arm:
    """A trainer and its measured steps."""

    def __init__(self, name: str, config: Config, *, tailed: bool):
        self.name, self.trainer = name, Trainer(config)
        learner = self.trainer.learner
        if tailed:
            learner.engines = TailedEngines(learner.policy, self.trainer.config.rollout.max_decode_rows)
        self.steps: list[Step] = []

    def step(self, *, measured: bool) -> None:
        """Run one step."""
        begin_s = time.monotonic()
        report, outcome = self.trainer.run_step()
        seconds = time.monotonic() - begin_s
        if measured:
            times = {k.removeprefix("timing_s/"): v for k, v in report.metrics.items() if k.startswith("timing_s/")}
            exposed_s = sum(times.get(name, 0.0) for name in (*PREFIXES, "window"))
            self.steps.append(Step(seconds, times["decode"], exposed_s, outcome.spans))

    @property
    def seconds(self) -> float:
        """Median step time."""
        return median(step.seconds for step in self.steps)


def on_two_cores(arm: str) -> dict[str, dict[str, Any]]:
    """The options of an arm where decoding has one of two cores."""
    options = ARMS[arm]
    return {**options, "schedule": {**TWO_CORES, **options["schedule"]}}


def config_of(folder: Path, setting: Setting, beta: float, arm: Mapping[str, Any], threads: int) -> Config:
    """One arm's configuration."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"output_dir": "run", "num_threads": threads, "log_completions_steps": 0},
        "model": {"path": str(folder / "model")},
        "data": {"task": "files", "path": str(folder / "rows"), "shuffle": False},
        "rewards": {"reward_funcs": [REWARD]},
        "rollout": {
            "prompts_per_step": setting.prompts,
            "num_generations": setting.responses,
            "max_completion_length": setting.tokens,
        },
        "algorithm": {"beta": beta},
        "train": {"learning_rate": 1e-6, "max_steps": 100_000},
    }
    for section, options in arm.items():
        tree[section] = {**tree.get(section, {}), **options}
    return Config.model_validate(tree)


def take_turns(arms: Sequence[Arm], warmup: int, steps: int) -> None:
    """All arms step by step, in alternating order."""
    by_name = {arm.name: arm for arm in arms}
    for number, name in enumerate(block_order(list(by_name), warmup + steps)):
        by_name[name].step(measured=number >= warmup * len(arms))


def phase_seconds(steps: Sequence[Step]) -> dict[str, float]:
    """Median seconds of each phase that had the device to itself, all units together."""
    names = {span.name for step in steps for span in step.spans if span.lane == "main"}
    return {
        str(name): median(sum(s.seconds for s in step.spans if s.name == name and s.lane == "main") for step in steps)
        for name in names
    }


def slowness(arm: Arm, one_core: Arm) -> dict[str, float]:
    """How much longer each phase takes on one core than on two, over the steps that both took."""
    one = phase_seconds(one_core.steps)
    two = phase_seconds(arm.steps[: len(one_core.steps)])
    return {name: one[name] / two[name] for name in two if name in one and two[name] > 0}


def bounds(serial: Arm, slow: Mapping[str, float], *, streaming: bool) -> NDArray[np.float64]:
    """Most seconds of each step that hiding can save: what one otherwise idle core does, work never waiting, until the
    last response ends. Prefixes can start with decoding, passes of a unit's responses when the unit is complete."""
    return np.array([_bound_of(step, slow, streaming=streaming) for step in serial.steps])


def share_of_bound(saved_s: NDArray[np.float64], bounds_s: NDArray[np.float64]) -> tuple[float, float, float]:
    """1 + `part_of_bound` of saving - bound: step by step, since what there is to hide differs."""
    share, low, high = part_of_bound(saved_s - bounds_s, bounds_s)
    return 1 + share, 1 + low, 1 + high


def part_of_bound(seconds: NDArray[np.float64], bounds_s: NDArray[np.float64]) -> tuple[float, float, float]:
    """median(seconds) / median(bound), and its 90 % interval by resampling steps (not the few that tell how much longer
    passes take on one core)."""

    def part(seconds: NDArray[np.float64], bounds_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Over the last axis."""
        found: NDArray[np.float64] = np.median(seconds, axis=-1) / np.median(bounds_s, axis=-1)
        return found

    drawn = np.random.default_rng(0).integers(len(seconds), size=(RESAMPLES, len(seconds)))
    low, high = np.percentile(part(seconds[drawn], bounds_s[drawn]), INTERVAL)
    return float(part(seconds, bounds_s)), float(low), float(high)


def alike(serial: Arm, hiding: Arm) -> NDArray[np.float64]:
    """Seconds by which `serial` was slower, step by step, in what both arms did with the device to themselves."""
    found = []
    for one, other in zip(serial.steps, hiding.steps, strict=True):
        mine, theirs = alone_seconds(one.spans), alone_seconds(other.spans)
        found.append(sum(mine[key] - theirs[key] for key in mine.keys() & theirs.keys()))
    return np.array(found)


def alone_seconds(spans: Sequence[Span]) -> dict[tuple[str, int | None], float]:
    """Seconds of each pass that had the device to itself, by phase and first prompt of its unit."""
    seconds: dict[tuple[str, int | None], float] = {}
    for span in spans:
        if span.lane == "main":
            key = (str(span.name), span.group)
            seconds[key] = seconds.get(key, 0.0) + span.seconds
    return seconds


def _bound_of(step: Step, slow: Mapping[str, float], *, streaming: bool) -> float:
    decodes = [span for span in step.spans if span.name == "decode"]
    begin_s = min(span.start_s for span in decodes)
    window_s = max(span.end_s for span in decodes) - begin_s
    main = [span for span in step.spans if span.lane == "main"]
    # A unit is filed under its first prompt; at UNIT_TOKENS each prompt is a unit of its own.
    complete_s = {span.group: span.end_s - begin_s for span in decodes}
    jobs = [(0.0, span.seconds, slow[span.name]) for span in main if span.name in PREFIXES]
    if streaming:
        jobs += [(complete_s[span.group], span.seconds, slow[span.name]) for span in main if span.name in STREAMED]
    now_s = saved_s = 0.0
    for release_s, seconds, factor in sorted(jobs):
        now_s = max(now_s, release_s)
        share = min(1.0, max(0.0, window_s - now_s) / (seconds * factor))
        saved_s += share * seconds
        now_s += share * seconds * factor
    return saved_s


def measure(folder: Path, name: str, beta: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """All arms at one setting."""
    setting, tailed = setting_named(name)
    arms = [Arm(arm, config_of(folder, setting, beta, on_two_cores(arm), 2), tailed=tailed) for arm in arguments.arms]
    one_core = Arm("one core", config_of(folder, setting, beta, on_two_cores("serial"), 1), tailed=tailed)
    torch.set_num_threads(2)
    try:
        few = min(arguments.steps, FEW_STEPS)
        take_turns([*arms, one_core], arguments.warmup, few)
        take_turns([arm for arm in arms if arm.name in ("serial", *COMPARED)], 0, arguments.steps - few)
        by_name = {arm.name: arm for arm in arms}
        return _row(name, beta, by_name, one_core)
    finally:
        for arm in [*arms, one_core]:
            arm.trainer.close()


def _row(name: str, beta: float, arms: Mapping[str, Arm], one_core: Arm) -> dict[str, Any]:
    serial = arms["serial"]
    slow, few = slowness(serial, one_core), len(one_core.steps)
    row: dict[str, Any] = {
        "setting": name,
        "beta": beta,
        "step_s": {
            arm: median(step.seconds for step in arms[arm].steps[:few]) for arm in arms
        },  # the same steps of all
        "serial_phases_s": phase_seconds(serial.steps) | {"decode": median(step.decode_s for step in serial.steps)},
        "one_core_over_two": slow,
    }
    for arm in COMPARED:
        if arm not in arms:
            continue
        limits_s = bounds(serial, slow, streaming=arm == "stream")
        row[arm] = _compared(serial, arms[arm], limits_s)
    return row


def _compared(serial: Arm, hiding: Arm, limits_s: NDArray[np.float64]) -> dict[str, Any]:
    """What an arm saved, step by step, beside what it could have."""
    saved_s = np.array([a.seconds - b.seconds for a, b in zip(serial.steps, hiding.steps, strict=True)])
    alike_s = alike(serial, hiding)
    shares: dict[str, Any] = dict.fromkeys(("achieved_of_bound", "without_alike", "alike_of_bound"))
    if np.median(limits_s) > 0.01 * serial.seconds:  # else nothing to hide
        found = (
            share_of_bound(saved_s, limits_s),
            share_of_bound(saved_s - alike_s, limits_s),
            part_of_bound(alike_s, limits_s),
        )
        shares = {name: dict(zip(SHARE, values, strict=True)) for name, values in zip(shares, found, strict=True)}
    return {
        "bound_s": float(np.median(limits_s)),
        "achieved_s": float(np.median(saved_s)),
        **shares,
        "saved_s": saved_s.tolist(),
        "bounds_s": limits_s.tolist(),
        "alike_s": alike_s.tolist(),
        "decode_slowdown": median(b.decode_s / a.decode_s for a, b in zip(serial.steps, hiding.steps, strict=True)),
        "exposed_prefix_share": median(s.exposed_prefix_s / s.seconds for s in hiding.steps),
    }


def measure_auto(folder: Path, name: str, beta: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """overlap auto against off with all cores for everything: what a user gets who sets nothing."""
    setting, tailed = setting_named(name)
    arms = [Arm(arm, config_of(folder, setting, beta, options, 2), tailed=tailed) for arm, options in AUTO_ARMS.items()]
    try:
        take_turns(arms, arguments.warmup, arguments.steps)
        off, auto = arms
        paired = median(b.seconds / a.seconds for a, b in zip(off.steps, auto.steps, strict=True))
        return {
            "setting": name,
            "beta": beta,
            "step_s": {arm.name: arm.seconds for arm in arms},
            "auto_over_off": paired,
            "open": auto.trainer.learner.overlap.chosen,
            "decode_slowdown": auto.trainer.learner.overlap.decode_slowdown(),
        }
    finally:
        for arm in arms:
            arm.trainer.close()


def main() -> None:
    """Measure, print a line per setting, write the result."""
    arguments = parse_arguments()
    torch.set_num_threads(2)
    rows = []
    for name in arguments.settings:
        setting, _ = setting_named(name)
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            save_model(setting, folder / "model")
            save_rows(counting_task(setting), folder / "rows")
            for beta in arguments.betas:
                work = measure_auto if arguments.auto else measure
                rows.append(work(folder, name, beta, arguments))
                print(json.dumps(rows[-1]), flush=True)
    kind = "overlap_auto" if arguments.auto else "overlap"
    settings = {name: asdict(setting_named(name)[0]) for name in arguments.settings}
    versions = {package: version(package) for package in ("rollplex", "torch", "transformers")}
    result = {**provenance(), "versions": versions, "benchmark": kind, "settings": settings, "rows": rows}
    write_result(kind, result, 2, arguments.results)
    print(json.dumps({"benchmark": kind, "rows": rows}))


if __name__ == "__main__":
    main()
