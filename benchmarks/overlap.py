"""What passes beside decoding gain, against a bound from phase times: the CPU analogue of an under-used device.

usage: python benchmarks/overlap.py [--settings S1 S3 S4 S4-tail] [--betas 0 0.04] [--trainers 3] [--auto]

Decoding may use one core, every other phase two, in all arms. The arms are learners on one trainer's weights, optimizer
and reference, which take turns on the same prompts and seeds: two trainers of one kind differ in decoding by a few
percent for as long as they live, one trainer under two schedules does not. Each begins its steps without features of
the prompts' pictures, and all prompts are prepared beforehand. After `--steps` the whole trainer is made anew.

From the serial arm's spans comes the bound: passes that could start before the last response ends, at the speed of one
core, as much of them as the idle core can do while groups decode. S4-tail: every tenth response is 8 times as long as
the others. What there is to hide differs from step to step there, so savings and bounds are compared step by step; a
step's noise is as large as a bound, so each share of one has an interval. `without_alike` is an estimate with less
noise: it leaves out by how much passes differed that both arms took with the device to themselves, and engine
iterations that had nothing beside them in either, as if hiding changed nothing in them, so it is too high where hiding
makes them slower. That difference stands beside it (`alike_of_bound`, positive: faster). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from overlap_shares import (
    PREFIXES,
    Step,
    alike,
    bounds,
    part_of_bound,
    phase_seconds,
    share_of_bound,
    slowdown_by_pass,
    slowness,
)
from rollplex.config import Config
from rollplex.models.policy import Policy
from rollplex.rollout.engine import Finished, SamplingParams
from rollplex.rollout.engines import LocalEngines
from rollplex.rollout.local_engine import LocalEngine, PrefixSource
from rollplex.runtime.collect import Slot
from rollplex.runtime.learner import Learner
from rollplex.runtime.trainer import Trainer
from rollplex.tasks.rewards import TrainerState
from vs_trl_arms.settings import REWARD, SETTINGS, Setting
from vs_trl_arms.summary import provenance, write_result
from vs_trl_arms.workload import counting_task, save_model, save_rows

RESULTS = Path(__file__).resolve().parent / "results"
TAIL_SHARE, TAIL_FACTOR = 0.1, 8
# Passes of several prompts, as recipes/easy_vqa.yaml has them; where groups end one by one, of one prompt each, so that
# stream can take them as they end.
UNIT_TOKENS, ONE_PROMPT_TOKENS = 4096, 256
AGAIN = "serial again"
ONE_CORE = "one core"  # serial, passes on one core too
COMPARED = ("rollplex", "stream", AGAIN)  # with serial
FEW_STEPS = 2  # of all other arms on each trainer: they need no interval, or tell how slow one core is
SHARE = ("share", "low", "high")

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
    parser.add_argument("--trainers", type=int, default=3, help="trainers, one after another (default 3)")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each arm on each (default 10)")
    parser.add_argument("--warmup", type=int, default=1, help="unmeasured steps of each arm on each (default 1)")
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


class TimedEngine(LocalEngine):
    """The local engine that notes when its iterations began and ended. tailed: every response is short but for a seeded
    tenth."""

    iterations: list[tuple[float, float]]  # seconds since 1970, as spans have
    tailed: bool

    def step(self) -> list[Finished]:
        """As LocalEngine."""
        begin_s = time.time()
        finished = super().step()
        self.iterations.append((begin_s, time.time()))
        return finished

    def limit(self, rollout_id: int, index: int) -> int:
        """`max_tokens` for the tail, an eighth of it for the rest."""
        if not self.tailed:
            return super().limit(rollout_id, index)
        is_long = random.Random(rollout_id * 1000 + index).random() < TAIL_SHARE
        return self.params.max_tokens if is_long else self.params.max_tokens // TAIL_FACTOR


class TimedEngines(LocalEngines):
    """Opens those, and has the iterations of all since `taken`."""

    def __init__(self, policy: Policy, max_rows: int, *, tailed: bool):
        super().__init__(policy, max_rows)
        self.tailed = tailed
        self._iterations: list[tuple[float, float]] = []

    def open(self, params: SamplingParams, prefix_source: PrefixSource | None = None) -> TimedEngine:
        """As LocalEngines."""
        engine = TimedEngine(self.policy, params, max_rows=self.max_rows, prefix_source=prefix_source)
        engine.iterations, engine.tailed = self._iterations, self.tailed
        return engine

    def taken(self) -> tuple[tuple[float, float], ...]:
        """The iterations so far; then none."""
        taken = tuple(self._iterations)
        self._iterations.clear()
        return taken


class Arm:
    """One way to run steps, and its measured steps by round: those of one round had the same prompts in all arms."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.steps: dict[int, Step] = {}

    def step(
        self, learner: Learner, engines: TimedEngines, slots: Sequence[Slot], state: TrainerState, number: int | None
    ) -> None:
        """Run one step of round `number`; None: not measured. engines: the learner's."""
        begin_s = time.monotonic()
        outcome = learner.step(lambda count: list(slots), state)
        seconds = time.monotonic() - begin_s
        iterations = engines.taken()
        if number is not None:
            prefix = "timing_s/"
            times = {k.removeprefix(prefix): v for k, v in outcome.metrics.items() if k.startswith(prefix)}
            exposed_s = sum(times.get(name, 0.0) for name in (*PREFIXES, "window"))
            self.steps[number] = Step(seconds, times["decode"], exposed_s, outcome.spans, iterations)

    @property
    def measured(self) -> list[Step]:
        """In the order of their rounds."""
        return [self.steps[number] for number in sorted(self.steps)]


