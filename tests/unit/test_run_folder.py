"""Run folder: each step once whatever the kill, other runs refused, completions readable, trackers optional."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rollplex.config import Config
from rollplex.errors import CheckpointError, ConfigError
from rollplex.memory.ledger import Entry, Ledger
from rollplex.recipes.load import load_config
from rollplex.runtime.completions import contact_sheet, prompt_text
from rollplex.runtime.run_folder import RunFolder, read_steps
from rollplex.runtime.trackers import Trackers
from rollplex.types import Example, FinishReason, Group, PromptSpec, Response, ScoredGroup, StepReport, VideoClip


def _config(output_dir: Path, **run: Any) -> Config:
    return Config.model_validate({"model": {"build": {}}, "run": {"output_dir": str(output_dir)} | run})


@pytest.fixture
def opened() -> Iterator[Callable[..., RunFolder]]:
    """RunFolder.open, closed at the end of the test."""
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(closing(RunFolder.open(*args, **kwargs)))


def _log(folder: RunFolder, steps: range, loss: float = 0.5) -> None:
    for step in steps:
        folder.log(StepReport(step, {"loss": loss, "reward": float(step)}))


def _steps(folder: Path) -> list[int]:
    return [line["step"] for line in read_steps(folder / "metrics.jsonl")]


def test_a_new_run_writes_its_configuration_and_each_step_at_once(opened, tmp_path):
    config = _config(tmp_path / "run", seed=4)
    # A text for YAML 1.1, a number for the YAML 1.2 of recipes.
    config = config.model_copy(update={"data": config.data.model_copy(update={"split": "1e-6"})})
    folder = opened(config)
    assert load_config(tmp_path / "run" / "config.yaml") == config
    for step in (1, 2):
        _log(folder, range(step, step + 1))
        assert _steps(tmp_path / "run") == list(range(1, step + 1))  # readable while the run goes on
    folder.finish({"eval_reward": 0.75})
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == {
        "steps": 2,
        "evaluation": {"eval_reward": 0.75},
    }
    with pytest.raises(CheckpointError, match="closed"):
        _log(folder, range(3, 4))


def test_values_that_are_not_finite_are_null(opened, tmp_path):
    folder = opened(_config(tmp_path))
    folder.log(StepReport(1, {"loss": float("nan"), "kl": float("inf"), "reward": 1.0}))
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"step": 1, "loss": None, "kl": None, "reward": 1.0}


@given(logged=st.integers(1, 8), resume=st.integers(0, 8), cut=st.integers(0, 60))
def test_after_a_kill_and_a_resume_each_step_is_there_once(tmp_path_factory, logged, resume, cut):
    resume = min(resume, logged)
    path = tmp_path_factory.mktemp("run")
    first = RunFolder.open(_config(path))
    _log(first, range(1, logged + 1), loss=1.0)
    first.close()
    metrics = path / "metrics.jsonl"
    whole = metrics.read_text()
    # The kill cut the line of the step after the last logged one: no more than a part of it, without its newline.
    metrics.write_text(whole + '{"step": 9, "loss": 0.25, "reward": 9.0, "num_tokens": 12345.0}'[:cut])
    second = RunFolder.open(_config(path, resume_from_checkpoint="auto"), resume_step=resume)
    assert _steps(path) == list(range(1, resume + 1))
    _log(second, range(resume + 1, 10), loss=2.0)
    second.close()
    lines = read_steps(metrics)
    assert [line["step"] for line in lines] == list(range(1, 10))
    assert [line["loss"] for line in lines] == [1.0] * resume + [2.0] * (9 - resume)
    assert [name for name in os.listdir(path) if name.startswith(".")] == []


def test_a_resume_continues_bytes_of_earlier_lines(opened, tmp_path):
    folder = opened(_config(tmp_path))
    folder.log(StepReport(1, {"loss": 0.1 + 0.2, "tiny": 5e-324, "large": 1.7976931348623157e308}))
    folder.close()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    RunFolder.open(_config(tmp_path, resume_from_checkpoint="auto"), resume_step=1).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


# Python 3.12 warns; the writer runs no thread pool and takes no lock that another thread may hold.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_killed_while_logging(opened, tmp_path):
    for round_ in range(5):
        path = tmp_path / str(round_)
        writer = os.fork()
        if writer == 0:
            try:
                _log(RunFolder.open(_config(path)), range(1, 10**9))
            finally:
                os._exit(1)
        until = time.monotonic() + 120
        while not (path / "metrics.jsonl").exists() or len(_steps(path)) <= 10 * round_:
            assert time.monotonic() < until
        os.kill(writer, signal.SIGKILL)
        assert os.waitpid(writer, 0)[1] == signal.SIGKILL
        logged = _steps(path)
        assert logged == list(range(1, len(logged) + 1)) and len(logged) > 10 * round_
        keep = len(logged) // 2
        folder = opened(_config(path, resume_from_checkpoint="auto"), resume_step=keep)
        _log(folder, range(keep + 1, keep + 4))
        assert _steps(path) == list(range(1, keep + 4))


def test_damage_before_the_last_line_is_an_error(opened, tmp_path):
    folder = opened(_config(tmp_path))
    _log(folder, range(1, 4))
    folder.close()
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"step": 2', '"step" 2'))
    before = metrics.read_bytes()
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl, line 2 of 3 is damaged"):
        opened(_config(tmp_path, resume_from_checkpoint="auto"), resume_step=3)
    assert metrics.read_bytes() == before


@pytest.mark.parametrize("left", ["config.yaml", "metrics.jsonl", "checkpoint-5"])
def test_a_folder_of_another_run_is_refused_unless_resuming(opened, tmp_path, left):
    path = tmp_path / "run"
    path.mkdir()
    (path / left).mkdir() if left.startswith("checkpoint") else (path / left).write_text("")
    pattern = rf"run\.output_dir .*run holds another run \({left}\).*run\.resume_from_checkpoint=auto"
    with pytest.raises(ConfigError, match=pattern):
        opened(_config(path))
    with pytest.raises(ConfigError, match=r"another run than run\.resume_from_checkpoint"):
        opened(_config(path, resume_from_checkpoint=str(tmp_path / "other" / "checkpoint-1")), resume_step=1)
    assert os.listdir(path) == [left]
    RunFolder.open(_config(path, resume_from_checkpoint="auto")).close()
    RunFolder.open(_config(path, resume_from_checkpoint=str(path / "checkpoint-5")), resume_step=5).close()


def test_a_warm_start_or_other_files_in_the_folder_are_no_run(tmp_path):
    (tmp_path / "warm-start").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    RunFolder.open(_config(tmp_path)).close()


def test_output_dir_that_cannot_be_a_folder(opened, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.output_dir .* is a file"):
        opened(_config(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"cannot write the run folder .*run\.output_dir"):
        opened(_config(tmp_path / "file" / "below"))


def test_a_full_disk_while_logging_names_the_way_on(opened, tmp_path):
    folder = opened(_config(tmp_path))
    folder.close()
    folder._metrics = open("/dev/full", "a", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: .*No space left.*resume_from_checkpoint=auto"):
        _log(folder, range(1, 2))
    folder.close()  # the line is still in its buffer: that must not become a second error that hides the first


def _group(
    row: int, prompt: Any, images: tuple[Image.Image, ...] = (), videos: tuple[VideoClip, ...] = ()
) -> ScoredGroup:
    spec = PromptSpec(
        row=row,
        input_ids=torch.tensor([1, 2]),
        positions=torch.zeros(3, 2, dtype=torch.long),
        next_position=1,
        token_types=torch.zeros(2, dtype=torch.int32),
        pixel_values=None,
        image_grid_thw=None,
        pixel_values_videos=None,
        video_grid_thw=None,
        digest="0" * 64,
    )
    responses = (
        Response(0, (5, 6, 7), (-0.1, -0.2, -0.3), FinishReason.STOP),
        Response(1, (5,), (-0.1,), FinishReason.LENGTH),
    )
    example = Example(row, prompt, images, videos, {"answer": "3", "tensor": object()})
    group = Group(40 + row, example, spec, responses, weight_version=2)
    return ScoredGroup(group, (1.0, None), {"exact": (1.0, None)}, (0.7, -0.7), {"parsed": ("3", None)})


def _clip(frames: int) -> VideoClip:
    pixels = np.zeros((frames, 10, 20, 3), np.uint8)
    pixels[:] = (np.arange(frames) * (200 // max(1, frames - 1)))[:, None, None, None]
    return VideoClip(pixels, 2.0, tuple(range(frames)), frames, "clip.mp4")


@pytest.fixture
def two_groups() -> tuple[list[ScoredGroup], list[tuple[str, ...]]]:
    chat = [
        {"role": "user", "content": [{"type": "image"}, {"type": "video"}, {"type": "text", "text": "How <many>?"}]}
    ]
    image = Image.new("RGBA", (1024, 256), (255, 0, 0, 128))
    groups = [_group(3, chat, (image,), (_clip(20),)), _group(4, "plain & simple")]
    return groups, [("three <b>\u00e9\n", "</pre>"), ("a", "b")]


def test_completions_for_programs(opened, tmp_path, two_groups):
    opened(_config(tmp_path)).log_completions(10, *two_groups)
    lines = [json.loads(line) for line in (tmp_path / "completions" / "step-10.jsonl").read_text().splitlines()]
    assert [(line["row"], line["index"]) for line in lines] == [(3, 0), (3, 1), (4, 0), (4, 1)]
    assert lines[0] == {
        "step": 10,
        "row": 3,
        "rollout_id": 43,
        "weight_version": 2,
        "index": 0,
        "prompt": "user: [image] [video] How <many>?",
        "pictures": ["pictures/row-3-image-0.png", "pictures/row-3-video-0.png"],
        "completion": "three <b>\u00e9\n",
        "finish": "stop",
        "num_tokens": 3,
        "reward": 1.0,
        "rewards": {"exact": 1.0},
        "advantage": 0.7,
        "columns": {"answer": "3"},
        "extras": {"parsed": "3"},
    }
    assert (lines[1]["reward"], lines[1]["finish"]) == (None, "length")
    with Image.open(tmp_path / "completions" / lines[0]["pictures"][0]) as picture:
        assert (picture.size, picture.format, picture.mode) == ((512, 128), "PNG", "RGB")


def test_completions_for_people(opened, tmp_path, two_groups):
    page = opened(_config(tmp_path)).log_completions(10, *two_groups)
    text = page.read_text()
    assert page.name == "step-10.html"
    for source in ("pictures/row-3-image-0.png", "pictures/row-3-video-0.png"):
        assert f'src="{source}"' in text
        assert (page.parent / source).is_file()
    assert "three &lt;b&gt;" in text
    assert "<b>\u00e9" not in text
    assert "&lt;/pre&gt;" in text
    assert "plain &amp; simple" in text
    assert text.count("<section>") == 2


def test_a_turn_without_content_shows_its_tool_calls():
    calls = [{"type": "function", "function": {"name": "crop", "arguments": {"x": 1}}}]
    chat = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": "done"},
    ]
    assert prompt_text(Example(0, chat)) == f"user: Look.\nassistant: {json.dumps(calls)}\ntool: done"


def test_a_resume_drops_completions_of_later_steps(opened, tmp_path, two_groups):
    folder = opened(_config(tmp_path))
    for step in (9, 10, 11):
        folder.log_completions(step, *two_groups)
    folder.close()
    RunFolder.open(_config(tmp_path, resume_from_checkpoint="auto"), resume_step=10).close()
    assert sorted(path.name for path in (tmp_path / "completions").glob("step-*")) == [
        "step-10.html",
        "step-10.jsonl",
        "step-9.html",
        "step-9.jsonl",
    ]


@pytest.mark.parametrize(("frames", "size"), [(1, (20, 10)), (3, (60, 10)), (8, (80, 20)), (30, (80, 20))])
def test_contact_sheet_shows_first_to_last(frames, size):
    clip = _clip(frames)
    sheet = np.asarray(contact_sheet(clip))
    assert sheet.shape[:2] == size[::-1]
    shown = min(8, frames)
    tiles = [int(sheet[i // 4 * 10 + 5, i % 4 * 20 + 10, 0]) for i in range(shown)]
    assert tiles == sorted(tiles)
    assert tiles[0] == clip.frames[0, 0, 0, 0]
    assert tiles[-1] == clip.frames[-1, 0, 0, 0]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_named(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"run\.report_to names '{name}'.*rollplex\[trackers\]"):
        Trackers(_config(tmp_path, report_to=[name]))
    Trackers(_config(tmp_path)).close()  # and not wanted when not named


def test_tensorboard_receives_each_step_and_forgets_what_a_resume_repeats(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = _config(tmp_path, report_to=["tensorboard"])
    for resume_step, steps, value in ((None, range(1, 5), 1.0), (2, range(3, 6), 2.0)):
        trackers = Trackers(config, resume_step=resume_step)
        for step in steps:
            trackers.log(StepReport(step, {"reward": value}))
        trackers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]


def test_wandb_receives_each_step_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    trackers = Trackers(_config(tmp_path, report_to=["wandb"]))
    for step in (1, 2):
        trackers.log(StepReport(step, {"reward": 0.5}))
    trackers.close()
    [data] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"reward" in data.read_bytes()


def test_trackio_receives_each_step(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    trackers = Trackers(_config(tmp_path / "run", report_to=["trackio"]))
    trackers.log(StepReport(1, {"reward": 0.5, "loss": float("nan")}))
    trackers.close()
    assert any(path.is_file() for path in (tmp_path / "trackio").rglob("*"))


FAILING_TRACKER = """
taken = []
def init(**options): pass
def log(metrics, step):
    if step in (2, 3, 5):
        raise ConnectionError("quota")
    taken.append(step)
