"""Training's parameters in memory that engines may use as their own: what weights/lending.py decides about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rollplex.errors import StateError
from rollplex.models.fused import mark_backed
from rollplex.models.save import plain_parameters
from rollplex.models.shard_plan import shard_plan
from rollplex.weights.bind import shape_of_model
from rollplex.weights.layout import plan_sharing
from rollplex.weights.lending import ADAPTED, WHOLE, LoanTerms
from rollplex.weights.share import Backing, BackingHandle, Side


class Loan(Protocol):
    """What an engine is given."""

    @property
    def terms(self) -> LoanTerms:
        """What lies where."""

    def backing(self) -> Backing:
        """The memory, in the process that asks. Raises StateError when its owner is gone."""


@dataclass(frozen=True, slots=True)
class DirectLoan:
    """For an engine in training's own process: the very tensors."""

    terms: LoanTerms
    held: Backing

    def backing(self) -> Backing:
        """Training's."""
        return self.held


@dataclass(frozen=True, slots=True)
class MappedLoan:
    """For other processes of the host. Small: it is what crosses the process border."""

    terms: LoanTerms
    handle: BackingHandle

    def backing(self) -> Backing:
        """The same memory, mapped."""
        return Backing.attach(self.handle)


class LentWeights:
    """Moves the parameters of `model`, which must be whole, into a backing; its tensors keep their identity.

    From then on the parameters must stay where they are (models/fused.py: `mark_backed`); `settle` checks it. Tensors
    that an engine cannot have in place stay where they were: `terms.withheld` names them. Raises ModelError for a model
    of another family.
    """

    def __init__(self, model: Any):
        plan = plan_sharing(shard_plan(shape_of_model(model)), WHOLE)
        parameters = list(plain_parameters(model))
        first = parameters[0].parameter
        dtype, device = first.dtype, first.device
        self.backing = Backing.create(plan, 0, dtype, device)
        views, withheld = self.backing.tensors(Side.TRAIN), dict[str, str]()
        self._places = list[tuple[str, torch.Tensor, int]]()  # of what is lent: name, parameter, address
        with torch.no_grad(), self.backing.version.writing("the move of training's weights", replaces_all=True):
            for name, parameter, adapted in parameters:
                if adapted:
                    withheld[name] = ADAPTED
                elif name not in views:
                    withheld[name] = "the shard plan of the family does not know it"
                elif parameter.dtype != dtype:
                    withheld[name] = f"it is {parameter.dtype}, where the model's first tensor is {dtype}"
                else:
                    view = views[name][: parameter.shape[0]]  # without the padding of a vocabulary
                    parameter.data = view.copy_(parameter)
                    mark_backed(parameter)
                    self._places.append((name, parameter, view.data_ptr()))
            self.backing.synchronize()
        layout = self.backing.layout
        self.terms = LoanTerms(layout, str(dtype).removeprefix("torch."), str(device), withheld)

    def settle(self) -> None:
        """Wait until what was written to the parameters is there for engines to see.

        Raises StateError when one has left the memory that engines read: they would go on with its older values.
        """
        for name, parameter, address in self._places:
            if parameter.data_ptr() != address:
                raise StateError(
                    f"{name} is no longer in the memory that engines read it from: something gave it another "
                    "(model.to, load_state_dict with assign=True, a second engine on the same policy); build engines "
                    "after that"
                )
        self.backing.synchronize()

    def loan(self, *, direct: bool) -> Loan:
        """direct: for an engine whose workers are in this process."""
        if direct:
            return DirectLoan(self.terms, self.backing)
        return MappedLoan(self.terms, self.backing.handle)
