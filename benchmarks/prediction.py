"""Step times of real runs, predicted from another setting's traces, against what they took.

usage: python benchmarks/prediction.py [--settings S1 S2 S3 S4] [--turns 6] [--beta 0.04]

The settings of vs_trl.py under serial, rollplex and stream: trainers in this process on the same model, rows and seeds.
All of them, of all settings, take turns, so that a machine that gets faster or slower does so for all alike; the first
step of a turn is not counted, since the others have emptied the caches. Decoding may use one core, all other phases
two. Then `rollplex calibrate` fits a machine to the three runs of one setting, what the lanes cost each other included,
and every schedule of every setting is run in virtual time on it (planner/predict_run.py); so for each setting in turn.
Lengths are read from the runs' metrics, times are not. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import torch

from overlap import ONE_PROMPT_TOKENS, RESULTS, config_of, on_two_cores, setting_named
from rollplex.config import Config
from rollplex.planner.hardware import hardware_from_facts
from rollplex.planner.predict_run import Machine, predicted_step
from rollplex.recipes.load import dump_config
from rollplex.runtime.calibration import calibrate_runs
from rollplex.runtime.run_folder import CONFIG, METRICS, SPANS
from rollplex.runtime.trainer import Trainer
from rollplex.schedule.spec import Phase
from rollplex.trace import Span, to_jsonl
from vs_trl_arms.settings import Setting
from vs_trl_arms.summary import block_order, provenance, write_result
from vs_trl_arms.workload import counting_task, save_model, save_rows

SCHEDULES = ("serial", "rollplex", "stream")
TURN = 2  # measured steps of a turn, after one that is not
WANTED = 0.15  # of the measured step: issue 5
TIE = 0.03  # measured steps that are no further apart are in no order,
AGREE = 5 / 6  # nor are those that this part of the rounds does not agree on
SAME = 0.005  # predicted steps that are no further apart are said to be equal
PIXELS_OF_TOKEN = 28


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", nargs="+", default=["S1", "S2", "S3", "S4"])
    parser.add_argument("--turns", type=int, default=6, help=f"of each run, {TURN} measured steps each (default 6)")
    parser.add_argument(
        "--beta", type=float, default=0.04, help="weight of the KL term; 0: no reference (default 0.04)"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    return parser.parse_args()


@dataclass(frozen=True, slots=True)
class Run:
    """What one schedule did at one setting: a run folder, and the seconds of its measured steps."""

    setting: str
    arm: str
    folder: Path
    config: Config
    rows: tuple[Mapping[str, Any], ...]
    seconds: tuple[float, ...]
    phases_s: Mapping[str, float]

    @property
    def measured_s(self) -> float:
        """Median step."""
        return median(self.seconds)

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.setting} {self.arm}"


class Recorded:
    """A trainer whose measured steps are kept as a run folder keeps them."""

    def __init__(self, name: str, arm: str, setting: Setting, config: Config):
        self.name, self.arm, self.setting, self.config = name, arm, setting, config
        self.trainer = Trainer(config)
        self.spans: list[Span] = []
        self.rows: list[Mapping[str, Any]] = []
        self.seconds: list[float] = []

    def turn(self) -> None:
        """Run the steps of one turn."""
        for number in range(1 + TURN):
            self._step(measured=number > 0)

    def _step(self, *, measured: bool) -> None:
        begin_s = time.monotonic()
        report, outcome = self.trainer.run_step()
        seconds = time.monotonic() - begin_s
        if measured:
            self.seconds.append(seconds)
            self.spans += outcome.spans
            self.rows.append({"step": report.step, **report.metrics})

    def written(self, scratch: Path) -> Run:
        """As a folder with the files that `rollplex calibrate` reads."""
        folder, config = scratch / self.name / self.arm, described(self.config, self.setting, self.rows[0])
        folder.mkdir(parents=True)
        (folder / CONFIG).write_text(dump_config(config), encoding="utf-8")
        (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")
        (folder / SPANS).write_text(to_jsonl(self.spans), encoding="utf-8")
        steps = {span.step for span in self.spans}
        by_step = [phase_seconds([span for span in self.spans if span.step == step]) for step in sorted(steps)]
        phases = {phase: median(by[phase] for by in by_step) for phase in by_step[0]}
        return Run(self.name, self.arm, folder, config, tuple(self.rows), tuple(self.seconds), phases)


def recorded(scratch: Path, name: str, beta: float) -> Iterator[Recorded]:
    """The trainers of one setting: one for each schedule."""
    setting, _ = setting_named(name)
    folder = scratch / name
    save_model(setting, folder / "model")
    save_rows(counting_task(setting), folder / "rows")
    for schedule in SCHEDULES:
        yield Recorded(
            name, schedule, setting, config_of(folder, setting, beta, on_two_cores(schedule, ONE_PROMPT_TOKENS))
        )


def measure(scratch: Path, arguments: argparse.Namespace) -> list[Run]:
    """All runs of all settings in turn."""
    runs: dict[str, Recorded] = {}
    try:
        for name in arguments.settings:
            runs |= {f"{run.name} {run.arm}": run for run in recorded(scratch, name, arguments.beta)}
        for key in block_order(list(runs), arguments.turns):
            runs[key].turn()
    finally:
        for run in runs.values():
            run.trainer.close()
    return [run.written(scratch) for run in runs.values()]


def phase_seconds(spans: Sequence[Span]) -> dict[str, float]:
    """Seconds of each phase of a step, all groups together; of decoding, until the last response."""
    found: dict[str, float] = {}
    for span in spans:
        if span.name == Phase.DECODE:
            found[span.name] = max(found.get(span.name, 0.0), span.seconds)
        elif span.name in set(Phase) - {Phase.REWARD, Phase.PUBLISH}:
            found[span.name] = found.get(span.name, 0.0) + span.seconds
    return found


def described(config: Config, setting: Setting, row: Mapping[str, Any]) -> Config:
    """`config` with what a planner cannot see in saved rows: the size of pictures, and their part of a prompt."""
    visual = setting.images * (setting.image_size // PIXELS_OF_TOKEN) ** 2
    responses = setting.prompts * setting.responses
    sampled, unique = responses * row["completions/mean_length"], row["prefix/unique_tokens_ratio"]
    prompt = sampled * (1 - unique) / (responses * unique - setting.prompts)
    data = config.data.model_copy(update={"image_size": setting.image_size})
    memory = config.memory.model_copy(update={"visual_share": visual / prompt})
    return config.model_copy(update={"data": data, "memory": memory})


def machine_of(facts: Mapping[str, Any]) -> Machine:
    """What `calibrate` found. Lanes that its traces say nothing about are taken to cost each other nothing."""
    beside = {lane: found or 1.0 for lane, found in facts["beside"].items()}
    return Machine(hardware_from_facts(facts["hardware"]), beside["decode"], beside["window"], eager=True)


@dataclass(frozen=True, slots=True)
class Predicted:
    """A run's step on a machine: the median over the lengths of the measured steps."""

    seconds: float
    phases_s: Mapping[str, float]


