"""Prepared datasets: what they are, how they are checked and replaced."""
