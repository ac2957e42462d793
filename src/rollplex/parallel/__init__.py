"""Several processes on one model: groups of ranks, sums with deadlines, sharding over data-parallel ranks."""