def predict(run: Run, machine: Machine) -> Predicted:
    """The run's own schedule in virtual time."""
    steps = [predicted_step(run.config, row, machine) for row in run.rows]
    by_step = [phase_seconds(spans) for _, spans in steps]
    phases = {phase: median(by[phase] for by in by_step) for phase in by_step[0]}
    return Predicted(median(seconds for seconds, _ in steps), phases)


def calibrations(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """What `rollplex calibrate` finds in the runs of each setting."""
    names = dict.fromkeys(run.setting for run in runs)
    return {name: calibrate_runs([run.folder for run in runs if run.setting == name], "cpu") for name in names}


def predictions(runs: Sequence[Run], calibrated: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Predicted]]:
    """All of `runs` on the machine of each setting."""
    return {name: [predict(run, machine_of(facts)) for run in runs] for name, facts in calibrated.items()}


def shorter(first: Sequence[float], second: Sequence[float]) -> bool:
    """Whether the steps `first` are shorter than those of `second` beyond noise; both by round."""
    ratios = [b / a for a, b in zip(first, second, strict=True)]
    return median(ratios) > 1 + TIE and sum(ratio > 1 for ratio in ratios) >= ceil(AGREE * len(ratios))


def orders(measured: Mapping[str, Sequence[float]], predicted: Mapping[str, float]) -> dict[str, int]:
    """Pairs of schedules whose measured order is beyond noise, by what was predicted of them."""
    found = Counter({"right": 0, "equal": 0, "wrong": 0})
    for a, b in itertools.permutations(measured, 2):
        if shorter(measured[a], measured[b]):
            ahead = predicted[b] / predicted[a] - 1
            found["equal" if abs(ahead) <= SAME else "right" if ahead > 0 else "wrong"] += 1
    return dict(found)


