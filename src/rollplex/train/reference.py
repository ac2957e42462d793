"""The frozen reference policy: a copy of the start, or the base model under switched-off adapters."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from rollplex.models.policy import Policy


class Reference:
    """Log-probs of the policy that training started from. Its weights never change, so its prefixes never go stale."""

    def __init__(self, policy: Policy, *, adapters_are_fresh: bool = True):
        """Freeze `policy` as it is now. With fresh LoRA adapters (which change nothing yet) nothing is copied: the base
        model is the reference."""
        self.shares_weights = adapters_are_fresh and hasattr(policy.model, "disable_adapter")
        if self.shares_weights:
            model: Any = policy.model
        else:
            model = copy.deepcopy(policy.model).requires_grad_(False).eval()
        self.policy = Policy(model)
        if policy.vision_frozen:  # one tower, so one cache
            self.policy.vision_frozen, self.policy.vision_cache = True, policy.vision_cache

    @contextmanager
    def active(self) -> Iterator[Policy]:
        """The reference as a policy, for the duration of the block."""
        with self.policy.model.disable_adapter() if self.shares_weights else nullcontext():
            yield self.policy
