"""Numba kernels of the pairwise interaction, specialised by row width (see :mod:`stoker.ops.interaction`)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from stoker.ops.codegen.llvm_memory import fetch_add
from stoker.ops.codegen.llvm_pairs import LANES, dots, transpose, weighted_rows
from stoker.ops.codegen.llvm_rows import row_copy
from stoker.ops.codegen.native import Kernel, arguments, thread_index


@lru_cache(maxsize=64)
def forward_kernel(dim: int) -> Kernel:
    """Kernel of [B, D] and [B, F, D] to [B, width]: the vectors are turned, so that one row meets 16 others at once."""

    def forward(p):
        dense, embedded, out, width, features, batch, cursor, block, all_rows, all_columns = arguments(p)
        me = thread_index(p)
        rows, columns = all_rows[me], all_columns[me]
        vectors = features + 1
        stride = (vectors + LANES - 1) // LANES * LANES
        products = np.empty(LANES, np.float32)
        while True:
            start = fetch_add(cursor, block)
            if start >= batch:
                return
            for b in range(start, min(start + block, batch)):
                row_copy(dim, rows, 0, dense, b * dim)
                row_copy(dim, out, b * width, dense, b * dim)
                for f in range(features):
                    row_copy(dim, rows, (f + 1) * dim, embedded, (b * features + f) * dim)
                for v in range(0, stride, LANES):
                    for d in range(0, dim - LANES + 1, LANES):
                        transpose(rows, v * dim + d, dim, columns, d * stride + v, stride)
                for d in range(dim // LANES * LANES, dim):
                    for v in range(vectors):
                        columns[d * stride + v] = rows[v * dim + d]
                at = b * width + dim
                for v in range(1, vectors):
                    for begin in range(0, v, LANES):
                        if begin + LANES <= v:
                            dots(dim, rows, v * dim, columns, begin, stride, out, at + begin)
                        else:
                            dots(dim, rows, v * dim, columns, begin, stride, products, 0)
                            for k in range(v - begin):
                                out[at + begin + k] = products[k]
                    at += v
                out[at : (b + 1) * width] = 0.0

    return Kernel(forward, allocates=True)


@lru_cache(maxsize=64)
def backward_kernel(dim: int) -> Kernel:
    """Kernel of the gradients: each vector's is the sum of the others, weighted by the gradients of its pairs."""

    def backward(p):
        dense, embedded, grad, width, grad_dense, grad_embedded, stride, features, batch, cursor, block, all_rows = (
            arguments(p)
        )
        rows = all_rows[thread_index(p)]
        vectors = features + 1
        while True:
            start = fetch_add(cursor, block)
            if start >= batch:
                return
            for b in range(start, min(start + block, batch)):
                row_copy(dim, rows, 0, dense, b * dim)
                for f in range(features):
                    row_copy(dim, rows, (f + 1) * dim, embedded, (b * features + f) * dim)
                triangle = b * width + dim
                row_copy(dim, grad_dense, b * dim, grad, b * width)
                weighted_rows(dim, 0, grad_dense, b * dim, rows, dim, features, grad, triangle, 1, 1)
                for v in range(1, vectors):
                    to = (v - 1) * stride + b * dim
                    across = triangle + v * (v - 1) // 2
                    down = triangle + v * (v + 1) // 2 + v
                    weighted_rows(dim, 1, grad_embedded, to, rows, 0, v, grad, across, 1, 0)
                    weighted_rows(dim, 0, grad_embedded, to, rows, (v + 1) * dim, vectors - 1 - v, grad, down, v + 1, 1)

    return Kernel(backward)
