"""A tensor-train step with parts of it left out, built from the public operations."""

from __future__ import annotations

import torch
from tt_tools import LR, run_cases
from worker_tools import argument, versions

import stoker
from stoker.ops import get_backend
from stoker.ops.tt.lookup import expand, gradients
from stoker.ops.tt.shape import Level, TTShape
from stoker.ops.tt.trie import Trie, build_trie
from stoker.optim import SGD
from stoker.tables.compressed.tensor_train import update_slices

config = argument()
torch.set_num_threads(config["threads"])
versions(torch=torch.__version__, stoker=stoker.__version__)
parts = {"aggregate": True, "reuse": True, "distinct": True, "permuted": False} | config["parts"]
if parts["permuted"]:
    for given in config["cases"]:
        given["ids"] = given["permuted"]


def chains(rows, shape, like):
    """A trie in which no two rows share a node."""
    digits = []
    for count in reversed(shape.rows):
        digits.append(rows % count)
        rows = rows // count
    levels, places = [], None
    for digit in reversed(digits):
        ordered, order = torch.sort(digit, stable=True)
        by_prefix = torch.empty_like(order)
        by_prefix[order] = torch.arange(len(order))
        found, counts = torch.unique_consecutive(ordered, return_counts=True)
        start = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        levels.append(
            Level(
                digit=ordered,
                parent=None if places is None else places[order],
                digits=found,
                start=start,
                by_prefix=by_prefix,
                children=None if places is None else torch.ones_like(order),
            )
        )
        places = by_prefix if len(levels) > 1 else digit
    return Trie.make(shape, levels, like)


class Parts:
    def __init__(self, case, cores):
        self.shape = TTShape(tuple(case["rows"]), tuple(case["cols"]), tuple(case["ranks"]))
        self.weights = [torch.from_numpy(core) for core in cores]
        self.rule = SGD(lr=LR).rule(0)
        self.backend = get_backend("auto", torch.device("cpu"))

    def ids(self, batch):
        return torch.from_numpy(batch)

    def gradient(self, grad):
        return torch.from_numpy(grad)

    def trie(self, rows):
        return (build_trie if parts["reuse"] else chains)(rows, self.shape, self.weights[0])

    def forward(self, ids):
        """Rows may repeat in a trie: it is only prefixes that are made one."""
        if parts["distinct"]:
            rows, inverse = torch.unique(ids, return_inverse=True)
        else:
            rows, order = torch.sort(ids, stable=True)
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(len(order))
        trie = self.trie(rows)
        values = expand(self.weights, trie)
        out = trie.in_order(values.rows)[inverse]
        return out, ids, len(rows), inverse, trie, values

    lookup = forward

    def backward(self, made, grad):
        _, ids, count, inverse, trie, values = made
        if parts["aggregate"] or not parts["distinct"]:
            wanted = torch.zeros(count, grad.shape[1]).index_add_(0, inverse, grad) if parts["distinct"] else None
            if wanted is None:
                wanted = torch.empty_like(grad)
                wanted[inverse] = grad
        else:
            # Every occurrence takes its own way back, through the products that the forward computed.
            ordered, order = torch.sort(ids, stable=True)
            trie, wanted = self.trie(ordered), grad[order]
            if not parts["reuse"]:
                values = expand(self.weights, trie)
        slices = gradients(self.weights, trie, values, trie.from_order(wanted))
        if not parts["reuse"]:  # nodes of the first level repeat digits as well
            (digits, found), level = slices[0], trie.levels[0]
            group = torch.searchsorted(digits, level.digit)
            slices[0] = digits, found.new_zeros(len(digits), *found.shape[1:]).index_add_(0, group, found)
        for weight, (digits, found) in zip(self.weights, slices, strict=True):
            flat = weight.view(len(weight), -1)
            update_slices(self.backend, flat, {}, digits, found.view(len(digits), -1), self.rule)

    def array(self, out):
        return out[0].numpy().copy()

    def cores(self):
        return [weight.numpy() for weight in self.weights]


run_cases(config, Parts)
