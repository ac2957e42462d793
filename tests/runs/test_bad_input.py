"""Bad input in the middle of a run: a clear error that names the row, the last checkpoint intact, and a way on."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from rollplex.config import Config
from rollplex.errors import DeadlineError, MediaError, OverlongPromptError, RewardError, RollplexError, RowError
from rollplex.runtime.trainer import train
from rollplex.train.checkpoint_folder import newest_complete, verify_checksums

GOOD_ROW = {"prompt": "one plus two?", "answer": "3"}


def reward(completions: list[str], completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[Any]:
    """Misbehaves in the second step, in the way that the environment names."""
    scores: list[Any] = [float(sum(ids) % 7) for ids in completion_ids]
    match os.environ.get("REWARD_FAULT") if trainer_state.global_step == 1 else None:
        case "length":
            return scores[1:]
        case "nan":
            return [float("nan"), *scores[1:]]
        case "exception":
            raise KeyError("no such answer")
        case "never":
            time.sleep(3600)
    return scores


def _chat(*kinds: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*({"type": kind} for kind in kinds), {"type": "text", "text": "What is it?"}]}]


def _config(folder: Path, resume: str | None = None, reward_timeout_s: float = 60.0) -> Config:
    return Config.model_validate(
        {
            "run": {"output_dir": str(folder / "run"), "num_threads": 1, "save_steps": 1,
                    "resume_from_checkpoint": resume},
            "model": {"build": {}},
            "data": {"task": "files", "path": str(folder / "rows.jsonl"), "shuffle": False, "max_prompt_tokens": 60},
            "rewards": {"reward_funcs": [f"{__file__}:reward"], "timeout_s": reward_timeout_s},
            "rollout": {"prompts_per_step": 1, "num_generations": 2, "max_completion_length": 3},
            "train": {"max_steps": 2, "learning_rate": 1e-3},
        }
    )  # fmt: skip


def _write_rows(folder: Path, second: dict[str, Any]) -> None:
    rows = [GOOD_ROW, second]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _media_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("rollplex-media")}


def _fails_then_goes_on(folder: Path, error: type[RollplexError], message: str, **options: float) -> None:
    before = _media_threads()
    with pytest.raises(error, match=message) as caught:
        train(_config(folder, **options))
    assert type(caught.value) is error
    assert _media_threads() <= before
    checkpoint = folder / "run" / "checkpoint-1"
    assert newest_complete(folder / "run") == checkpoint
    verify_checksums(checkpoint)


def _mended(folder: Path) -> None:
    result = train(_config(folder, resume="auto"))
    assert result.steps == 2
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    # The tokenizer was trained on the rows as they were, so it must be kept, not trained again on the mended ones.
    first, last = (folder / "run" / f"checkpoint-{step}" / "tokenizer.json" for step in (1, 2))
    assert first.read_bytes() == last.read_bytes()


def _empty_video(path: Path) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        container.start_encoding()
        container.mux(stream.encode())


ROWS = {
    "fewer media than placeholders": ({"prompt": _chat("image", "image"), "images": ["good.png"]}, RowError,
                                      r"row 1: the prompt has 2 image placeholders but the row has 1"),
    "unreadable image": ({"prompt": _chat("image"), "images": ["bad.png"]}, MediaError,
                         r"row 1: images\[0\].*cannot be read"),
    "missing image": ({"prompt": _chat("image"), "images": ["none.png"]}, MediaError,
                      r"row 1: images\[0\].*none\.png does not exist"),
    "missing video": ({"prompt": _chat("video"), "videos": ["none.mp4"]}, MediaError,
                      r"row 1: videos\[0\].*none\.mp4 does not exist"),
    "video without frames": ({"prompt": _chat("video"), "videos": ["empty.avi"]}, MediaError,
                             r"row 1: videos\[0\].*zero frames"),
    "too long with its picture": ({"prompt": _chat("image"), "images": ["large.png"]}, OverlongPromptError,
                                  r"row 1: the prompt has \d+ tokens.*data\.max_prompt_tokens allows 60"),
    "no prompt": ({"question": "?"}, RowError, r"row 1: no column 'prompt', found \['question'\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_bad_row(tmp_path, name):
    Image.new("RGB", (56, 56), "red").save(tmp_path / "good.png")
    Image.fromarray(np.zeros((448, 448, 3), np.uint8)).save(tmp_path / "large.png")
    (tmp_path / "bad.png").write_bytes((tmp_path / "large.png").read_bytes()[:60])
    _empty_video(tmp_path / "empty.avi")
    row, error, message = ROWS[name]
    _write_rows(tmp_path, row)
    _fails_then_goes_on(tmp_path, error, message)
    _write_rows(tmp_path, GOOD_ROW)
    _mended(tmp_path)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("length", RewardError, r"row 1 .*'reward' returned 1 rewards, needed 2"),
        ("nan", RewardError, r"row 1 .*'reward' returned nan for completion 0"),
        ("exception", RewardError, r"row 1 .*'reward' raised KeyError: 'no such answer'"),
        ("never", DeadlineError, r"row 1 .*'reward' did not return within rewards\.timeout_s=3 s"),
    ],
)
def test_a_bad_reward(tmp_path, monkeypatch, fault, error, message):
    _write_rows(tmp_path, GOOD_ROW)
    monkeypatch.setenv("REWARD_FAULT", fault)
    # Other calls return at once, and a busy machine must not keep them for as long.
    limit = {"reward_timeout_s": 3.0} if fault == "never" else {}
    _fails_then_goes_on(tmp_path, error, message, **limit)
    monkeypatch.delenv("REWARD_FAULT")
    _mended(tmp_path)
