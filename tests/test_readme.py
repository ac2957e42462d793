"""The example of README.md works as it stands: its rows, reward, recipe and Python lines, on a small model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from rollplex.recipes.load import load_config
from rollplex.runtime.trainer import RunResult

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
# The only changes: no hub here, and seconds instead of hours.
SMALL = [
    "model.path=null",
    "model.build.family=qwen2_5_vl",
    "dtype=float32",
    "max_completion_length=4",
    "max_steps=2",
    "log_completions_steps=2",
]


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that README shows, entered."""
    (rows,) = _blocks("json")
    (tmp_path / "rows.jsonl").write_text(rows, encoding="utf-8")
    for number, row in enumerate(rows.splitlines()):
        for name in json.loads(row)["images"]:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            Image.new("RGB", (56, 84), (40 * number, 90, 200)).save(tmp_path / name)
    for block in [*_blocks("python"), *_blocks("yaml")]:
        named = re.match(r"# (\S+\.(?:py|yaml))\n", block)
        if named:
            (tmp_path / named[1]).write_text(block, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_example_trains(example: Path) -> None:
    (lines,) = [block for block in _blocks("python") if "load_config" in block]
    whole = lines.replace('["train.max_steps=10", "output_dir=runs/python"]', repr(SMALL))
    assert whole != lines, "README's Python lines changed: this test shortens their overrides"
    names: dict[str, object] = {}
    exec(compile(whole, "README.md", "exec"), names)
    result = names["result"]
    assert isinstance(result, RunResult)
    assert result.steps == 2
    for promised in ("config.yaml", "metrics.jsonl", "checkpoint-2", "completions"):
        assert (example / "runs" / "receipts" / promised).exists(), f"README promises {promised} in the run folder"


def test_the_reward_of_the_example_tells_right_from_wrong(example: Path) -> None:
    names: dict[str, object] = {}
    exec((example / "reward.py").read_text(encoding="utf-8"), names)
    function = names["right_total"]
    assert callable(function)
    chats = [[{"role": "assistant", "content": text}] for text in ("The total is 12.40.", "12.04")]
    assert function(completions=chats, solution=["12.40", "12.40"], prompts=[], images=[]) == [1.0, 0.0]


def test_the_recipe_of_the_example_is_valid_as_it_stands(example: Path) -> None:
    config = load_config(example / "receipts.yaml")
    assert config.model.path is not None
    assert config.rewards.reward_funcs == ("reward.py:right_total",)
