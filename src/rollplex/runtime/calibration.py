"""`rollplex calibrate`: run folders in, a machine's record out; and such a file, or a device's name, as hardware."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rollplex.config import Config
from rollplex.errors import ConfigError
from rollplex.planner.beside import Together, alone, together
from rollplex.planner.calibrate import FREE, fit, measured_spans
from rollplex.planner.hardware import HARDWARE, Hardware, cpu, hardware, hardware_from_facts
from rollplex.planner.traced_run import traced_steps
from rollplex.recipes.load import load_config
from rollplex.runtime.run_folder import CONFIG, METRICS, SPANS, read_steps
from rollplex.trace import Span, from_jsonl

_SLOWDOWN = "overlap/decode_slowdown"


@dataclass(frozen=True, slots=True)
class _Run:
    config: Config
    spans: list[Span]
    metrics: list[dict[str, Any]]


def device_named(name: str) -> Hardware:
    """The record of a known device, or of a file that `calibrate` wrote. Raises ConfigError for neither."""
    path = Path(name)
    if name in HARDWARE or not (path.is_file() or path.suffix):
        return hardware(name)
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--hardware {name} is no file of `rollplex calibrate`: {error}") from error
    if not isinstance(facts, dict) or not isinstance(facts.get("hardware"), dict):
        raise ConfigError(f"--hardware {name} has no record 'hardware'; needed a file that `rollplex calibrate` wrote")
    return hardware_from_facts(facts["hardware"])


def calibrate_runs(folders: Sequence[Path], start: str) -> dict[str, Any]:
    """The efficiencies that make the traced steps of `folders` take as long as they did, as data for a file.

    start: where the fit starts and whose peaks it keeps: a device's name, a file, or "cpu" for this machine's cores.
    All runs must have had one device. Raises ConfigError for a folder without a trace, or runs that cannot be counted.
    """
    runs = [_read(folder) for folder in folders]
    device = _start(start, runs)
    eager = start == "cpu" or device.name == "cpu"
    steps = [traced_steps(run.config, run.spans, run.metrics, device, eager=eager) for run in runs]
    measured = [m for run, own in zip(runs, steps, strict=True) for m in measured_spans(alone(run.spans), own)]
    # Decoding reaches less where it has fewer threads; and on a CPU, where small products do not run as large ones do.
    found = fit(measured, device, (*FREE, "decode") if eager or _decodes_on_fewer(runs) else FREE)
    both = Together()
    for run, own in zip(runs, steps, strict=True):
        both += together(run.spans, own, found.hardware, found.residuals)
    lanes = {"decode": both.decode, "window": both.window}
    return {
        **found.facts(),
        "runs": [str(folder) for folder in folders],
        "beside": lanes,
        "contention": _one(runs, both),
    }


def write_calibration(facts: Mapping[str, Any], path: Path) -> None:
    """Facts of `calibrate_runs` as a file for `device_named`. Raises ConfigError where it cannot be written."""
    try:
        path.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write --out {path}: {error}") from error


def calibration_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """What `calibrate_runs` gave, as text."""
    device = facts["hardware"]
    yield f"{device['name']}: {facts['spans']} spans of {len(facts['runs'])} runs"
    yield from (f"{value:12.4g}  {name}" for name, value in device["efficiency"].items())
    yield f"{'phase':<18}{'spans':>6}{'measured s':>12}{'fitted s':>10}{'off':>8}"
    for phase, left in facts["residuals"].items():
        seconds = f"{left['measured_s']:>12.4g}{left['predicted_s']:>10.4g}"
        yield f"{phase:<18}{left['spans']:>6}{seconds}{left['relative']:>+8.0%}"
    yield from (
        f"{lane} beside the other lane took {by:.3g} times as long" for lane, by in facts["beside"].items() if by
    )
    if facts["contention"] is not None:
        yield f"for decoding and passes at once give plan and simulate --contention {facts['contention']:.3g}"


def _decodes_on_fewer(runs: Sequence[_Run]) -> bool:
    """Whether decoding has fewer threads than passes have: then it reaches less."""
    cores = os.cpu_count() or 1
    return any((r.config.schedule.decode_threads or cores) < (r.config.run.num_threads or cores) for r in runs)


def _one(runs: Sequence[_Run], both: Together) -> float | None:
    """The one factor for both lanes: in the same time it gets as much done as their own would, else what runs measured
    of decoding alone (overlap auto), else None."""
    if both.decode is not None and both.window is not None:
        return 2 / (1 / both.decode + 1 / both.window)
    slowdowns = [row[_SLOWDOWN] for run in runs for row in run.metrics if row.get(_SLOWDOWN)]
    return max(1.0, fmean(slowdowns)) if slowdowns else None


def _start(name: str, runs: Sequence[_Run]) -> Hardware:
    if name != "cpu":
        return device_named(name)
    threads = {run.config.run.num_threads or os.cpu_count() or 1 for run in runs}
    if len(threads) > 1:
        raise ConfigError(f"the runs had run.num_threads {sorted(threads)}; needed runs on one number of cores")
    return cpu(threads.pop(), float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))


def _read(folder: Path) -> _Run:
    missing = [name for name in (CONFIG, METRICS, SPANS) if not (folder / name).is_file()]
    if missing:
        near = difflib.get_close_matches(folder.name, [p.name for p in folder.parent.glob("*") if p.is_dir()], n=1)
        hint = f"; did you mean {folder.parent / near[0]}?" if near and not folder.is_dir() else ""
        raise ConfigError(
            f"{folder} has no {', '.join(missing)}{hint}; needed the run folder of a run with run.trace_steps, for "
            "example run.trace_steps=[2,3]"
        )
    try:
        spans = from_jsonl((folder / SPANS).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{folder / SPANS} is damaged: {error}") from error
    return _Run(load_config(folder / CONFIG), spans, read_steps(folder / METRICS))
