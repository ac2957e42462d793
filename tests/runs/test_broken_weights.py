"""Weights that are not finite stop a run before they sample or teach anything."""

from __future__ import annotations

import pytest
import torch

from rollplex.errors import EngineError
from rollplex.recipes.load import load_config
from rollplex.recipes.packaged import packaged_recipe
from rollplex.runtime.trainer import Trainer


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_name_the_row(tmp_path, value):
    config = load_config(packaged_recipe("tiny_qwen2_5_vl"), [f"output_dir={tmp_path / 'run'}", "data.shuffle=false"])
    trainer = Trainer(config)
    try:
        with torch.no_grad():
            trainer.session.loaded.model.model.language_model.norm.weight[0] = value
        with pytest.raises(EngineError, match=r"row \d: the model's logits are not finite at response token 1"):
            trainer.run_step()
    finally:
        trainer.close()
