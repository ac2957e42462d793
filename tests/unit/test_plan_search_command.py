"""`rollplex plan --gpus --hardware`: its answer as text and JSON, what explains it, files as hardware, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rollplex.cli import app
from rollplex.planner.hardware import hardware, hardware_facts
from rollplex.planner.report import SECTIONS

SMALL = (
    "rollplex_32b", "model.build.num_layers=8", "rollout.prompts_per_step=8", "rollout.num_generations=4",
    "memory.cap_gib=70", "data.max_prompt_tokens=2048", "rollout.max_completion_length=512",
)  # fmt: skip
ON_FOUR = (*SMALL, "--gpus", "4", "--response-tokens", "100")


def _plan(*args: str) -> Result:
    return CliRunner().invoke(app, ["plan", *args])


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    result = _plan(*ON_FOUR, "--hardware", "h800", "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_answer_as_data(facts: dict[str, Any]) -> None:
    assert (facts["source"], facts["gpus"], facts["hardware"]["name"], facts["cap_gib"]) == ("simulated", 4, "h800", 70)
    seconds = [plan["seconds"] for plan in facts["plans"]]
    assert len(seconds) == 4 and seconds == sorted(seconds)
    assert facts["by_schedule"].keys() >= {"serial", "rollplex", "stream", "disaggregated", "rolloutpipe", "async"}
    assert sum(facts["came_of_them"].values()) == facts["considered"]
    for plan in facts["plans"]:
        assert plan["seconds"] == pytest.approx(plan["simulated_s"] + plan["moves_s"])
        assert sum(plan["causes"].values()) == pytest.approx(plan["seconds"])
        held = plan["sharing"]
        assert held["aligned"] + held["transposed"] + held["rebuilt"] == pytest.approx(1.0)


def test_the_text_says_what_the_data_say_and_explains_it(facts: dict[str, Any]) -> None:
    result = _plan(*ON_FOUR, "--hardware", "h800", "--explain")
    assert result.exit_code == 0, result.output
    text = result.stdout
    assert text.isascii()
    best = facts["plans"][0]
    (row,) = (line for line in text.splitlines() if line.startswith("1  "))
    degrees = [f"TP{s['tensor']} PP{s['pipeline']} DP{s['data']}" for s in (best["training"], best["rollout"])]
    assert row.split()[1:3] == [f"{best['seconds']:.4g}", best["schedule"]]
    assert all(words in row for words in (*degrees, best["limit"]))
    assert f"2 lost to 1 by {facts['runner_up']['slower_s']:.3g} s a step" in text
    explained = text[text.index("sent by a device") :]
    others = [name for name, plan in facts["by_schedule"].items() if plan not in facts["plans"]]
    assert "serial" in others and all(f"fastest {name}: {name}" in explained for name in others)
    for plan in (*facts["plans"], *facts["by_schedule"].values()):
        for parts in (plan["causes"], plan["phases"]):
            assert all(f"{value:10.3f}  {name}" in text for name, value in parts.items())
        for stage in plan["stages"]:
            assert stage["lower_s"] <= stage["estimate_s"] <= 1.001 * stage["upper_s"], stage
            assert (
                f"{stage['lower_s']:10.3f} <= {stage['estimate_s']:.3f} <= {stage['upper_s']:.3f}  {stage['name']}"
                in text
            )
        for fit in plan["memory"]:
            for total, part in (("peak", "at_peak"), ("naive", "at_naive_peak"), ("host", "host")):
                assert sum(r[f"{part}_gib"] for r in fit["records"]) == pytest.approx(fit[f"{total}_gib"])
            for r in fit["records"]:
                held = "".join(f"{r[f'{at}_gib']:10.2f}" for at in ("at_peak", "at_naive_peak", "host"))
                assert f"{held}  {r['name']:<32}{r['policy']}" in text
            assert sum(r["restore_s"] for r in fit["records"]) == pytest.approx(fit["exposed_s"])
        assert plan["moves_s"] == max(fit["exposed_s"] for fit in plan["memory"])
        if plan["sharing"] is not None:
            for kind in ("aligned", "transposed", "rebuilt"):
                rows = [row for row in plan["sharing"]["tensors"] if row["class"] == kind]
                assert sum(row["share"] for row in rows) == pytest.approx(plan["sharing"][kind])
                assert all(f"{row['share']:>10.2%}  {row['name']}, {kind}" in text for row in rows)
    short = _plan(*ON_FOUR, "--hardware", "h800")
    assert short.stdout == text[: len(short.stdout)] and len(short.stdout) < len(text)


def test_a_slower_device_from_a_file(facts: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    slow = hardware("h800").reaching(matmul=0.2, memory=0.3)
    path.write_text(json.dumps({"source": "measured", "hardware": hardware_facts(slow)}))
    result = _plan(*ON_FOUR, "--hardware", str(path), "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["plans"][0]["seconds"] > 1.5 * facts["plans"][0]["seconds"]


def test_without_a_search_the_plan_is_as_before() -> None:
    result = _plan("tiny_qwen3_vl", "data.max_prompt_tokens=64", "--json")
    assert list(json.loads(result.stdout)) == list(SECTIONS)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--gpus", "4"), ("needs --hardware",)),
        (("--explain",), ("needs --hardware",)),
        (("--response-tokens", "5"), ("--response-tokens", "needs --hardware")),
        (("--hardware", "h800", "--response-tokens", "0"), ("--response-tokens is 0",)),
        (("--hardware", "h800", "--contention", "inf"), ("--contention is inf",)),
        (("--hardware", "H80"), ("--hardware is 'H80'", "did you mean h800?")),
        (("--hardware", "a100"), ("did you mean a100-80g or a100-40g-pcie?",)),
        (("--hardware", "missing.json"), ("missing.json", "no file of `rollplex calibrate`")),
        (("--hardware", "h800", "--section", "memory"), ("--section", "--gpus")),
        (("--hardware", "h800", "--gpus", "0"), ("--gpus is 0",)),
        (("--hardware", "h800", "memory.cap_gib=99"), ("memory.cap_gib is 99", "80 GB")),
        (
            ("--hardware", "rtx4090", "--gpus", "1", "memory.cap_gib=24"),
            ("nothing fits under 24.00 GiB", "the smallest change that would fit: --gpus 4", "with 46.91 GiB a device"),
        ),
    ],
)
def test_refusals(args: tuple[str, ...], words: tuple[str, ...]) -> None:
    result = _plan(*SMALL, *args)
    output = " ".join(result.output.split())
    assert result.exit_code == 2, output
    assert all(word in output for word in words), output


QWEN3_VL_30B_A3B = {
    "model_type": "qwen3_vl_moe",
    "text_config": {
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "vision_config": {"out_hidden_size": 2048},
}  # fmt: skip


def test_a_mixture_of_experts_is_planned_from_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_VL_30B_A3B))
    recipe = ("rollplex_32b", "model.build=null", f"model.path={tmp_path}", "rollout.prompts_per_step=8")
    result = _plan(*recipe, "memory.cap_gib=80", "--gpus", "8", "--hardware", "h800", "--json")
    assert result.exit_code == 0, result.output
    plans = json.loads(result.stdout)["plans"]
    assert any(plan[side]["expert"] > 1 for plan in plans for side in ("training", "rollout"))
    assert all(plan["sharing"] is None for plan in plans)
    alone = _plan(*recipe)
    assert alone.exit_code == 2 and "128 experts" in alone.output and "--gpus" in alone.output
