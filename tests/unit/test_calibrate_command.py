"""`rollplex calibrate`: run folders as a run writes them, from a machine whose efficiencies are known; and refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rollplex.cli import app
from rollplex.config import Config
from rollplex.errors import ConfigError
from rollplex.models.shapes import shape_of
from rollplex.planner.beside import alone
from rollplex.planner.calibrate import measured_spans
from rollplex.planner.cost import Side, StepCost
from rollplex.planner.flops import ModelCounts
from rollplex.planner.hardware import Hardware, hardware
from rollplex.planner.load import GroupLoad, video_prompt
from rollplex.planner.parallel import Parallel
from rollplex.planner.passes import Algorithm
from rollplex.planner.traced_run import traced_steps
from rollplex.recipes.load import dump_config, load_config
from rollplex.recipes.packaged import packaged_recipe
from rollplex.runtime.calibration import device_named
from rollplex.schedule.spec import Phase, Task
from rollplex.trace import Span, to_jsonl

TRUE = hardware("a100-80g").reaching(matmul=0.5, attention=0.25, memory=0.6, kernel_s=3e-6, decode_step_s=4e-3)
IDS = (20, 21, 22, 23)
LENGTHS = {2: (1500, 60), 3: (12000, 400)}  # step: tokens of a prompt, of a response


def _config(*overrides: str) -> Config:
    small = ["model.build.num_layers=12", "rollout.prompts_per_step=4", "data.image_size=224", "data.task=mixed"]
    return load_config(packaged_recipe("rollplex_32b"), [*small, *overrides])


def _cost(config: Config, prompt: int, response: int, device: Hardware, pack: int = 1) -> StepCost:
    shape = shape_of(config.model)
    side = Side(ModelCounts(shape, 2), device, Parallel())
    group = GroupLoad(video_prompt(prompt, prompt, shape.vision, tokens_per_frame=64), (response,) * 8)
    algorithm = Algorithm(
        reference=True,
        prefill_is_actor_prefix=True,
        micro_batch_tokens=2048,
        pack_groups=pack,
        activations="checkpoint",
    )
    return StepCost(side, side, algorithm, (group,) * len(IDS), max_rows=256)


def _spans(config: Config, device: Hardware, pack: int = 1) -> list[Span]:
    """What a run on `device` writes: decoding for each group, passes for each unit of `pack` groups."""
    spans, passes = [], [Phase.PREFILL, Phase.REF_PREFIX, Phase.REF_RESPONSE, Phase.ACTOR_RESPONSE]
    for step, (prompt, response) in LENGTHS.items():
        cost = _cost(config, prompt, response, device, pack)
        for place, group in enumerate(IDS):
            spans.append(Span("decode", "decode", 0.0, cost.task(Task(Phase.DECODE, place)).total, step, group))
            if place % pack == 0:
                for phase in (*passes, Phase.PREFIX_BACKWARD):
                    spans.append(Span(phase, "main", 0.0, pack * cost.task(Task(phase, place)).total, step, group))
        spans.append(Span("optimizer", "main", 0.0, cost.optimizer.total, step))
        spans.append(Span("publish", "main", 0.0, 3e-4, step))
    return spans


def _metrics(decode_slowdown: float | None = None) -> str:
    lines = []
    for step, (prompt, response) in LENGTHS.items():
        unique, repeated = 4 * prompt + 32 * response, 32 * (prompt + response)
        row = {
            "step": step,
            "prefix/unique_tokens_ratio": unique / repeated,
            "completions/mean_length": float(response),
        }
        row["completions/max_length"] = float(response)
        if decode_slowdown is not None:
            row["overlap/decode_slowdown"] = decode_slowdown
        lines.append(json.dumps(row) + "\n")
    return "".join(lines)


def _folder(path: Path, config: Config, spans: list[Span], metrics: str) -> Path:
    path.mkdir()
    (path / "config.yaml").write_text(dump_config(config))
    (path / "metrics.jsonl").write_text(metrics)
    (path / "trace.jsonl").write_text(to_jsonl(spans))
    return path


def _calibrate(*args: object) -> Result:
    return CliRunner().invoke(app, ["calibrate", *map(str, args)])


@pytest.mark.parametrize("pack", [1, 2])
def test_known_efficiencies_come_back_out_of_a_run_folder(tmp_path: Path, pack: int) -> None:
    config = _config()
    run, out = _folder(tmp_path / "run", config, _spans(config, TRUE, pack), _metrics(1.3)), tmp_path / "machine.json"
    result = _calibrate(run, "--hardware", "a100-80g", "--out", out)
    assert result.exit_code == 0, result.output
    assert "publish" not in result.stdout and "--contention 1.3" in result.stdout
    found = device_named(str(out)).efficiency
    for field in ("matmul", "attention", "memory", "decode_step_s"):
        assert getattr(found, field) == pytest.approx(getattr(TRUE.efficiency, field), rel=0.05), field
    facts = json.loads(out.read_text())
    assert (facts["source"], facts["contention"], facts["runs"]) == ("measured", 1.3, [str(run)])
    assert all(abs(left["relative"]) < 0.02 for left in facts["residuals"].values())


def test_spans_beside_the_window_are_left_out(tmp_path: Path) -> None:
    config = _config()
    spans = _spans(config, TRUE)
    metrics = [json.loads(line) for line in _metrics().splitlines()]
    steps = traced_steps(config, spans, metrics, TRUE, eager=False)
    decode = max((span for span in spans if span.name == "decode"), key=lambda span: span.end_s)
    late = [dataclasses.replace(s, start_s=s.start_s + 1e3, end_s=s.end_s + 1e3) for s in spans if s is not decode]
    window = dataclasses.replace(decode, name="ref_prefix", lane="window")
    assert len(measured_spans(alone([*late, decode, window]), steps)) == len(measured_spans(alone(spans), steps)) - 1


def test_lengths_are_those_of_the_metrics() -> None:
    """Predictions for the true machine are the spans to a rounding: prompts and responses were found again."""
    config = _config()
    metrics = [json.loads(line) for line in _metrics().splitlines()]
    spans = _spans(config, TRUE)
    for one in measured_spans(spans, traced_steps(config, spans, metrics, TRUE, eager=False)):
        assert one.predict(TRUE) == pytest.approx(one.seconds, rel=1e-6), one.phase


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("algorithm.num_iterations=2",), "num_iterations at 1"),
        (("model.lora={}",), "model.lora"),
        (("algorithm.dynamic_sampling=resample",), "dynamic_sampling"),
    ],
)
def test_runs_that_cannot_be_told_apart(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        traced_steps(_config(*overrides), [], [], TRUE, eager=False)


def test_folders_that_are_no_traced_run(tmp_path: Path) -> None:
    config = _config()
    run = _folder(tmp_path / "run_a", config, _spans(config, TRUE), _metrics())
    for folder, words in (
        (tmp_path / "run_b", "did you mean"),
        (_folder(tmp_path / "empty", config, [], _metrics()), "no span of the trace"),
    ):
        result = _calibrate(folder, "--out", tmp_path / "out.json")
        assert result.exit_code == 2 and words in " ".join(result.output.split()), result.output
    (run / "trace.jsonl").unlink()
    result = _calibrate(run, "--out", tmp_path / "out.json")
    assert result.exit_code == 2 and "run.trace_steps" in result.output
    assert not (tmp_path / "out.json").exists()


def test_a_file_that_is_no_calibration(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ConfigError, match="no record 'hardware'"):
        device_named(str(tmp_path / "list.json"))
    assert device_named("h20").name == "h20"
