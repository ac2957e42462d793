"""`rollplex train` with rollout.engine=vllm, from the outside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import rollplex

RECIPE = Path(rollplex.__file__).parent / "recipes" / "tiny_qwen3_vl.yaml"
OPTIONS = {
    "rollout.engine": "vllm",
    "rollout.vllm.enforce_eager": "on",
    "rollout.vllm.kv_cache_gib": "0.25",
    "rollout.temperature": "0.8",
    "model.build.num_heads": "2",  # heads of 32: the least that vLLM's CPU kernels take
    "model.build.num_kv_heads": "1",
    "train.max_steps": "2",
    "run.save_steps": "0",
}


def test_two_steps(tmp_path: Path) -> None:
    """Mixed rows; the run's own metric says how far behaviour log-probs are from the trainer's."""
    overrides = [f"{key}={value}" for key, value in OPTIONS.items()]
    command = [
        str(Path(sys.executable).with_name("rollplex")),
        "train",
        str(RECIPE),
        f"run.output_dir={tmp_path / 'run'}",
    ]
    done = subprocess.run([*command, *overrides], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [line.get("metrics", line)["sampling/sampling_logp_difference/max"] for line in lines]
    assert len(gaps) == 2 and max(gaps) < 1e-5
