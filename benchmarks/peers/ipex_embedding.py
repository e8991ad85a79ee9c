"""Intel Extension for PyTorch: merged embedding bags with a fused optimizer, a module for tables of equal width."""

from __future__ import annotations

import intel_extension_for_pytorch as ipex
import numpy as np
import torch
from intel_extension_for_pytorch.nn.modules import MergedEmbeddingBagWithSGD
from intel_extension_for_pytorch.nn.modules.merged_embeddingbag import MergedEmbeddingBagWithAdaGrad
from torch import nn
from worker_tools import argument, embedding_case, feature_major, versions

config = argument()
torch.set_num_threads(config["threads"])
versions(torch=torch.__version__, ipex=ipex.__version__)


class Merged:
    """The tables of each width in a module of their own."""

    def __init__(self, case):
        self.batch, self.dims = case["batch"], case["dims"]
        self.members = {dim: [t for t, d in enumerate(self.dims) if d == dim] for dim in dict.fromkeys(self.dims)}
        self.columns = np.cumsum([0, *self.dims])

    def reset(self, initial):
        self.modules = []
        for members in self.members.values():
            bags = [
                nn.EmbeddingBag(
                    *initial[t].shape,
                    _weight=torch.from_numpy(np.array(initial[t])),
                    mode="sum",
                    include_last_offset=True,
                )
                for t in members
            ]
            if config["optimizer"] == "sgd":
                self.modules.append(MergedEmbeddingBagWithSGD.from_embeddingbag_list(bags, lr=config["lr"]))
            else:
                # Its eps is inside the root.
                self.modules.append(
                    MergedEmbeddingBagWithAdaGrad.from_embeddingbag_list(bags, lr=config["lr"], eps=config["eps"] ** 2)
                )

    def natural(self, ids, offsets):
        flat, after = feature_major(ids, offsets, len(self.dims))
        given = []
        for members in self.members.values():
            parts = [after[t * self.batch : (t + 1) * self.batch + 1] for t in members]
            given.append(
                (
                    [torch.from_numpy(flat[part[0] : part[-1]]) for part in parts],
                    [torch.from_numpy(part - part[0]) for part in parts],
                )
            )
        return given

    def gradient(self, grad):
        cut = [torch.from_numpy(grad[:, a:b].copy()) for a, b in zip(self.columns, self.columns[1:], strict=False)]
        return [[cut[t] for t in members] for members in self.members.values()]

    def step(self, given, grads):
        outs = [module(*each) for module, each in zip(self.modules, given, strict=True)]
        for out, grad in zip(outs, grads, strict=True):
            torch.autograd.backward(out, grad)
        return outs

    def output(self, outs):
        looked = [None] * len(self.dims)
        for members, out in zip(self.members.values(), outs, strict=True):
            for t, part in zip(members, out, strict=True):
                looked[t] = part.detach().numpy()
        return np.concatenate(looked, axis=1)

    def weights(self):
        found = [None] * len(self.dims)
        for members, module in zip(self.members.values(), self.modules, strict=True):
            for t, weight in zip(members, module.weights, strict=True):
                found[t] = weight.detach().numpy()
        return found


for shape in config["cases"]:
    if max(shape["dims"]) >= 32:
        continue  # version 2.8 adds the gradient of columns 0 to 15 to later blocks of 16 too: nothing to compare
    one = Merged(shape)
    embedding_case(config, shape, one.reset, one.natural, one.gradient, one.step, one.output, one.weights)
