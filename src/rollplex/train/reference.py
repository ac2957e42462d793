"""The frozen reference policy: the weights that training started from, as a model of its own."""

from __future__ import annotations

import copy
from typing import Any

from rollplex.models.policy import Policy


class Reference:
    """Log-probs of the policy that training started from. Its weights never change, so its prefixes never go stale.

    `policy` is a module tree of its own, so that a reference pass may run beside any pass of the actor.
    """

    def __init__(self, policy: Policy, *, adapters_are_fresh: bool = True):
        """Freeze `policy` as it is now. With fresh LoRA adapters (which change nothing yet) no weight is copied: the
        reference is the base model without adapters, on the same tensors."""
        self.shares_weights = adapters_are_fresh and hasattr(policy.model, "disable_adapter")
        if self.shares_weights:
            model = _without_adapters(policy.model)
        else:
            model = copy.deepcopy(policy.model).requires_grad_(False).eval()
        self.policy = Policy(model, policy.adapter.ranks, chunk_tokens=policy.chunk_tokens)
        if policy.vision_frozen:  # one tower, so one cache
            self.policy.vision_frozen, self.policy.vision_cache = True, policy.vision_cache


def _without_adapters(model: Any) -> Any:
    """A second module tree on the same tensors, its adapters taken out.

    peft's own way, `disable_adapter`, sets a flag on the actor's modules: not while another thread decodes on them.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin: Any = copy.deepcopy(model, shared).unload()
    return twin.eval()
