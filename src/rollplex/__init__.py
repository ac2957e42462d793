"""Rollplex: exact, prefix-shared on-policy reinforcement learning for vision-language models."""

import rollplex.mkl  # noqa: F401 - its setting must be there before the first product of this process

__version__ = "0.1.0"
