"""Prepare datasets from raw logs."""
