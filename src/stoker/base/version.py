"""The version of Stoker, as datasets, checkpoints and runs note it."""

__version__ = "0.1.0"
