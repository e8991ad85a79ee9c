"""What both of TorchRec's contestants do with its DLRM: names, the order of pairs, layers in and out."""

from __future__ import annotations

import numpy as np
import torch
from dlrm_tools import start_of
from torch import nn

__all__ = ["fill_layers", "keys_of", "layers", "linear"]


def columns(case):
    """TorchRec lists pairs by the upper triangle: where each of its top MLP's inputs stands with us."""
    fields, dim = len(case["sizes"]) + 1, case["dim"]
    place = {}
    for number, (row, column) in enumerate(torch.tril_indices(fields, fields, offset=-1).T.tolist()):
        place[column, row] = dim + number
    upper = torch.triu_indices(fields, fields, offset=1).T.tolist()
    return np.array([*range(dim), *(place[tuple(pair)] for pair in upper)])


def keys_of(case):
    return [f"C{i + 1}" for i in range(len(case["sizes"]))]


def linear(model, case):
    model = getattr(model, "module", model)  # of DistributedDataParallel
    found = [m for part in (model.dense_arch, model.over_arch) for m in part.modules() if isinstance(m, nn.Linear)]
    return dict(zip(case["layers"], found, strict=True))


def fill_layers(model, case):
    """Set the initial layers."""
    given = start_of(case)
    with torch.no_grad():
        for name, layer in linear(model, case).items():
            weight = given[f"{name}.weight"]
            layer.weight.copy_(torch.from_numpy(weight[:, columns(case)] if name == "t0" else weight))
            layer.bias.copy_(torch.from_numpy(given[f"{name}.bias"]))


def layers(model, case):
    back = np.argsort(columns(case))
    found = {}
    for name, layer in linear(model, case).items():
        weight = layer.weight.detach().numpy()
        found[f"{name}.weight"] = weight[:, back] if name == "t0" else weight
        found[f"{name}.bias"] = layer.bias.detach().numpy()
    return found
