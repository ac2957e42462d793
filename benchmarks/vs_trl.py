"""Step time and peak memory of Rollplex against TRL's GRPOTrainer, on the same work, in one run.

usage: python benchmarks/vs_trl.py --setting S1 [--threads 1]

Each arm is its own process that loads once; blocks of steps alternate between them while the other waits idle. The
last line of the output is JSON; the whole measurement goes to benchmarks/results/. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vs_trl_arms.process import ArmProcess, Block
from vs_trl_arms.settings import REWARD, SETTINGS, ArmSpec, Setting
from vs_trl_arms.summary import (
    ArmFigures,
    arm_figures,
    block_order,
    check_clock,
    check_lengths,
    provenance,
    ratios,
    write_result,
)

ARMS = {"trl": "vs_trl_arms.trl_arm", "rollplex": "vs_trl_arms.rollplex_arm"}
SETTLE_SECONDS = 0.3  # between blocks: background work of the arm that just ran must not fall into the other's time
RESULTS = Path(__file__).resolve().parent / "results"


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--setting", choices=sorted(SETTINGS), default="S1")
    parser.add_argument("--threads", type=int, default=1, help="torch threads and CPU cores of each arm (default 1)")
    parser.add_argument("--warmup", type=int, default=2, help="unmeasured steps of each arm (default 2)")
    parser.add_argument("--blocks", type=int, default=3, help="measured blocks of each arm (default 3)")
    parser.add_argument("--block-steps", type=int, default=2, help="steps of a block (default 2)")
    parser.add_argument(
        "--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="one arm alone gives no ratio"
    )
    parser.add_argument("--trl-micro-batch", type=int, help="TRL's per_device_train_batch_size (default: the batch)")
    parser.add_argument("--no-pin", action="store_true", help="let arms use all cores beside their torch threads")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for loading, or for one block")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    return parser.parse_args()


def cores_for(threads: int, pin: bool) -> list[int] | None:
    """As many cores as threads, the same for both arms; None: no pinning. The parent's sampler keeps the others."""
    if not pin or not hasattr(os, "sched_getaffinity"):
        return None
    return sorted(os.sched_getaffinity(0))[-threads:]


def measure(arms: dict[str, ArmProcess], options: argparse.Namespace, setting: Setting) -> dict[str, list[Block]]:
    """Warm both up, then alternate blocks; every block is checked for equal work."""
    blocks: dict[str, list[Block]] = {name: [] for name in arms}
    for name, arm in arms.items():
        warm = arm.run_block(options.warmup)
        check_lengths(name, warm.steps, setting.tokens)
        print(f"{name}: ready, {options.warmup} warm-up steps in {warm.wall_seconds:.2f} s", flush=True)
    for name in block_order(list(arms), options.blocks):
        time.sleep(SETTLE_SECONDS)
        block = arms[name].run_block(options.block_steps)
        check_lengths(name, block.steps, setting.tokens)
        check_clock(name, [step["seconds"] for step in block.steps], block.wall_seconds)
        blocks[name].append(block)
        print(f"{name}: " + " ".join(f"{step['seconds']:.3f}" for step in block.steps) + " s", flush=True)
    return blocks


def figures(arm: ArmProcess, blocks: list[Block]) -> ArmFigures:
    """One arm's medians and memory."""
    return arm_figures(
        [step for block in blocks for step in block.steps],
        baseline_rss=arm.baseline_rss,
        peak_rss=max(block.peak_rss for block in blocks),
        sampled_peak_rss=max(block.sampled_peak_rss for block in blocks),
    )


def main() -> None:
    """Build the work, run the arms, print and keep the result."""
    options = parse_arguments()
    if len(options.arms) == 2 and options.blocks * options.block_steps < 5:
        raise SystemExit("--blocks times --block-steps must be at least 5: the median needs as many steps")
    setting = SETTINGS[options.setting]
    with tempfile.TemporaryDirectory(prefix="vs_trl_") as temporary, ExitStack() as stack:
        folder = Path(temporary)
        # Imported here: the parent stays small until it has something to build.
        from vs_trl_arms.workload import BUILD, counting_task, save_model, save_rows

        save_model(setting, folder / "model")
        save_rows(counting_task(setting), folder / "rows")
        spec = ArmSpec(
            model=str(folder / "model"),
            rows=str(folder / "rows"),
            prompts=setting.prompts,
            responses=setting.responses,
            tokens=setting.tokens,
            threads=options.threads,
            reward=REWARD,
            micro_batch=options.trl_micro_batch,
        )
        cores = cores_for(options.threads, not options.no_pin)
        arms = {
            name: stack.enter_context(
                ArmProcess(ARMS[name], spec, folder / "arms", cores=cores, timeout_s=options.timeout)
            )
            for name in options.arms
        }
        blocks = measure(arms, options, setting)
        by_arm = {name: figures(arm, blocks[name]) for name, arm in arms.items()}
        result: dict[str, Any] = {
            "benchmark": "vs_trl",
            **provenance(),
            "setting": setting.name,
            **(ratios(by_arm["trl"], by_arm["rollplex"]) if len(by_arm) == 2 else {}),
            "setting_values": asdict(setting),
            "model": BUILD.model_dump(),
            "threads": options.threads,
            "pinned_cores": cores,
            "order": block_order(list(arms), options.blocks),
            "warmup_steps": options.warmup,
            "arms": {
                name: {
                    **asdict(by_arm[name]),
                    "step_rss": by_arm[name].step_rss,
                    "blocks": [asdict(block) for block in blocks[name]],
                    "ready": arm.ready,
                }
                for name, arm in arms.items()
            },
        }
    report(result, by_arm, options)


def report(result: dict[str, Any], by_arm: dict[str, ArmFigures], options: argparse.Namespace) -> None:
    """Print the table and the last line of JSON; keep the file when both arms ran."""
    for name, arm in by_arm.items():
        print(
            f"{name:9s} median step {arm.median_seconds:.3f} s (cpu {arm.median_cpu_seconds:.3f} s)   "
            f"peak {arm.peak_rss / 2**20:.0f} MiB   "
            f"loaded {arm.baseline_rss / 2**20:.0f} MiB   step {arm.step_rss / 2**20:.0f} MiB   "
            f"mean length {arm.mean_length:g}"
        )
    line: dict[str, Any] = {"setting": result["setting"]}
    if len(by_arm) == 2:
        path = write_result(f"vs_trl_{result['setting']}", result, options.threads, options.results)
        print(f"written: {path}")
        line |= {key: round(result[key], 3) for key in ("ratio", "memory_ratio", "step_memory_ratio", "cpu_ratio")}
    line["threads"] = options.threads
    for name, arm in by_arm.items():
        line[f"{name}_step_seconds"] = round(arm.median_seconds, 4)
        line[f"{name}_peak_mib"] = round(arm.peak_rss / 2**20, 1)
        line[f"{name}_mean_length"] = arm.mean_length
    print(json.dumps(line))


if __name__ == "__main__":
    main()
