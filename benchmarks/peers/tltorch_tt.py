"""tensorly-torch's ``FactorizedEmbedding`` (block tensor train), autograd and torch's SGD."""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
import tltorch
import torch
from tt_tools import LR, run_cases
from worker_tools import argument, versions

config = argument()
torch.set_num_threads(config["threads"])
versions(torch=torch.__version__, tltorch=version("tensorly-torch"), tensorly=version("tensorly"))


class Factorized:
    """Its factors are [r_{k-1}, n_k, m_k, r_k]; its table has a row for every combination of digits."""

    def __init__(self, case, cores):
        self.cols, self.sizes = case["cols"], [core.shape for core in cores]
        self.layer = tltorch.FactorizedEmbedding(
            int(np.prod(case["rows"])),
            case["dim"],
            auto_tensorize=False,
            tensorized_num_embeddings=tuple(case["rows"]),
            tensorized_embedding_dim=tuple(case["cols"]),
            factorization="blocktt",
            rank=(1, *case["ranks"], 1),
        )
        with torch.no_grad():
            for factor, core, cols in zip(self.layer.weight.factors, cores, self.cols, strict=True):
                n, left, _ = core.shape
                factor.copy_(torch.from_numpy(core).view(n, left, cols, -1).permute(1, 0, 2, 3))
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=LR)

    def ids(self, batch):
        return torch.from_numpy(batch)

    def gradient(self, grad):
        return torch.from_numpy(grad)

    def forward(self, ids):
        return self.layer(ids)

    @torch.no_grad()
    def lookup(self, ids):
        return self.layer(ids)

    def backward(self, out, grad):
        out.backward(grad)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def array(self, out):
        return out.detach().numpy().copy()

    def cores(self):
        return [
            factor.detach().permute(1, 0, 2, 3).reshape(size).numpy()
            for factor, size in zip(self.layer.weight.factors, self.sizes, strict=True)
        ]


run_cases(config, Factorized)
