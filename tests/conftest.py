"""Tiny models that every test may use. Weights are drawn once per session; each test gets its own copy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch

from rollplex.config import BuildConfig
from rollplex.models.build import build_model, build_processor, cast_parameters
from rollplex.models.load import LoadedModel

FAMILIES = ("qwen2_5_vl", "qwen3_vl")

# Wide enough that attention is far from uniform: an error in positions or masks then shows in the outputs.
INITIALIZER_RANGE = 0.1

TOKENIZER_TEXTS = tuple(
    f"user\nHow many {colour} {shape}s are in the image? assistant\nI count {number} of them. The answer is {number}."
    for colour in ("red", "green", "blue", "yellow")
    for shape in ("circle", "square", "triangle")
    for number in range(10)
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """pytest reads options from this file only, not from golden/conftest.py."""
    parser.addoption("--update-golden", action="store_true", help="Write tests/golden/*.txt anew from what is found.")


if find_spec("hypothesis") is not None:  # tests/real_vllm run without it
    from hypothesis import HealthCheck, settings

    # How long an example takes says how busy the machine is.
    settings.register_profile("any", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    # What judges a change: the same examples each time, so that the change decides. Others look for new ones.
    settings.register_profile("ci", settings.get_profile("any"), derandomize=True, database=None)
    settings.load_profile("any")


@pytest.fixture(autouse=True)
def _few_threads() -> None:
    """Tiny tensors gain nothing from threads, and test processes share the cores. Runs set their own number for the
    whole process: the next test begins as if there had been none."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def _tiny_weights() -> Callable[[str], LoadedModel]:
    cached: dict[str, LoadedModel] = {}

    def weights(family: str) -> LoadedModel:
        if family not in cached:
            config = BuildConfig(family=family, hidden_size=64, num_layers=3, num_heads=2, num_kv_heads=1)
            processor = build_processor(family, TOKENIZER_TEXTS, 384)
            cached[family] = LoadedModel(
                build_model(config, processor, seed=7, initializer_range=INITIALIZER_RANGE), processor
            )
        return cached[family]

    return weights


@pytest.fixture
def tiny_model(_tiny_weights: Callable[[str], LoadedModel]) -> Callable[..., LoadedModel]:
    """tiny_model(family, dtype=torch.float32): own copy of a model of hidden size 64, 3 layers, 2 heads, 1 KV head."""

    def make(family: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
        cached = _tiny_weights(family)
        model = copy.deepcopy(cached.model)
        if dtype != torch.float32:
            cast_parameters(model, dtype)
        return LoadedModel(model, copy.deepcopy(cached.processor))

    return make


@pytest.fixture
def tiny_qwen2_5_vl(tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    """Tiny Qwen2.5-VL in float32."""
    return tiny_model("qwen2_5_vl")


@pytest.fixture
def tiny_qwen3_vl(tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    """Tiny Qwen3-VL (deepstack) in float32."""
    return tiny_model("qwen3_vl")


@pytest.fixture(params=FAMILIES)
def tiny_vlm(request: pytest.FixtureRequest, tiny_model: Callable[..., LoadedModel]) -> LoadedModel:
    """Tiny model of each family in turn, float32."""
    return tiny_model(request.param)
