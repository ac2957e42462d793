"""The warm-started model is made once, kept, and used again by exactly the runs that would make the same one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollplex.config import Config
from rollplex.errors import CheckpointError
from rollplex.recipes.load import load_config
from rollplex.recipes.packaged import packaged_recipe
from rollplex.runtime.trainer import Trainer, train


class Counter:
    """Observes how many supervised steps a run takes."""

    def __init__(self) -> None:
        self.supervised = 0

    def on_warm_start_step(self, *_: Any) -> None:
        self.supervised += 1

    def __getattr__(self, event: str) -> Any:
        return lambda *_: None


def _config(folder: Path, *overrides: str) -> Config:
    options = [f"output_dir={folder / 'run'}", f"warm_start.path={folder / 'warm'}", "warm_start.steps=2"]
    return load_config(
        packaged_recipe("tiny_qwen2_5_vl"), [*options, "batch_size=2", "max_steps=1", "save_steps=1", *overrides]
    )


def _supervised_steps(config: Config) -> int:
    counter = Counter()
    Trainer(config, counter).close()
    return counter.supervised


@pytest.fixture
def made(tmp_path: Path) -> Path:
    assert _supervised_steps(_config(tmp_path)) == 2
    return tmp_path


@pytest.mark.parametrize(
    "override",
    ["loss_type=grpo", "media_workers=1", "media_timeout_s=7", "data.eval_split=test", "micro_batch_tokens=100"],
)
def test_used_again_where_the_weights_would_be_the_same(made, override):
    assert _supervised_steps(_config(made, override)) == 0


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("run.seed=1", "run.seed was 0, is 1"),
        ("data.num_rows=8", "data.num_rows was 64, is 8"),
        ("warm_start.learning_rate=0.1", "warm_start.learning_rate was 0.001, is 0.1"),
        ("model.freeze_vision=true", "model.freeze_vision was False, is True"),
    ],
)
def test_other_options_are_named_and_the_folder_is_left_alone(made, override, named):
    before = {path.name: path.stat().st_mtime_ns for path in (made / "warm").iterdir()}
    with pytest.raises(CheckpointError, match=rf"other options: {named}; .*warm_start\.path"):
        Trainer(_config(made, override))
    assert {path.name: path.stat().st_mtime_ns for path in (made / "warm").iterdir()} == before


def test_a_damaged_folder_is_named_with_the_remedy(made):
    weights = made / "warm" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"warm is damaged: remove that folder.*model\.safetensors is cut short"):
        Trainer(_config(made))


def test_options_that_a_resume_may_change_do_not_lose_the_reference(tmp_path):
    """With a KL term the resumed run needs the start again, whatever made the first run stop."""
    beta = ("beta=0.1", "lr_scheduler_type=constant")
    train(_config(tmp_path, *beta))
    resumed = _config(tmp_path, *beta, "max_steps=2", "media_timeout_s=500", "resume_from_checkpoint=auto")
    assert train(resumed).steps == 2
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]


@pytest.mark.parametrize("family", ["tiny_qwen2_5_vl", "tiny_qwen3_vl"])
def test_adapters_resume_with_the_tokenizer_and_the_start_that_they_had(tmp_path, family):
    options = [f"output_dir={tmp_path / 'run'}", "warm_start.steps=1", "batch_size=2", "save_steps=1", "model.lora={}"]
    for steps, resume in ((1, "null"), (2, "auto")):
        recipe = packaged_recipe(family)
        more = ["beta=0.1", f"max_steps={steps}", f"resume_from_checkpoint={resume}", "lr_scheduler_type=constant"]
        train(load_config(recipe, [*options, *more]))
    first, last = (tmp_path / "run" / f"checkpoint-{step}" / "tokenizer.json" for step in (1, 2))
    assert first.read_bytes() == last.read_bytes()
