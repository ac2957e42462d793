"""Carries out a memory plan: objects that it moves are on the device while a phase that uses them runs.

The plan decides (plan.py), copies move (host_copies.py), states say who may read or write (states.py). An object leaves
when a phase begins in which the plan does not hold it, not when its last user ends: the next unit may use it again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from rollplex.errors import StateError
from rollplex.memory.host_copies import HostCopies
from rollplex.memory.plan import MemoryPlan
from rollplex.memory.records import Choice, MemoryRecord
from rollplex.schedule.spec import Phase


@dataclass
class _Object:
    record: MemoryRecord
    choice: Choice
    copies: HostCopies
    users: int = 0


class Residency:
    """Where the moved objects of one process are. Thread-safe: phases of two lanes may use one object at once."""

    def __init__(self, plan: MemoryPlan, objects: Mapping[str, HostCopies]):
        """objects: by the names of the plan's records; what the plan does not hold when a step begins is put away now.
        Raises StateError for a name that the plan does not have."""
        records = {record.name: record for record in plan.records}
        unknown = sorted(set(objects) - set(records))
        if unknown:
            raise StateError(f"no records of these names in the memory plan: {unknown}; it has {sorted(records)}")
        self._lock = threading.Lock()
        self._objects = [_Object(records[name], plan.choices[name], copies) for name, copies in objects.items()]
        for item in self._objects:
            if not any(item.choice.held.get(phase) for phase in plan.timeline.segments[0]):
                item.copies.put_away()

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """What `phase` uses is on the device in this block; what the plan does not hold beside it is away, unless
        another phase still uses it."""
        if not self._objects:
            yield
            return
        used = [item for item in self._objects if phase in item.record.uses]
        with self._lock:
            for item in self._objects:
                idle = item not in used and not item.users and not item.choice.held.get(phase)
                if idle and item.copies.on_device:
                    item.copies.put_away()
            for item in used:
                if not item.copies.on_device:
                    item.copies.bring_back()
                item.copies.wait()
            for item in used:  # now that no move can fail any more
                item.users += 1
        try:
            yield
        finally:
            with self._lock:
                for item in used:
                    item.users -= 1
