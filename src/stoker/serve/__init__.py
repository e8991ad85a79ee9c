"""Scores of raw rows: in memory, from an exported model, over HTTP."""
