"""What is put away is really gone, and comes back as it was."""

from __future__ import annotations

import tempfile

import pytest
import torch

from rollplex.errors import StateError
from rollplex.memory.allocations import AllocationCounter
from rollplex.memory.host_copies import HostCopies


def _some() -> list[torch.Tensor]:
    whole = torch.randn(6, 4)
    return [whole[:2], whole[2:], torch.arange(7), torch.randn(3, 5).t(), torch.empty(0)]


def test_memory_is_given_back_and_content_kept() -> None:
    tensors = _some()
    before = [tensor.clone() for tensor in tensors]
    copies = HostCopies("some", tensors)
    for _ in range(3):
        copies.put_away()
        assert sum(tensor.untyped_storage().nbytes() for tensor in tensors) == 0
        copies.bring_back()
        copies.wait()
        assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    assert copies.nbytes == (24 + 15) * 4 + 7 * 8
    assert tensors[0].untyped_storage().data_ptr() == tensors[1].untyped_storage().data_ptr()


def test_host_memory_does_not_count_as_the_devices() -> None:
    counter = AllocationCounter(torch.device("cpu"))
    with counter.counting():
        tensors = [torch.empty(1 << 20, dtype=torch.uint8), torch.empty(1000, dtype=torch.float64)]
        HostCopies("some", tensors).put_away()
    assert counter.trace().peak_bytes == (1 << 20) + 8000
    assert counter.trace().left_bytes == 0


def test_what_was_written_on_the_device_is_copied_back_unless_read_only() -> None:
    for read_only in (False, True):
        tensor = torch.zeros(3)
        copies = HostCopies("one", [tensor], read_only=read_only)
        copies.put_away()
        copies.bring_back()
        tensor.fill_(1.0)
        copies.put_away()
        copies.bring_back()
        assert tensor.tolist() == ([0.0] * 3 if read_only else [1.0] * 3)


def test_host_copies_can_be_read_while_away() -> None:
    tensors = _some()[:4]
    before = [tensor.clone() for tensor in tensors]
    copies = HostCopies("some", tensors)
    copies.put_away()
    found = [copies.on_host(tensor) for tensor in tensors]
    assert all(torch.equal(a, b) and a.stride() == t.stride() for a, b, t in zip(found, before, tensors, strict=True))


def test_illegal_moves_are_refused() -> None:
    copies = HostCopies("weights", [torch.ones(2)])
    with pytest.raises(StateError, match="cannot bring back weights: it is on the device"):
        copies.bring_back()
    with pytest.raises(StateError, match="cannot wait for the departure of weights: it is on the device"):
        copies.wait_until_away()
    copies.put_away()
    copies.wait_until_away()
    with pytest.raises(StateError, match="cannot put away weights: it is away"):
        copies.put_away()
    with pytest.raises(StateError, match="cannot use weights: it is away"):
        copies.wait()
    copies.bring_back()
    with pytest.raises(StateError, match="cannot read on the host weights"):
        copies.on_host(torch.ones(2))


def test_a_mapped_file_cannot_be_freed(tmp_path) -> None:
    path = tmp_path / "mapped"
    path.write_bytes(bytes(16))
    mapped = torch.from_file(str(path), shared=True, size=4)
    with pytest.raises(StateError, match="1 of 1 storages cannot be freed"):
        HostCopies("mapped", [mapped])


def test_no_room_is_said_and_nothing_lost(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    tensor = torch.ones(5)
    copies = HostCopies("moments", [tensor])
    with pytest.raises(StateError, match=r"moments \(20 bytes\) cannot be put away .* TMPDIR"):
        copies.put_away()
    assert tensor.tolist() == [1.0] * 5 and copies.on_device
