"""The run folder: effective configuration, one line of metrics per step, sampled completions, a summary.

config.yaml | metrics.jsonl | completions/step-N.{jsonl,html} + pictures/ | summary.json | checkpoint-N/ |
trace.json (for Perfetto) + trace.jsonl, of run.trace_steps | memory.jsonl, of run.memory_steps
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rollplex.config import Config
from rollplex.errors import CheckpointError, ConfigError
from rollplex.memory.ledger import Ledger
from rollplex.recipes.load import dump_config
from rollplex.runtime import completions
from rollplex.trace import Span, from_jsonl, to_chrome, to_jsonl
from rollplex.train.checkpoint_folder import step_of
from rollplex.types import ScoredGroup, StepReport

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
TRACE, SPANS = "trace.json", "trace.jsonl"
MEMORY = "memory.jsonl"


class RunFolder:
    """Writes what a run reports. One process at a time; every step is in `metrics.jsonl` exactly once."""

    def __init__(self, path: Path):
        """Use `open`, which looks at what the folder holds."""
        self.path = path
        self._metrics: IO[str] | None = None
        self._steps = 0
        self._spans: list[Span] = []

    @classmethod
    def open(cls, config: Config, *, resume_step: int | None = None) -> RunFolder:
        """Make `run.output_dir` ready for step `resume_step + 1` (absent: step 1) and write the configuration.

        Lines and completions of later steps, left by a run that was killed after its last checkpoint, are dropped, and
        so is a last line that was cut by the kill. Raises ConfigError when the folder holds another run and this one
        does not resume, CheckpointError when it cannot be written or a line before the last is damaged.
        """
        path = Path(config.run.output_dir)
        refuse_other_run(path, config)
        folder = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder._drop_after(resume_step or 0)
            _write_atomically(path / CONFIG, dump_config(config))
            folder._metrics = (path / METRICS).open("a", encoding="utf-8")
        except OSError as error:
            raise CheckpointError(f"cannot write the run folder {path}: {error} (run.output_dir)") from error
        return folder

    def log(self, report: StepReport) -> None:
        """Append one step's metrics and flush. Values that are not finite become null: the file stays strict JSON.

        Raises CheckpointError when the disk fails; checkpoints are not touched.
        """
        line = {"step": report.step, **{key: _finite(value) for key, value in report.metrics.items()}}
        try:
            if self._metrics is None:
                raise CheckpointError(f"{self.path} is closed: it takes no more steps")
            self._metrics.write(json.dumps(line, allow_nan=False) + "\n")
            self._metrics.flush()
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self.path / METRICS}: {error}; make room and resume from the last checkpoint, which is "
                "intact (run.resume_from_checkpoint=auto)"
            ) from error
        self._steps = report.step

    def log_completions(self, step: int, groups: Sequence[ScoredGroup], texts: Sequence[Sequence[str]]) -> Path:
        """Write the step's completions (`texts[g][i]`: response i of group g) with their pictures; returns the page."""
        try:
            return completions.write_step(self.path / "completions", step, groups, texts)
        except OSError as error:
            raise CheckpointError(f"cannot write completions in {self.path}: {error} (run.output_dir)") from error

    def log_spans(self, spans: Sequence[Span]) -> None:
        """Add a step's spans to the trace."""
        try:
            self._write_spans([*self._spans, *spans])
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path / TRACE}: {error} (run.output_dir)") from error

    def log_ledger(self, step: int, ledger: Ledger) -> None:
        """Add planned and measured bytes of a step."""
        path = self.path / MEMORY
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **dataclasses.asdict(ledger)}) + "\n")
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error} (run.output_dir)") from error

    def finish(self, evaluation: Mapping[str, float] | None = None) -> None:
        """Write the summary and close."""
        summary = {
            "steps": self._steps,
            "evaluation": {key: _finite(value) for key, value in (evaluation or {}).items()},
        }
        try:
            _write_atomically(self.path / SUMMARY, json.dumps(summary, indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path / SUMMARY}: {error} (run.output_dir)") from error
        self.close()

    def close(self) -> None:
        """Close the metrics file; nothing can be logged after."""
        if self._metrics is not None:
            # `log` flushes each line and reports a full disk; the line then left in the buffer must not hide that.
            with contextlib.suppress(OSError):
                self._metrics.close()
            self._metrics = None

    def _write_spans(self, spans: list[Span]) -> None:
        _write_atomically(self.path / SPANS, to_jsonl(spans))
        _write_atomically(self.path / TRACE, to_chrome(spans, self.path.name))
        self._spans = spans

    def _drop_spans_after(self, step: int) -> None:
        path = self.path / SPANS
        if not path.is_file():
            return
        try:
            held = from_jsonl(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged ({error}): remove it to go on without the old trace") from error
        self._write_spans([span for span in held if span.step <= step])

    def _drop_after(self, step: int) -> None:
        self._drop_spans_after(step)
        _keep_until(step, self.path / MEMORY)
        if kept := _keep_until(step, self.path / METRICS):
            self._steps = kept[-1]["step"]
        (self.path / SUMMARY).unlink(missing_ok=True)
        completions.drop_after(self.path / "completions", step)


def free_folder(wanted: Path) -> Path:
    """`wanted`, or with the first free number behind it, for a run that never goes on with an earlier one."""
    folder, number = wanted, 1
    while folder.exists():
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


def _keep_until(step: int, path: Path) -> list[dict[str, Any]]:
    """The lines of a file like metrics.jsonl up to `step`, after all others were dropped from it."""
    if not path.is_file():
        return []
    kept = [line for line in read_steps(path) if line["step"] <= step]
    _write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept


def read_steps(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl or memory.jsonl, without a last one that is cut.

    Raises CheckpointError for damage before it.
    """
    path = Path(path)
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    cut = lines.pop()  # empty when the last line is whole
    parsed: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            if not isinstance(entry["step"], int):
                raise TypeError("its step is no whole number")
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path}, line {number} of {len(lines) + bool(cut)} is damaged ({error!r}): remove that line to go on"
            ) from error
        parsed.append(entry)
    return parsed


def refuse_other_run(path: Path, config: Config) -> None:
    """Raises ConfigError when `path` is a file, or a run that `run.resume_from_checkpoint` does not go on with."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"run.output_dir {path} is a file, needed a folder")
    held = [name for name in (CONFIG, METRICS) if (path / name).exists()]
    if path.is_dir():
        held += sorted(child.name for child in path.iterdir() if step_of(child) is not None)
    if not held:
        return
    wanted = config.run.resume_from_checkpoint
    if wanted is None:
        raise ConfigError(
            f"run.output_dir {path} holds another run ({', '.join(held[:3])}); give another folder, or go on with that "
            "run: run.resume_from_checkpoint=auto"
        )
    if wanted != "auto" and Path(wanted).resolve().parent != path.resolve():
        raise ConfigError(
            f"run.output_dir {path} holds another run than run.resume_from_checkpoint {wanted}; give a new folder, or "
            "a checkpoint of this one"
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _write_atomically(path: Path, text: str) -> None:
    """Replace `path`; a kill leaves the old text or the new one."""
    temporary = path.with_name(f".{path.name}.writing")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
