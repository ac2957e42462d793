"""Learning curves of Rollplex and TRL from one warm-started model on one recipe: do they agree within seed noise?

usage: python benchmarks/learning_parity.py [--steps 80] [--seeds 3] [--threads 1]

A small model is warmed up on the answers with Rollplex's supervised stage; both trainers then start from that folder
and see the same rows in the same order. A seed changes the sampling only. The last line is JSON.
See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import rollplex.tasks.verify
from rollplex.config import Config, DataConfig
from rollplex.runtime.session import PromptFeed, build_session
from rollplex.runtime.warm_start import warm_start
from rollplex.tasks.task import build_task
from vs_trl import ARMS, RESULTS, cores_for
from vs_trl_arms.curves import agreement
from vs_trl_arms.process import ArmProcess
from vs_trl_arms.settings import ArmSpec
from vs_trl_arms.summary import block_order, check_clock, provenance, write_result
from vs_trl_arms.workload import save_rows

PROMPTS, RESPONSES, TOKENS = 4, 8, 8
LEARNING_RATE = 3e-4
IMAGE_SIZE = 224
SMOOTHING = 10  # steps


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps of each run (default 80)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each arm (default 3)")
    parser.add_argument(
        "--warm-steps", type=int, default=20, help="supervised steps before (default 20: the start knows little)"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch threads and CPU cores of each arm (default 1)")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="one arm alone: no verdict")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for loading, or for one run")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    return parser.parse_args()


def warm_config(options: argparse.Namespace) -> Config:
    """The supervised stage and the model it starts from."""
    return Config.model_validate(
        {
            "run": {"seed": 0, "num_threads": options.threads},
            "model": {
                "build": {
                    "hidden_size": 128,
                    "num_layers": 3,
                    "num_heads": 4,
                    "num_kv_heads": 2,
                    "vocab_size": 320,
                    "vision_hidden_size": 64,
                }
            },
            "data": {"task": "colour_shape", "image_size": IMAGE_SIZE},
            "warm_start": {"steps": options.warm_steps, "batch_size": 32, "learning_rate": 2e-3},
        }
    )


def save_warm_model(options: argparse.Namespace, folder: Path) -> None:
    """Train on answers, save model and processor."""
    config = warm_config(options)
    session = build_session(config)
    feed = PromptFeed(session)

    def show(step: int, total: int, metrics: dict[str, float]) -> None:
        if step % 10 == 0 or step == total:
            print(f"warm start {step}/{total}: loss {metrics['loss']:.3f}", flush=True)

    try:
        warm_start(session.policy, feed.rows(), session.answer_ids, config, show)
    finally:
        feed.close()
    session.loaded.model.save_pretrained(folder)
    session.loaded.processor.save_pretrained(folder)


def run_one(name: str, seed: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One whole training run in its own process: its reward curve and its time, loading left out."""
    spec = ArmSpec(
        model=str(folder / "model"),
        rows=str(folder / "rows"),
        prompts=PROMPTS,
        responses=RESPONSES,
        tokens=TOKENS,
        threads=options.threads,
        reward=f"{rollplex.tasks.verify.__file__}:words_match",
        seed=seed,
        learning_rate=LEARNING_RATE,
        max_steps=options.steps + 1,
    )
    work = folder / f"seed{seed}"
    with ArmProcess(ARMS[name], spec, work, cores=cores_for(options.threads, True), timeout_s=options.timeout) as arm:
        block = arm.run_block(options.steps)
    check_clock(name, [step["seconds"] for step in block.steps], block.wall_seconds)
    rewards = [step["reward"] for step in block.steps]
    print(
        f"{name:9s} seed {seed}: reward {_mean(rewards[:SMOOTHING]):.3f} -> {_mean(rewards[-SMOOTHING:]):.3f} "
        f"in {block.wall_seconds:.1f} s",
        flush=True,
    )
    return {
        "seed": seed,
        "rewards": rewards,
        "mean_lengths": [step["mean_length"] for step in block.steps],
        "step_seconds": [step["seconds"] for step in block.steps],
        "wall_seconds": block.wall_seconds,
        "ready": arm.ready,
    }


def main() -> None:
    """Warm up, run all arms and seeds, compare, print, keep the result."""
    options = parse_arguments()
    if not SMOOTHING <= options.steps or options.seeds < 2:
        raise SystemExit(f"--steps must be at least {SMOOTHING} and --seeds at least 2")
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(options.threads)
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory(prefix="learning_parity_") as temporary:
        folder = Path(temporary)
        start = time.monotonic()
        save_warm_model(options, folder / "model")
        warm_seconds = time.monotonic() - start
        data = DataConfig(task="colour_shape", image_size=IMAGE_SIZE, num_rows=PROMPTS * (options.steps + 1))
        save_rows(build_task(data, "train", 1), folder / "rows")  # another seed: rows the warm start has not seen
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in options.arms}
        for name in block_order(options.arms, options.seeds):
            runs[name].append(run_one(name, len(runs[name]), folder, options))
    report(runs, warm_seconds, options)


def report(runs: dict[str, list[dict[str, Any]]], warm_seconds: float, options: argparse.Namespace) -> None:
    """Agreement of the curves and ratio of the times; the file and the last line when both arms ran."""
    if len(runs) < 2:
        print(json.dumps({"arms": list(runs)}))
        return
    curves = {name: [run["rewards"] for run in arm] for name, arm in runs.items()}
    verdict = agreement(curves["trl"], curves["rollplex"], SMOOTHING)
    seconds = {name: sum(run["wall_seconds"] for run in arm) for name, arm in runs.items()}
    line = {
        "curve_distance": round(verdict.distance, 4),
        "seed_noise": round(verdict.noise, 4),
        "largest_split": round(max(verdict.split_distances), 4),
        "p_value": round(verdict.p_value, 3),
        "ratio": round(seconds["trl"] / seconds["rollplex"], 3),
        "reward_first": {name: round(_ends(arm)[0], 3) for name, arm in curves.items()},
        "reward_last": {name: round(_ends(arm)[1], 3) for name, arm in curves.items()},
        "threads": options.threads,
    }
    result = {
        "benchmark": "learning_parity",
        **provenance(),
        **line,
        "split_distances": verdict.split_distances,
        "seconds": seconds,
        "warm_start_seconds": warm_seconds,
        "recipe": {
            "task": "colour_shape",
            "reward": "words_match",
            "image_size": IMAGE_SIZE,
            "prompts": PROMPTS,
            "responses": RESPONSES,
            "tokens": TOKENS,
            "learning_rate": LEARNING_RATE,
            "steps": options.steps,
            "smoothing": SMOOTHING,
            "warm_start": warm_config(options).model_dump(),
        },
        "runs": runs,
    }
    print(f"written: {write_result('learning_parity', result, options.threads, options.results)}")
    print(json.dumps(line))


def _ends(curves: list[list[float]]) -> tuple[float, float]:
    """Mean reward of the first and of the last SMOOTHING steps over all runs."""
    return (
        _mean([_mean(curve[:SMOOTHING]) for curve in curves]),
        _mean([_mean(curve[-SMOOTHING:]) for curve in curves]),
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
