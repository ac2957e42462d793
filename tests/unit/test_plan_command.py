"""`rollplex plan`: its parts, its JSON, its table, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rollplex.cli import app
from rollplex.config import BuildConfig, Config, ModelConfig, SharingConfig
from rollplex.errors import ConfigError
from rollplex.models.build import build_model, build_processor
from rollplex.planner.report import SECTIONS, plain_lines, plan_facts, plan_lines
from rollplex.planner.sharing import sharing_facts
from rollplex.runtime.session import build_session

GIB = 1 << 30


def _plan(*args: str) -> Result:
    return CliRunner().invoke(app, ["plan", *args])


def _sharing(*args: str) -> dict[str, Any]:
    result = _plan(*args, "--section", "sharing", "--json")
    assert result.exit_code == 0, result.output
    facts: dict[str, Any] = json.loads(result.stdout)["sharing"]
    return facts


def test_published_setting() -> None:
    facts = _sharing("rollplex_32b")
    shares = [round(100 * facts[name], 2) for name in ("aligned", "transposed", "rebuilt")]
    assert shares == [60.06, 32.77, 7.17]
    sizes = {name: round(facts[f"{name}_bytes"] / GIB, 2) for name in ("rebuild_buffer", "missing", "second_copy")}
    assert sizes == {"rebuild_buffer": 1.09, "missing": 7.63, "second_copy": 15.26}
    assert facts["received_bytes"] == facts["missing_bytes"]


def test_hugging_face_layout_on_both_sides_rebuilds_nothing() -> None:
    facts = _sharing("rollplex_32b", "train_layout=hf", "rollout_layout=hf")
    assert (facts["rebuilt"], facts["rebuild_buffer_bytes"]) == (0.0, 0)
    assert facts["aligned"] + facts["transposed"] == pytest.approx(1.0)


@pytest.mark.parametrize("recipe", ["rollplex_32b", "tiny_qwen3_vl"])
def test_table_adds_up(recipe: str) -> None:
    facts = _sharing(recipe)
    rows = facts["tensors"]
    assert sum(row["bytes"] for row in rows) == facts["model_bytes"]
    assert sum(row["train_bytes"] for row in rows) == facts["train_shard_bytes"]
    assert sum(row["rollout_bytes"] for row in rows) == facts["second_copy_bytes"]
    assert sum(row["received_bytes"] for row in rows) == facts["received_bytes"]
    assert sum(row["share"] for row in rows) == pytest.approx(1.0)
    assert {row["class"] for row in rows if row["reason"]} <= {"rebuilt"}
    assert all(row["reason"] for row in rows if row["class"] == "rebuilt")
    # The backing holds both sides' aliases and training's piece of what is rebuilt; gaps of alignment aside.
    held = sum(
        row["train_bytes"] if row["class"] == "rebuilt" else max(row["train_bytes"], row["rollout_bytes"])
        for row in rows
    )
    assert 0 <= facts["backing_bytes"] - held - facts["vision_bytes"] < 1 << 20


def test_every_part_is_in_the_json_and_in_the_text() -> None:
    result = _plan("rollplex_32b", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert set(facts) == set(SECTIONS)
    assert "naive_gib" in facts["memory"] and "sharing" in facts
    text = _plan("rollplex_32b")
    assert text.exit_code == 0 and text.stdout.isascii()
    lines = text.stdout.splitlines()
    assert [line for line in lines if line in SECTIONS] == list(SECTIONS)
    (packed,) = (line for line in lines if "qkv_proj.weight  " in line)
    assert packed.split()[1:] == ["rebuilt", "64", "4.38", "GiB", "7.17%", "560.00", "MiB"]
    assert any("packed [Q; K; V]" in line for line in lines)
    assert any(line.split() == ["1.09", "GiB", "rebuild", "buffers", "when", "shared"] for line in lines)


def test_small_sizes_keep_their_digits() -> None:
    text = _plan("tiny_qwen2_5_vl", "--section", "sharing")
    assert "KiB" in text.stdout and "0.00 GiB" not in text.stdout


def test_parts_by_name() -> None:
    config = Config(model=ModelConfig(build=BuildConfig()))
    assert list(plan_facts(config, ["sharing"])) == ["sharing"]
    with pytest.raises(ConfigError, match=r"--section memry .*sharing, memory"):
        plan_facts(config, ["memry"])
    facts = {"sharing": sharing_facts(config)}
    assert next(plan_lines(facts)) == "sharing"
    assert list(plain_lines({"a": 1, "b": [1], "c": 0.123456, "d": None})) == [
        f"{'a':24} 1", f"{'c':24} 0.1235", f"{'d':24} None"
    ]  # fmt: skip


def test_sizes_of_a_model_folder(tmp_path: Path) -> None:
    build = BuildConfig(num_heads=4, num_kv_heads=2, vocab_size=320)
    processor = build_processor(build.family, ["one two"], 320)
    model = build_model(build, processor, seed=0)
    model.config.save_pretrained(tmp_path)
    sharing = SharingConfig(train_tp=2, rollout_tp=4)
    facts = sharing_facts(Config(model=ModelConfig(path=str(tmp_path)), sharing=sharing))
    counts = [(name.startswith("model.visual."), p.numel() * 4) for name, p in model.named_parameters()]
    assert facts["vision_bytes"] == sum(size for vision, size in counts if vision)
    assert facts["model_bytes"] == sum(size for vision, size in counts if not vision)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["rollout_tp=3"], ("config error", "sharing.rollout_tp 3", "1, 2, 4, 8")),
        (["rollout_tp=5"], ("config error", "8 key/value heads", "set sharing.rollout_tp to one of 1, 2, 4, 8")),
        (
            ["vocab_padding=hf", "build.vocab_size=152063"],
            ("config error", "152063", "sharing.vocab_padding to shared"),
        ),
        (["model.build=null", "model.path=no-such-folder"], ("model error", "no-such-folder", "model.build")),
        (["--section", "shring"], ("config error", "--section shring", "sharing")),
    ],
)
def test_refusals(args: list[str], words: tuple[str, ...]) -> None:
    result = _plan("rollplex_32b", *args)
    assert result.exit_code == 2
    assert all(word in result.output for word in words), result.output


def test_training_refuses_what_only_the_plan_reads() -> None:
    config = Config(model=ModelConfig(build=BuildConfig()), sharing=SharingConfig(rollout_tp=2, train_tp=2))
    with pytest.raises(ConfigError, match=r"sharing\.train_tp is 2.*rollplex plan"):
        build_session(config)