def errors(measured: Mapping[str, float], predicted: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Predicted over measured less 1, by the setting calibrated on and the run."""
    return {
        source: {name: seconds / measured[name] - 1 for name, seconds in by_run.items()}
        for source, by_run in predicted.items()
    }


def verdict(off: Mapping[str, Mapping[str, float]]) -> str:
    """How many runs of other settings are predicted within what is wanted, and which are not."""
    others = {f"{run} from {s}": by for s, found in off.items() for run, by in found.items() if run.split()[0] != s}
    far = [f"{name} {by:+.0%}" for name, by in others.items() if abs(by) > WANTED]
    return f"within {WANTED:.0%}: {len(others) - len(far)} of {len(others)}; not: {', '.join(far) or 'none'}"


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """The tables in Markdown; a setting that was predicted from itself is in brackets."""
    off, settings = errors(result["measured_s"], result["predicted_s"]), list(result["predicted_s"])
    yield "| run | measured s | " + " | ".join(f"from {source}" for source in settings) + " |"
    yield "|---" * (len(settings) + 2) + "|"
    for name, seconds in result["measured_s"].items():
        cells = [_cell(off[source][name], known=name.split()[0] == source) for source in settings]
        yield f"| {name} | {seconds:.3f} | " + " | ".join(cells) + " |"
    yield ""
    phases = list(next(iter(result["phases_s"].values())))
    yield "| serial, from | " + " | ".join(phases) + " |"
    yield "|---" * (len(phases) + 1) + "|"
    for source, setting in itertools.product(settings, settings):
        measured, predicted = result["phases_s"][setting], result["predicted_phases_s"][source][setting]
        cells = [_cell(predicted[phase] / measured[phase] - 1, known=source == setting) for phase in phases]
        yield f"| {setting} from {source} | " + " | ".join(cells) + " |"
    yield ""
    yield f"predicted from another setting {verdict(off)}"
    for source in settings:
        told = ", ".join(
            f"{name} {by['right']} right, {by['equal']} taken to be equal, {by['wrong']} wrong"
            for name, by in result["orders"][source].items()
        )
        yield f"pairs of schedules further apart than noise, predicted from {source}: {told}"


def _cell(off: float, *, known: bool) -> str:
    return f"({off:+.0%})" if known else f"{off:+.0%}"


def main() -> None:
    """Measure, calibrate on each setting, predict all of them, write the result."""
    arguments = parse_arguments()
    torch.set_num_threads(2)
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        runs = measure(Path(scratch), arguments)
        measuring_s = time.monotonic() - start_s
        calibrated = calibrations(runs)
        predicted = predictions(runs, calibrated)
    result = result_of(runs, predicted) | {
        "benchmark": "prediction",
        "versions": {package: version(package) for package in ("rollplex", "torch", "transformers")},
        "beta": arguments.beta,
        "turns": arguments.turns,
        "measured_steps_of_a_turn": TURN,
        "calibrated": calibrated,
        "measuring_s": measuring_s,
        "wall_s": time.monotonic() - start_s,
    }
    write_result("prediction", result, 2, arguments.results)
    print(*lines(result), sep="\n")
    last = ("benchmark", "measured_s", "predicted_s", "orders", "wall_s")
    print(json.dumps({key: result[key] for key in last}))


def seconds_by_run(runs: Sequence[Run], predicted: Mapping[str, Sequence[Predicted]]) -> dict[str, dict[str, float]]:
    """Predicted steps of `runs` by the setting calibrated on and the run."""
    return {
        source: {run.name: guess.seconds for run, guess in zip(runs, guesses, strict=True)}
        for source, guesses in predicted.items()
    }


def result_of(runs: Sequence[Run], predicted: Mapping[str, Sequence[Predicted]]) -> dict[str, Any]:
    """What was measured of all runs, and what was predicted of them from each setting."""
    serial = [number for number, run in enumerate(runs) if run.arm == "serial"]
    by_setting = {run.setting: [other for other in runs if other.setting == run.setting] for run in runs}
    seconds = seconds_by_run(runs, predicted)
    return {
        **provenance(),
        "step_s": {run.name: run.seconds for run in runs},
        "measured_s": {run.name: run.measured_s for run in runs},
        "phases_s": {runs[number].setting: runs[number].phases_s for number in serial},
        "predicted_s": seconds,  # simulated, as are predicted_phases_s; all else is measured
        "predicted_phases_s": {
            source: {runs[number].setting: guesses[number].phases_s for number in serial}
            for source, guesses in predicted.items()
        },
        "orders": {
            source: {
                name: orders({run.arm: run.seconds for run in own}, {run.arm: by_run[run.name] for run in own})
                for name, own in by_setting.items()
            }
            for source, by_run in seconds.items()
        },
    }


if __name__ == "__main__":
    main()
