"""Tokens per second of Rollplex's local engine against one transformers `generate` call per prompt.

usage: python benchmarks/engine_vs_generate.py --setting S1 [--threads 1]

Both run in this process on the same weights and the same processed prompts, alternating. The peer calls
`generate(num_return_sequences=G, do_sample=True)` per prompt with TRL's other arguments; the engine decodes all
responses of all prompts together. The prompt pass (vision tower included) is part of both times. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from rollplex.config import DataConfig, ModelConfig
from rollplex.models.load import load_model
from rollplex.models.policy import Policy
from rollplex.models.prompts import PromptBuilder
from rollplex.rollout.engine import SamplingParams
from rollplex.rollout.local_engine import LocalEngine
from rollplex.types import PromptSpec
from vs_trl_arms.settings import SETTINGS, Setting
from vs_trl_arms.summary import UnequalWorkError, block_order, provenance, write_result
from vs_trl_arms.workload import BUILD, counting_task, save_model

RESULTS = Path(__file__).resolve().parent / "results"
VISION_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
Sampler = Callable[[], list[list[int]]]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--setting", choices=sorted(SETTINGS), default="S1")
    parser.add_argument("--threads", type=int, default=1, help="torch threads and CPU cores (default 1)")
    parser.add_argument("--warmup", type=int, default=1, help="unmeasured rollouts of each (default 1)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rollouts of each (default 5, at least 5)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    return parser.parse_args()


def engine_sampler(policy: Policy, specs: list[PromptSpec], params: SamplingParams) -> list[list[int]]:
    """All responses of one rollout by the local engine."""
    engine = LocalEngine(policy, params, max_rows=len(specs) * params.num_generations)
    for number, spec in enumerate(specs):
        engine.admit(number, spec)
    responses: list[list[int]] = []
    while engine.busy:
        responses += [list(finished.response.token_ids) for finished in engine.step()]
    return responses


def generate_sampler(policy: Policy, specs: list[PromptSpec], params: SamplingParams) -> list[list[int]]:
    """All responses of one rollout by one `generate` call per prompt."""
    responses: list[list[int]] = []
    for spec in specs:
        inputs = {
            "input_ids": spec.input_ids[None],
            "attention_mask": torch.ones_like(spec.input_ids)[None],
            "mm_token_type_ids": spec.token_types[None],
            "pixel_values": spec.pixel_values,
            "image_grid_thw": spec.image_grid_thw,
        }
        sampling: dict[str, Any] = (
            {"do_sample": False}
            if params.greedy
            else {"do_sample": True, "temperature": params.temperature, "top_p": 1.0, "top_k": 0}
        )
        with torch.inference_mode():
            tokens = policy.model.generate(
                **inputs,
                **sampling,
                num_return_sequences=params.num_generations,
                max_new_tokens=params.max_tokens,
                suppress_tokens=list(params.banned_token_ids),
                disable_compile=True,
            )
        responses += tokens[:, spec.num_tokens :].tolist()
    return responses


def check_greedy(policy: Policy, specs: list[PromptSpec], banned: tuple[int, ...], tokens: int) -> None:
    """Raises UnequalWorkError unless both give the same tokens without randomness."""
    params = SamplingParams(num_generations=1, max_tokens=tokens, banned_token_ids=banned, greedy=True)
    for number, spec in enumerate(specs):
        ours, peer = engine_sampler(policy, [spec], params), generate_sampler(policy, [spec], params)
        if ours != peer:
            raise UnequalWorkError(f"greedy outputs of prompt {number} differ: {ours[0]} and {peer[0]}")


def timed(sampler: Sampler, setting: Setting) -> float:
    """Seconds of one rollout; raises UnequalWorkError when a response has not exactly the stated length."""
    start = time.monotonic()
    responses = sampler()
    seconds = time.monotonic() - start
    lengths = {len(response) for response in responses}
    wanted = setting.prompts * setting.responses
    if len(responses) != wanted or lengths != {setting.tokens}:
        raise UnequalWorkError(
            f"{len(responses)} responses with lengths {sorted(lengths)}, needed {wanted} of exactly {setting.tokens}"
        )
    return seconds


def load(setting: Setting, folder: Path) -> tuple[Policy, list[PromptSpec], tuple[int, ...]]:
    """The benchmark's model, its prompts, and the ids that are never sampled."""
    save_model(setting, folder)
    loaded = load_model(ModelConfig(path=str(folder)))
    task = counting_task(setting, setting.prompts)
    builder = PromptBuilder(loaded.processor, loaded.model.config, DataConfig())
    specs = [builder.build(task.example(index)) for index in range(setting.prompts)]
    banned = tuple(sorted({int(getattr(loaded.model.config, name)) for name in VISION_TOKENS}))
    return Policy(loaded.model), specs, banned


def main() -> None:
    """Measure, print, keep the result."""
    options = parse_arguments()
    if options.rounds < 5:
        raise SystemExit("--rounds must be at least 5: the median needs as many rollouts")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-options.threads :])
    torch.set_num_threads(options.threads)
    setting = SETTINGS[options.setting]
    with tempfile.TemporaryDirectory(prefix="engine_vs_generate_") as folder:
        policy, specs, banned = load(setting, Path(folder) / "model")
    params = SamplingParams(num_generations=setting.responses, max_tokens=setting.tokens, banned_token_ids=banned)
    torch.manual_seed(0)  # generate draws from the global state
    samplers: dict[str, Sampler] = {
        "generate": lambda: generate_sampler(policy, specs, params),
        "engine": lambda: engine_sampler(policy, specs, params),
    }
    check_greedy(policy, specs[:1], banned, min(16, setting.tokens))
    for sampler in samplers.values():
        for _ in range(options.warmup):
            timed(sampler, setting)
    seconds: dict[str, list[float]] = {name: [] for name in samplers}
    for name in block_order(list(samplers), options.rounds):
        seconds[name].append(timed(samplers[name], setting))
        print(f"{name}: {seconds[name][-1]:.3f} s", flush=True)
    report(seconds, setting, options)


def report(seconds: dict[str, list[float]], setting: Setting, options: argparse.Namespace) -> None:
    """Rates, the result file, and the last line of JSON."""
    num_tokens = setting.prompts * setting.responses * setting.tokens
    rates = {name: num_tokens / median(values) for name, values in seconds.items()}
    line = {
        "setting": setting.name,
        "ratio": round(rates["engine"] / rates["generate"], 3),
        "threads": options.threads,
        "engine_tokens_per_second": round(rates["engine"], 1),
        "generate_tokens_per_second": round(rates["generate"], 1),
    }
    result = {
        "benchmark": "engine_vs_generate",
        **provenance(),
        **line,
        "seconds": seconds,
        "setting_values": asdict(setting),
        "model": BUILD.model_dump(),
        "versions": {"torch": version("torch"), "transformers": version("transformers")},
    }
    print(f"written: {write_result(f'engine_vs_generate_{setting.name}', result, options.threads, options.results)}")
    print(json.dumps(line))


if __name__ == "__main__":
    main()
