"""WHAT is learnt: rows, media loading, synthetic and packaged tasks, verifiable rewards."""
