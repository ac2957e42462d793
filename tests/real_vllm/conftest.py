"""Tests on a real vLLM engine on the CPU: `make test-vllm` builds an environment for them. Elsewhere none run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from vllm_rig import VllmRig

_found = find_spec("vllm")
if _found is None or _found.origin is None:  # this very folder can be taken for a package of that name
    collect_ignore_glob = ["test_*.py"]
else:
    # Read by vLLM in this process and in all that it starts. nobind: its CPU back end would pin threads to cores.
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """vLLM and what it imports warn as they like; our own warnings are errors in all other tests."""
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session", params=["qwen2_5_vl", "qwen3_vl"])
def engine_of_family(request: pytest.FixtureRequest) -> Iterator[VllmRig]:
    """A model of each family with its engine in this process, kept for all tests that ask for it."""
    from vllm_rig import VllmRig

    rig = VllmRig(request.param)
    yield rig
    rig.close()


@pytest.fixture
def rig(engine_of_family: VllmRig) -> Iterator[VllmRig]:
    """`engine_of_family`; the test may train, the weights are put back after it."""
    kept = {name: tensor.clone() for name, tensor in engine_of_family.policy.model.state_dict().items()}
    yield engine_of_family
    with torch.no_grad():
        for name, tensor in engine_of_family.policy.model.state_dict().items():
            tensor.copy_(kept[name])
    engine_of_family.policy.bump()
