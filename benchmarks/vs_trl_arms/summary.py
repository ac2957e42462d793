"""From blocks to figures: medians, ratios, checks and the result file. Arithmetic only, but for `write_result`."""

from __future__ import annotations

import json
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
CLOCK_TOLERANCE = 0.05  # steps of a block against the parent's clock


class UnequalWorkError(RuntimeError):
    """The arms did not do the same work, or a clock is off: the ratio would mean nothing."""


@dataclass(frozen=True, slots=True)
class ArmFigures:
    """One arm over all measured blocks. Bytes are resident sizes."""

    step_seconds: tuple[float, ...]
    median_seconds: float
    median_cpu_seconds: float  # processor time of all threads: hardly moved by other load on the machine
    baseline_rss: int  # after loading, before the first step
    peak_rss: int  # of the whole process over its whole life
    mean_length: float

    @property
    def step_rss(self) -> int:
        """What steps need on top of the loaded process."""
        return self.peak_rss - self.baseline_rss


def block_order(arms: Sequence[str], blocks: int) -> list[str]:
    """A B, B A, A B, ...: each arm once per round, and each first as often as last."""
    order: list[str] = []
    for number in range(blocks):
        order += arms if number % 2 == 0 else list(reversed(arms))
    return order


def check_lengths(arm: str, steps: Sequence[Mapping[str, float]], tokens: int) -> None:
    """Raises UnequalWorkError unless every response of every step has exactly `tokens` tokens."""
    for number, step in enumerate(steps):
        if step["min_length"] != tokens or step["max_length"] != tokens:
            raise UnequalWorkError(
                f"{arm}, step {number}: responses have {step['min_length']:g} to {step['max_length']:g} tokens, "
                f"needed exactly {tokens}"
            )


def check_clock(arm: str, step_seconds: Sequence[float], wall_seconds: float) -> None:
    """Raises UnequalWorkError when the steps do not add up to what the parent's clock saw."""
    total = sum(step_seconds)
    if abs(total - wall_seconds) > CLOCK_TOLERANCE * wall_seconds + 0.05:
        raise UnequalWorkError(f"{arm}: steps add up to {total:.3f} s, the block took {wall_seconds:.3f} s")


def arm_figures(
    steps: Sequence[Mapping[str, float]], *, baseline_rss: int, peak_rss: int, sampled_peak_rss: int
) -> ArmFigures:
    """Median step time and memory of one arm; the higher of the kernel's and the sampled peak counts."""
    seconds = tuple(step["seconds"] for step in steps)
    return ArmFigures(
        step_seconds=seconds,
        median_seconds=median(seconds),
        median_cpu_seconds=median(step["cpu_seconds"] for step in steps),
        baseline_rss=baseline_rss,
        peak_rss=max(peak_rss, sampled_peak_rss),
        mean_length=sum(step["mean_length"] for step in steps) / len(steps),
    )


def ratios(trl: ArmFigures, ours: ArmFigures) -> dict[str, float]:
    """ratio: step time TRL / ours; cpu_ratio: the same of processor time, far from it when the machine was not idle.

    memory_ratio: peak of the whole process ours / TRL's. step_memory_ratio: the same without what each process held
    before its first step.
    """
    return {
        "ratio": trl.median_seconds / ours.median_seconds,
        "cpu_ratio": trl.median_cpu_seconds / ours.median_cpu_seconds,
        "memory_ratio": ours.peak_rss / trl.peak_rss,
        "step_memory_ratio": ours.step_rss / trl.step_rss,
    }


def machine() -> dict[str, Any]:
    """CPU, cores and system of this machine."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
        cpu = found.group(1).strip() if found else cpu
    return {"cpu": cpu, "cores": _cores(), "system": platform.platform(), "python": platform.python_version()}


def _cores() -> int:
    import psutil

    return psutil.cpu_count(logical=True) or 1


def hardware_slug(info: Mapping[str, Any], threads: int) -> str:
    """For file names: 'intel-r-xeon-r-processor-2c-1t' is two cores, of which one thread was used."""
    return re.sub(r"[^a-z0-9]+", "-", str(info["cpu"]).lower()).strip("-") + f"-{info['cores']}c-{threads}t"


def commit() -> dict[str, Any]:
    """The repository's commit, and whether the working tree differs from it."""
    head = _git("rev-parse", "HEAD")
    return {"commit": head, "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no"))}


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=REPOSITORY, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def provenance() -> dict[str, Any]:
    """What every result file states: measured, where, when, at which commit."""
    return {
        "source": "measured",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": machine(),
        **commit(),
    }


def write_result(name: str, result: Mapping[str, Any], threads: int, folder: Path) -> Path:
    """Write `<name>_<hardware>_<date>.json`; a later run of the same day replaces it."""
    day = str(result["date"])[:10]
    path = folder / f"{name}_{hardware_slug(result['hardware'], threads)}_{day}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path
