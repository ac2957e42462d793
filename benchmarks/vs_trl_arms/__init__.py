"""The two arms of the comparison with TRL, each in its own process, and what they share."""
