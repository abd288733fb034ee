"""Errors that a person can act on.

Every class here stands for a mistake that the user can repair. The message is one sentence that names the value, the
place and the fix; the command line prints it without a traceback and exits with code 2. Bugs of ours are ordinary
exceptions.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class QatLoraError(Exception):
    """Base of all errors that the user can repair."""


class ConfigError(QatLoraError, ValueError):
    """A setting is unknown, out of range, or contradicts another one."""


class ModelError(QatLoraError):
    """A model or tokenizer cannot be found, read, or used."""


class DataError(QatLoraError):
    """A text source is missing, empty, or holds ids that the model does not know."""


class CacheError(QatLoraError):
    """A KD cache is missing, damaged, or incomplete."""


class CacheMismatch(CacheError):
    """A KD cache is sound but was made for something else."""


class CheckpointError(QatLoraError):
    """A checkpoint is missing, truncated, or belongs to another run."""


class TrainingError(QatLoraError):
    """A run cannot continue: its loss or its weights are not finite."""


class ExportMismatch(QatLoraError):
    """A reloaded export does not reproduce the model that was trained."""


class DeviceError(QatLoraError):
    """A device was named that this machine does not offer."""


class RemoteError(QatLoraError):
    """Files that lie elsewhere cannot be reached: a package, a login, a bucket or the network is missing."""


class OutputError(QatLoraError):
    """A result cannot be written where it was asked for."""


class DiskFull(OutputError):
    """A result cannot be written for want of space."""


def first_line(error: BaseException, length: int = 160) -> str:
    """What an error says, as a part of a sentence: its first line, or its class where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:length]


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the closest known word, else the list of known words."""
    words = sorted(known)
    close = difflib.get_close_matches(given, words, n=1)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(words)}."