def paired(one: Arm, other: Arm) -> list[tuple[Step, Step]]:
    """Steps of the rounds that both took."""
    return [(one.steps[number], other.steps[number]) for number in sorted(one.steps.keys() & other.steps.keys())]


def on_two_cores(arm: str, unit_tokens: int) -> dict[str, dict[str, Any]]:
    """The options of an arm where decoding has one of two cores, and the window the other."""
    options = ARMS[arm]
    return {**options, "schedule": {"decode_threads": 1, "unit_tokens": unit_tokens, **options["schedule"]}}


def config_of(folder: Path, setting: Setting, beta: float, arm: Mapping[str, Any]) -> Config:
    """One arm's configuration."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"output_dir": "run", "num_threads": 2, "log_completions_steps": 0},
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


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """`names` in the order of round `number`: over 2 x len(names) rounds every arm is equally often in each place, and
    of up to three also behind each other one."""
    start = number // 2 % len(names)
    order = [*names[start:], *names[:start]]
    return order[::-1] if number % 2 else order


class Arms:
    """Learners of several arms on one trainer, each arm once per round."""

    def __init__(self, names: Mapping[str, Config], *, tailed: bool, rounds: int, one_core: str | None = None):
        """rounds: how many will be asked for. one_core: an arm whose passes have one core as decoding has."""
        config = next(iter(names.values()))
        self.trainer = Trainer(config)
        self.engines = TimedEngines(self.trainer.session.policy, config.rollout.max_decode_rows, tailed=tailed)
        # All prompts beforehand: media threads would work beside the first arm of a round.
        self.prompts = [self.trainer.feed.take(config.rollout.prompts_per_step) for _ in range(rounds)]
        self.trainer.feed.close()
        lengths = {slot.spec.num_tokens for slots in self.prompts for slot in slots}
        if len(lengths) > 1:  # units would not be runs of rollout ids, as the bounds of stream take them to be
            raise SystemExit(f"prompts have {sorted(lengths)} tokens; needed one length")
        self.learners = {name: self._learner(config, 1 if name == one_core else 2) for name, config in names.items()}

    def _learner(self, config: Config, threads: int) -> Learner:
        trainer = self.trainer
        torch.set_num_threads(threads)  # a learner's lanes divide those of its birth
        learner = Learner(
            trainer.session.policy,
            trainer.optimizer,
            trainer.reference,
            trainer.collector,
            config,
            stop_token_ids=trainer.session.stop_token_ids,
            engines=self.engines,
        )
        torch.set_num_threads(2)
        return learner

    def rounds(self, arms: Mapping[str, Arm], count: int, first: int | None) -> None:
        """`count` rounds of `arms`, by turns (`in_turn`). first: number of the first round; None: not measured."""
        names = [name for name in self.learners if name in arms]
        for number in range(count):
            slots = self.prompts.pop()
            for name in in_turn(names, number):
                if (reference := self.trainer.reference) is not None:
                    reference.policy.vision_cache.clear()  # else the first of a round encodes for the others
                state = TrainerState(global_step=self.trainer.step, max_steps=self.trainer.config.train.max_steps)
                counted = None if first is None else first + number
                arms[name].step(self.learners[name], self.engines, slots, state, counted)
                self.trainer.step += 1

    def close(self) -> None:
        """End all threads."""
        for learner in self.learners.values():
            learner.close()
        self.trainer.close()


def measure(folder: Path, name: str, beta: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """All arms at one setting."""
    setting, tailed = setting_named(name)
    unit_tokens = ONE_PROMPT_TOKENS if tailed else UNIT_TOKENS
    configs = {arm: config_of(folder, setting, beta, on_two_cores(arm, unit_tokens)) for arm in arguments.arms}
    configs[ONE_CORE] = config_of(folder, setting, beta, on_two_cores("serial", unit_tokens))
    arms = {arm: Arm(arm) for arm in configs}
    compared = {name: arm for name, arm in arms.items() if name in ("serial", *COMPARED)}
    few = min(arguments.steps, FEW_STEPS)
    for number in range(arguments.trainers):
        begin = number * arguments.steps
        turns = Arms(configs, tailed=tailed, rounds=arguments.warmup + arguments.steps, one_core=ONE_CORE)
        try:
            turns.rounds(arms, arguments.warmup, None)
            turns.rounds(arms, few, begin)
            turns.rounds(compared, arguments.steps - few, begin + few)
        finally:
            turns.close()
    return _row(name, beta, arms, arguments.trainers)


def _row(name: str, beta: float, arms: Mapping[str, Arm], trainers: int) -> dict[str, Any]:
    serial, one_core = arms["serial"], arms[ONE_CORE]
    slow = slowness(paired(serial, one_core))
    row: dict[str, Any] = {
        "setting": name,
        "beta": beta,
        # The same rounds of all.
        "step_s": {arm: median(arms[arm].steps[number].seconds for number in one_core.steps) for arm in arms},
        "serial_phases_s": phase_seconds(serial.measured) | {"decode": median(s.decode_s for s in serial.measured)},
        "one_core_over_two": slow,
    }
    for arm in COMPARED:
        if arm in arms:
            row[arm] = _compared(paired(serial, arms[arm]), slow, trainers, streaming=arm == "stream")
    return row


def _compared(
    pairs: Sequence[tuple[Step, Step]], slow: Mapping[str, float], trainers: int, *, streaming: bool
) -> dict[str, Any]:
    """What an arm saved against `serial`, step by step, beside what it could have."""
    saved_s = np.array([a.seconds - b.seconds for a, b in pairs])
    limits_s = bounds([a for a, _ in pairs], slow, streaming=streaming)
    alike_s = alike(pairs)
    shares: dict[str, Any] = dict.fromkeys(("achieved_of_bound", "without_alike", "alike_of_bound"))
    if np.median(limits_s) > 0.01 * median(a.seconds for a, _ in pairs):  # else nothing to hide
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
        "achieved_by_trainer": [
            share_of_bound(saved, limits)[0] if np.median(limits) > 0 else None
            for saved, limits in zip(np.split(saved_s, trainers), np.split(limits_s, trainers), strict=True)
        ],
        "saved_s": saved_s.tolist(),
        "bounds_s": limits_s.tolist(),
        "alike_s": alike_s.tolist(),
        "decode_slowdown": median(b.decode_s / a.decode_s for a, b in pairs),
        "slowdown_by_pass": slowdown_by_pass(pairs),
        "exposed_prefix_share": median(b.exposed_prefix_s / b.seconds for _, b in pairs),
    }


def measure_auto(folder: Path, name: str, beta: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """overlap auto against off with all cores for everything: what a user gets who sets nothing."""
    setting, tailed = setting_named(name)
    configs = {arm: config_of(folder, setting, beta, options) for arm, options in AUTO_ARMS.items()}
    arms = {arm: Arm(arm) for arm in configs}
    last: dict[str, Any] = {}
    for number in range(arguments.trainers):
        turns = Arms(configs, tailed=tailed, rounds=arguments.warmup + arguments.steps)
        try:
            turns.rounds(arms, arguments.warmup, None)
            turns.rounds(arms, arguments.steps, number * arguments.steps)
            overlap = turns.learners["auto"].overlap
            last = {"open": overlap.chosen, "decode_slowdown": overlap.decode_slowdown()}
        finally:
            turns.close()
    pairs = paired(arms["off"], arms["auto"])
    return {
        "setting": name,
        "beta": beta,
        "step_s": {name: median(step.seconds for step in arm.measured) for name, arm in arms.items()},
        "auto_over_off": median(auto.seconds / off.seconds for off, auto in pairs),
        "auto_over_off_steps": [auto.seconds / off.seconds for off, auto in pairs],
        **last,
    }


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
