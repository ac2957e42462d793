"""A writer that starts while a reader holds the weights raises, whatever thread either is in."""

from __future__ import annotations

import threading

import pytest

from rollplex.errors import StateError
from rollplex.models.lease import WeightLease


def test_readers_share_and_a_writer_is_alone() -> None:
    lease = WeightLease()
    with lease.reading("decode"), lease.reading("ref_prefix of group 0"), lease.reading("decode"):
        with pytest.raises(StateError, match="optimizer step 3 would write weights that decode, ref_prefix of group 0"):
            with lease.writing("optimizer step 3"):
                pytest.fail("entered")
    with lease.writing("optimizer step 3"):
        with pytest.raises(StateError, match="decode would read weights that optimizer step 3 is writing"):
            with lease.reading("decode"):
                pytest.fail("entered")
        with pytest.raises(StateError, match="publish would write weights that optimizer step 3"):
            with lease.writing("publish"):
                pytest.fail("entered")


def test_an_error_gives_the_lease_back() -> None:
    lease = WeightLease()
    for hold in (lease.reading, lease.writing):
        with pytest.raises(ZeroDivisionError), hold("pass"):
            raise ZeroDivisionError
    with lease.writing("optimizer step 1"):
        pass


def test_a_reader_in_another_thread_is_seen() -> None:
    lease = WeightLease()
    inside, leave = threading.Event(), threading.Event()

    def read() -> None:
        with lease.reading("window pass"):
            inside.set()
            assert leave.wait(10)

    thread = threading.Thread(target=read)
    thread.start()
    assert inside.wait(10)
    with pytest.raises(StateError, match="window pass still uses"), lease.writing("optimizer step 1"):
        pytest.fail("entered")
    leave.set()
    thread.join(10)
    with lease.writing("optimizer step 1"):
        pass
