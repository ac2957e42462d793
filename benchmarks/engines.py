"""Tokens per second of the local engine, of vLLM and of transformers' `generate`, side by side.

usage: .venv-vllm/bin/python benchmarks/engines.py --setting S1 [--threads 1]      (make test-vllm builds .venv-vllm)

All three run in this process on the same weights and the same processed prompts, in turn; G responses per prompt, all
of exactly the stated length; the prompt pass, vision tower included, is part of every time. Before each of its rollouts
vLLM gets the weights anew, as after an optimizer step, which also empties its caches; that is timed apart (`push_s`):
the local engine reads the training weights in place, and `generate` runs on them. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch
from transformers import AutoProcessor

from engine_vs_generate import engine_sampler, generate_sampler, load, timed
from rollplex.config import Config
from rollplex.models.policy import Policy
from rollplex.rollout.engine import RolloutEngine, SamplingParams
from rollplex.rollout.engines import VllmEngines
from rollplex.types import PromptSpec
from vs_trl_arms.settings import SETTINGS, Setting
from vs_trl_arms.summary import UnequalWorkError, block_order, provenance, write_result
from vs_trl_arms.workload import BUILD

RESULTS = Path(__file__).resolve().parent / "results"
GREEDY_TOKENS = 16
CPU_SETTINGS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--setting", choices=sorted(SETTINGS), default="S1")
    parser.add_argument("--threads", type=int, default=1, help="torch threads and CPU cores (default 1)")
    parser.add_argument("--warmup", type=int, default=1, help="unmeasured rollouts of each (default 1)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rollouts of each (default 5, at least 5)")
    parser.add_argument("--eager", action="store_true", help="vLLM without compilation")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    return parser.parse_args()


def vllm_engines(policy: Policy, processor: object, setting: Setting, *, eager: bool) -> VllmEngines:
    """vLLM in this process, with room for all responses of a rollout at once."""
    config = Config.model_validate(
        {
            "model": {"path": "made for the benchmark"},
            "rollout": {
                "engine": "vllm",
                "max_decode_rows": setting.prompts * setting.responses,
                "vllm": {"kv_cache_gib": 1.0, "max_sequence_tokens": 2048, "enforce_eager": eager},
            },
        }
    )
    return VllmEngines(config, policy, processor)


def run(engine: RolloutEngine, specs: list[PromptSpec]) -> list[list[int]]:
    """All responses of one rollout, in order."""
    for number, spec in enumerate(specs):
        engine.admit(number, spec)
    found: dict[tuple[int, int], list[int]] = {}
    while engine.busy:
        for item in engine.step():
            found[item.rollout_id, item.response.index] = list(item.response.token_ids)
    return [tokens for _, tokens in sorted(found.items())]


def check_greedy(samplers: dict[str, Callable[[SamplingParams], list[list[int]]]], params: SamplingParams) -> None:
    """Raises UnequalWorkError unless all give the same tokens without randomness."""
    greedy = replace(params, num_generations=1, max_tokens=min(GREEDY_TOKENS, params.max_tokens), greedy=True)
    found = {name: sampler(greedy) for name, sampler in samplers.items()}
    for name, tokens in found.items():
        if tokens != found["engine"]:
            raise UnequalWorkError(f"greedy outputs of {name} and engine differ: {tokens} and {found['engine']}")


def main() -> None:
    """Measure, print, keep the result."""
    options = parse_arguments()
    if options.rounds < 5:
        raise SystemExit("--rounds must be at least 5: the median needs as many rollouts")
    os.environ |= CPU_SETTINGS | {"OMP_NUM_THREADS": str(options.threads)}
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-options.threads :])
    torch.set_num_threads(options.threads)
    setting = SETTINGS[options.setting]
    with tempfile.TemporaryDirectory(prefix="engines_") as folder:
        policy, specs, banned = load(setting, Path(folder) / "model")
        processor = AutoProcessor.from_pretrained(Path(folder) / "model")
    engines = vllm_engines(policy, processor, setting, eager=options.eager)
    try:
        seconds, pushes = measure(engines, policy, specs, banned, options)
    finally:
        engines.close()
    report(seconds, pushes, setting, options)


def measure(
    engines: VllmEngines, policy: Policy, specs: list[PromptSpec], banned: tuple[int, ...], options: argparse.Namespace
) -> tuple[dict[str, list[float]], list[float]]:
    """Seconds of each rollout by engine, and of each push."""
    setting, pushes = SETTINGS[options.setting], list[float]()
    params = SamplingParams(num_generations=setting.responses, max_tokens=setting.tokens, banned_token_ids=banned)
    samplers: dict[str, Callable[[SamplingParams], list[list[int]]]] = {
        "engine": lambda wanted: engine_sampler(policy, specs, wanted),
        "vllm": lambda wanted: run(engines.open(wanted), specs),
        "generate": lambda wanted: generate_sampler(policy, specs, wanted),
    }
    check_greedy(samplers, params)
    torch.manual_seed(0)  # generate draws from the global state
    seconds: dict[str, list[float]] = {name: [] for name in samplers}
    order = list(samplers) * options.warmup + block_order(list(samplers), options.rounds)
    for count, name in enumerate(order):
        if name == "vllm":
            policy.bump()
            start = time.monotonic()
            engines.open(params)
            pushes.append(time.monotonic() - start)
        took = timed(lambda name=name: samplers[name](params), setting)  # type: ignore[misc]
        if count >= len(samplers) * options.warmup:
            seconds[name].append(took)
            print(f"{name}: {took:.3f} s", flush=True)
    return seconds, pushes[options.warmup :]


def report(seconds: dict[str, list[float]], pushes: list[float], setting: Setting, options: argparse.Namespace) -> None:
    """Rates, the result file, and the last line of JSON."""
    num_tokens = setting.prompts * setting.responses * setting.tokens
    rates = {name: round(num_tokens / median(values), 1) for name, values in seconds.items()}
    line = {
        "setting": setting.name,
        "threads": options.threads,
        "tokens_per_second": rates,
        "push_s": round(median(pushes), 4),
        "engine_to_vllm": round(rates["engine"] / rates["vllm"], 3),
        "engine_to_generate": round(rates["engine"] / rates["generate"], 3),
    }
    result = {
        "benchmark": "engines",
        **provenance(),
        **line,
        "vllm_eager": options.eager,
        "seconds": seconds,
        "push_seconds": pushes,
        "setting_values": asdict(setting),
        "model": BUILD.model_dump(),
        "versions": {name: version(name) for name in ("torch", "transformers", "vllm-cpu")},
    }
    print(f"written: {write_result(f'engines_{setting.name}', result, options.threads, options.results)}")
    print(json.dumps(line))


if __name__ == "__main__":
    main()