def finish(): raise TimeoutError("no answer")
"""


def test_a_tracker_that_fails_while_the_run_goes_on_is_warned_about_once_per_outage(tmp_path, monkeypatch, caplog):
    """A package of its name that behaves as a service out of reach: later steps are tried, others are not held up."""
    pytest.importorskip("tensorboard")
    (tmp_path / "trackio.py").write_text(FAILING_TRACKER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    trackers = Trackers(_config(tmp_path / "run", report_to=["tensorboard", "trackio"]))
    for step in range(1, 7):
        trackers.log(StepReport(step, {"reward": 0.5}))
    assert sys.modules["trackio"].taken == [1, 4, 6]
    trackers.close()
    monkeypatch.delitem(sys.modules, "trackio")
    assert [record.getMessage().split("; ")[0] for record in caplog.records] == [
        "tracker trackio (run.report_to) did not take the metrics of step 2: ConnectionError: quota",
        "tracker trackio (run.report_to) did not take the metrics of step 5: ConnectionError: quota",
        "tracker trackio (run.report_to) could not be closed, and may lack the newest steps: TimeoutError: no answer",
    ]
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def _ledger(planned_bytes: int) -> Ledger:
    return Ledger((Entry("decode", planned_bytes, None),), planned_bytes, 5, 0)


@given(cut=st.integers(0, 30))
def test_after_a_resume_each_step_has_its_own_bytes_alone(tmp_path_factory, cut):
    """The second attempt counts fewer steps, under another plan: nothing of the first is left behind its checkpoint."""
    path = tmp_path_factory.mktemp("run")
    with closing(RunFolder.open(_config(path))) as first:
        for step in (1, 2, 3):
            first.log_ledger(step, _ledger(10))
    memory = path / "memory.jsonl"
    memory.write_text(memory.read_text() + '{"step": 4, "entries": [{"phases"'[:cut])
    with closing(RunFolder.open(_config(path, resume_from_checkpoint="auto"), resume_step=1)) as second:
        assert [line["step"] for line in read_steps(memory)] == [1]
        second.log_ledger(3, _ledger(20))
    assert [(line["step"], line["planned_peak_bytes"]) for line in read_steps(memory)] == [(1, 10), (3, 20)]
