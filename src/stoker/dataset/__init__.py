"""Prepared datasets: how they are read, checked and replaced."""
