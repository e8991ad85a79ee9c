"""Backing stores of rows: memory and files."""
