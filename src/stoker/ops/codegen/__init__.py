"""Machine code from Python: Numba and LLVM."""
