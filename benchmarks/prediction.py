"""Step times of real runs, predicted from another setting's traces, against what they took.

usage: python benchmarks/prediction.py [--settings S1 S2 S3 S4] [--steps 4] [--beta 0.04]

The settings of vs_trl.py under serial, rollplex and stream: trainers in this process on the same model, rows and seeds
take turns step by step, and every measured step is traced. Decoding may use one core, all other phases two. Then
`rollplex calibrate` fits a machine to the three runs of one setting, what the lanes cost each other included, and every
schedule of every setting is run in virtual time on it (planner/predict_run.py); so for each setting in turn. Lengths
are read from the runs' metrics, times are not. The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from overlap import ARMS, RESULTS, TWO_CORES, config_of, setting_named
from rollplex.config import Config
from rollplex.planner.hardware import hardware_from_facts
from rollplex.planner.predict_run import Machine, predicted_step
from rollplex.recipes.load import dump_config
from rollplex.runtime.calibration import calibrate_runs
from rollplex.runtime.run_folder import CONFIG, METRICS, SPANS
from rollplex.runtime.trainer import Trainer
from rollplex.trace import Span, to_jsonl
from vs_trl_arms.settings import Setting
from vs_trl_arms.summary import block_order, provenance, write_result
from vs_trl_arms.workload import counting_task, save_model, save_rows

SCHEDULES = ("serial", "rollplex", "stream")
TIE = 0.03  # measured steps that are no further apart are in no order
PIXELS_OF_TOKEN = 28


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", nargs="+", default=["S1", "S2", "S3", "S4"])
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each run (default 4)")
    parser.add_argument("--warmup", type=int, default=2, help="unmeasured steps of each run (default 2)")
    parser.add_argument(
        "--beta", type=float, default=0.04, help="weight of the KL term; 0: no reference (default 0.04)"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    return parser.parse_args()


@dataclass(frozen=True, slots=True)
class Run:
    """What one schedule did at one setting: a run folder, and the seconds of its measured steps."""

    setting: str
    schedule: str
    folder: Path
    config: Config
    rows: tuple[Mapping[str, Any], ...]
    seconds: tuple[float, ...]
    in_spans_s: float  # of the median step: from the first span to the last; the rest no prediction knows

    @property
    def measured_s(self) -> float:
        """Median step."""
        return median(self.seconds)


class Recorded:
    """A trainer whose measured steps are kept as a run folder keeps them."""

    def __init__(self, config: Config):
        self.trainer = Trainer(config)
        self.spans: list[Span] = []
        self.rows: list[Mapping[str, Any]] = []
        self.seconds: list[float] = []

    def step(self, *, measured: bool) -> None:
        """Run one step."""
        begin_s = time.monotonic()
        report, outcome = self.trainer.run_step()
        seconds = time.monotonic() - begin_s
        if measured:
            self.seconds.append(seconds)
            self.spans += outcome.spans
            self.rows.append({"step": report.step, **report.metrics})

    def write(self, folder: Path, config: Config) -> None:
        """The files that `rollplex calibrate` reads."""
        folder.mkdir(parents=True)
        (folder / CONFIG).write_text(dump_config(config), encoding="utf-8")
        (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")
        (folder / SPANS).write_text(to_jsonl(self.spans), encoding="utf-8")


def measure(scratch: Path, name: str, arguments: argparse.Namespace) -> list[Run]:
    """All schedules at one setting."""
    setting, _ = setting_named(name)
    save_model(setting, scratch / name / "model")
    save_rows(counting_task(setting), scratch / name / "rows")
    arms = {s: {**ARMS[s], "schedule": {**TWO_CORES, **ARMS[s]["schedule"]}} for s in SCHEDULES}
    configs = {s: config_of(scratch / name, setting, arguments.beta, arm, 2) for s, arm in arms.items()}
    runs = {s: Recorded(config) for s, config in configs.items()}
    try:
        for number, schedule in enumerate(block_order(SCHEDULES, arguments.warmup + arguments.steps)):
            runs[schedule].step(measured=number >= arguments.warmup * len(SCHEDULES))
    finally:
        for run in runs.values():
            run.trainer.close()
    found = []
    for schedule, run in runs.items():
        folder, config = scratch / name / schedule, described(configs[schedule], setting, run.rows[0])
        run.write(folder, config)
        found.append(Run(name, schedule, folder, config, tuple(run.rows), tuple(run.seconds), extent_s(run.spans)))
    return found


def extent_s(spans: Sequence[Span]) -> float:
    """Median seconds from the first to the last span of a step."""
    steps = {span.step for span in spans}
    ends = {step: [s for s in spans if s.step == step] for step in steps}
    return median(max(s.end_s for s in own) - min(s.start_s for s in own) for own in ends.values())


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


def predict(runs: Sequence[Run], machine: Machine) -> dict[str, dict[str, float]]:
    """Predicted seconds by setting and schedule: the median over the lengths of the measured steps."""
    found: dict[str, dict[str, float]] = {}
    for run in runs:
        seconds = [predicted_step(run.config, row, machine)[0] for row in run.rows]
        found.setdefault(run.setting, {})[run.schedule] = median(seconds)
    return found


def ordered_as(measured: Mapping[str, float], predicted: Mapping[str, float]) -> bool:
    """Whether schedules whose measured steps differ by more than TIE are predicted in the same order."""
    pairs = itertools.permutations(measured, 2)
    return all(predicted[a] < predicted[b] for a, b in pairs if measured[a] * (1 + TIE) < measured[b])


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """The table in Markdown: measured seconds, and predicted over measured less 1 by the setting calibrated on."""
    settings = list(result["measured_s"])
    yield "| setting | schedule | measured s | " + " | ".join(f"from {name}" for name in settings) + " |"
    yield "|---" * (len(settings) + 3) + "|"
    for name, by_schedule in result["measured_s"].items():
        for schedule, seconds in by_schedule.items():
            cells = []
            for source in settings:
                off = result["predicted_s"][source][name][schedule] / seconds - 1
                cells.append(f"({off:+.0%})" if source == name else f"{off:+.0%}")
            yield f"| {name} | {schedule} | {seconds:.3f} | " + " | ".join(cells) + " |"
    rank = [f"{source}: {sum(by.values())} of {len(by)}" for source, by in result["order_right"].items()]
    yield f"order of schedules right, by the setting calibrated on: {', '.join(rank)}"


def main() -> None:
    """Measure, calibrate on each setting, predict all of them, write the result."""
    arguments = parse_arguments()
    torch.set_num_threads(2)
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        runs = [run for name in arguments.settings for run in measure(Path(scratch), name, arguments)]
        calibrated = {
            name: calibrate_runs([run.folder for run in runs if run.setting == name], "cpu")
            for name in arguments.settings
        }
        predicted = {name: predict(runs, machine_of(facts)) for name, facts in calibrated.items()}
    measured: dict[str, dict[str, float]] = {}
    for run in runs:
        measured.setdefault(run.setting, {})[run.schedule] = run.measured_s
    versions = {package: version(package) for package in ("rollplex", "torch", "transformers")}
    result = {
        **provenance(),
        "versions": versions,
        "benchmark": "prediction",
        "beta": arguments.beta,
        "steps": arguments.steps,
        "step_s": {f"{run.setting} {run.schedule}": run.seconds for run in runs},
        "measured_s": measured,
        "in_spans_s": {f"{run.setting} {run.schedule}": run.in_spans_s for run in runs},
        "calibrated": calibrated,
        "predicted_s": predicted,  # simulated, all else is measured
        "order_right": {
            source: {name: ordered_as(measured[name], found[name]) for name in measured}
            for source, found in predicted.items()
        },
        "wall_s": time.monotonic() - start_s,
    }
    write_result("prediction", result, 2, arguments.results)
    print(*lines(result), sep="\n")
    print(json.dumps({key: result[key] for key in ("benchmark", "measured_s", "predicted_s", "order_right", "wall_s")}))


if __name__ == "__main__":
    main()
