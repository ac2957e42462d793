"""What GRPO adds to a supervised warm start on easy-VQA: held-out exact match before and after, per seed.

usage: python benchmarks/learning_easy_vqa.py [--seeds 0 1 2] [--rows 2000] [key=value ...]

Runs the recipe `easy_vqa` twice per seed: with train.max_steps=0 (warm start and evaluation), and from the same kept
warm start to its end. Accuracy is greedy exact match on the first `--rows` questions of the test split, whose pictures
no stage has seen. Further arguments override the recipe. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from rollplex.recipes.load import load_config
from rollplex.recipes.packaged import packaged_recipe
from rollplex.runtime.trainer import train
from vs_trl_arms.summary import provenance, write_result

RESULTS = Path(__file__).resolve().parent / "results"


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", type=int, default=2000, help="held-out questions (default 2000)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    parser.add_argument("overrides", nargs="*", help="key=value, as for rollplex train")
    return parser.parse_args()


def run(seed: int, folder: Path, rows: int, overrides: list[str]) -> dict[str, Any]:
    """One seed: accuracy after the warm start and after GRPO, and what each stage took."""
    shared = [f"run.seed={seed}", f"run.eval_rows={rows}", f"warm_start.path={folder / 'warm'}", "run.save_steps=0"]
    found: dict[str, Any] = {"seed": seed}
    for stage, extra in (("warm_start", ["train.max_steps=0"]), ("grpo", [])):
        config = load_config(
            packaged_recipe("easy_vqa"), [f"run.output_dir={folder / stage}", *shared, *overrides, *extra]
        )
        begin_s, begin_cpu_s = time.monotonic(), time.process_time()
        result = train(config)
        found |= {
            f"{stage}_accuracy": result.evaluation["eval_reward"],
            f"{stage}_s": time.monotonic() - begin_s,  # evaluation included
            f"{stage}_cpu_s": time.process_time() - begin_cpu_s,
        }
        if stage == "grpo":
            found |= {"first_rewards": mean(result.rewards[:10]), "last_rewards": mean(result.rewards[-10:])}
    return found | {"gain": found["grpo_accuracy"] - found["warm_start_accuracy"]}


def main() -> None:
    """Run all seeds, print a line each, write the result."""
    arguments = parse_arguments()
    runs = []
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as scratch:
            runs.append(run(seed, Path(scratch), arguments.rows, arguments.overrides))
        print(json.dumps(runs[-1]), flush=True)
    gains = [one["gain"] for one in runs]
    summary = {"mean_gain": mean(gains), "spread": stdev(gains) if len(gains) > 1 else None, "least": min(gains)}
    versions = {package: version(package) for package in ("rollplex", "torch", "transformers", "easy-vqa")}
    result = {
        **provenance(),
        "versions": versions,
        "benchmark": "easy_vqa",
        "rows": arguments.rows,
        "overrides": arguments.overrides,
        "runs": runs,
        **summary,
    }
    write_result("easy_vqa", result, torch.get_num_threads(), arguments.results)
    print(json.dumps({"benchmark": "easy_vqa", **summary, "seeds": arguments.seeds}))


if __name__ == "__main__":
    main()
