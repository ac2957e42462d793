"""WHEN and WHERE each phase of a step runs. Pure: no torch, no clock, no files. Start reading at step.py."""
