"""Kernels for the CPU, in Numba."""
