"""`python -m rollplex`, and so `torchrun -m rollplex`: the rollplex command."""

from __future__ import annotations

from rollplex.cli import main

main()
