"""The error tree. Every message says what was found, what was needed, and which row or option fixes it.

    RollplexError
    |-- ConfigError      (ValueError)    a key, a value or a combination of options
    |-- RowError         (ValueError)    one data row: its media, placeholders, length or columns
    |   |-- MediaError                   an image or video of the row that cannot be read
    |   `-- OverlongPromptError          a prompt longer than data.max_prompt_tokens (the only one that may be dropped)
    |-- ModelError       (ValueError)    a model family, weight file, processor or module that cannot be used
    |-- RewardError      (RuntimeError)  a reward function that raised or answered with the wrong shape
    |-- EngineError      (RuntimeError)  a rollout engine that broke its contract
    |-- TrainingError    (RuntimeError)  an update that must not be made: its gradient is not finite
    |   `-- SamplingExhausted            too few groups to learn from, with algorithm.dynamic_sampling_exhausted=stop
    |-- StateError       (RuntimeError)  an illegal order of operations (stale prefix, writer beside readers)
    |-- CheckpointError  (RuntimeError)  a checkpoint that cannot be written, is cut short or does not fit
    `-- DeadlineError    (RuntimeError)  a wait that ended at its deadline; names what was waited for

All are picklable (they carry only their message), so they cross process borders unchanged.
"""

from __future__ import annotations


class RollplexError(Exception):
    """Root of all errors that Rollplex raises on purpose."""


class ConfigError(RollplexError, ValueError):
    """An option, its value, or a combination of options that cannot work."""


class RowError(RollplexError, ValueError):
    """One data row that cannot be used; the message starts with `row N`."""


class MediaError(RowError):
    """An image or video of one row that is missing, unreadable, empty, or of a type that is not accepted."""


class OverlongPromptError(RowError):
    """A prompt that is longer than `data.max_prompt_tokens` with its media expanded; `data.overlong: drop` drops it."""


class ModelError(RollplexError, ValueError):
    """A model, processor or family that cannot be used as asked."""


class RewardError(RollplexError, RuntimeError):
    """A reward function that raised, hung, or answered with the wrong shape or value."""


class EngineError(RollplexError, RuntimeError):
    """A rollout engine that broke its contract."""


class TrainingError(RollplexError, RuntimeError):
    """An update that must not be made, such as one whose gradient is not finite. The weights are those before it."""


class SamplingExhausted(TrainingError):
    """Dynamic sampling found too few groups whose rewards differ, and `dynamic_sampling_exhausted` is stop."""


class StateError(RollplexError, RuntimeError):
    """An illegal order of operations, such as using a prefix of older weights."""


class CheckpointError(RollplexError, RuntimeError):
    """A checkpoint that cannot be written, is incomplete, or does not fit this run."""


class PeerError(RollplexError, RuntimeError):
    """Another process of the job that ended or left a group; the message names what was waited for."""


class DeadlineError(RollplexError, RuntimeError):
    """A wait that reached its deadline; the message names what was waited for."""
