"""Which errors inside a wait for other processes are taken for theirs."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from rollplex.errors import DeadlineError, PeerError
from rollplex.parallel.groups import join_job, leave_job
from rollplex.parallel.waits import Peers
from rollplex.parallel.witness import Whereabouts, Witness

LOST = "[third_party/gloo/gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:3998: Connection reset by peer"


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    """Those of a job of one process."""
    job = join_job(0, 1, (tmp_path / "rendezvous").as_uri(), device="cpu", deadline_s=20.0)
    yield job.everyone
    leave_job()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError(LOST), PeerError),
        (dist.DistNetworkError("failed to recv, got 0 bytes"), PeerError),
        (RuntimeError("Timed out waiting 2000ms for recv operation to complete"), DeadlineError),
    ],
)
def test_what_communication_raises_names_the_wait(error: Exception, kind: type[Exception], peers: Peers) -> None:
    with pytest.raises(kind, match="sum of everything: rank 0 of 1 of the job"), peers.waiting("sum of everything"):
        raise error


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), ValueError("needed 3 rows, found 4")]
)
def test_errors_of_this_process_come_through(error: Exception, peers: Peers) -> None:
    with pytest.raises(type(error)) as found, peers.waiting("sum of everything"):
        raise error
    assert found.value is error


def test_a_connection_may_be_lost_long_before_its_process_counts_as_ended() -> None:
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as other:
        own = Whereabouts.own()
        witness = Witness(dist.HashStore(), 0, [own, Whereabouts(own.host, other.pid)])
        assert witness.told() == ""
        end = threading.Timer(2.0, other.kill)
        end.start()
        assert witness.told(120.0) == f"rank 1 (process {other.pid}) has ended without a word"
        end.join()
