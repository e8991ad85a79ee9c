"""The version of Stoker, which datasets, checkpoints and runs record."""

__version__ = "0.1.0"
