"""Evaluation, prediction and metrics."""
