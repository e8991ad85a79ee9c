"""TorchRec's own DLRM on its FusedEmbeddingBagCollection (FBGEMM), through their public classes."""

from __future__ import annotations

import fbgemm_gpu
import numpy as np
import torch
import torchrec
from dlrm_tools import dlrm_case, initial_rows, start_of
from torch import nn
from torch.nn import functional as F
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from worker_tools import argument, versions

config = argument()
torch.set_num_threads(config["threads"])
sizes, dim = config["sizes"], config["bottom"][-1]
keys = [f"C{i + 1}" for i in range(len(sizes))]
fields = len(sizes) + 1


def columns():
    """TorchRec lists pairs by the upper triangle: where each of its top MLP's inputs stands with us."""
    place = {}
    for number, (row, column) in enumerate(torch.tril_indices(fields, fields, offset=-1).T.tolist()):
        place[column, row] = dim + number
    upper = torch.triu_indices(fields, fields, offset=1).T.tolist()
    return np.array([*range(dim), *(place[tuple(pair)] for pair in upper)])


def build(kind):
    optimizer, options = (torch.optim.SGD, {}) if kind == "sgd" else (RowWiseAdagrad, {"eps": config["eps"]})
    tables = FusedEmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=f"t_{key}", embedding_dim=dim, num_embeddings=rows, feature_names=[key])
            for key, rows in zip(keys, sizes, strict=True)
        ],
        optimizer_type=optimizer,
        optimizer_kwargs={"lr": config["row_lr"][kind], **options},
    )
    model = DLRM(
        embedding_bag_collection=tables,
        dense_in_features=config["bottom"][0],
        dense_arch_layer_sizes=list(config["bottom"][1:]),
        over_arch_layer_sizes=list(config["top"]),
    )
    rows, start = initial_rows(config), 0
    for weight in table_weights(model):
        weight.copy_(torch.from_numpy(np.array(rows[start : start + len(weight)])))
        start += len(weight)
    given = start_of(config)
    with torch.no_grad():
        for name, layer in linear(model).items():
            weight = given[f"{name}.weight"]
            layer.weight.copy_(torch.from_numpy(weight[:, columns()] if name == "t0" else weight))
            layer.bias.copy_(torch.from_numpy(given[f"{name}.bias"]))
    dense = [p for layer in linear(model).values() for p in layer.parameters()]
    return model, torch.optim.SGD(dense, lr=config["lr"], fused=True)


def linear(model):
    found = [m for part in (model.dense_arch, model.over_arch) for m in part.modules() if isinstance(m, nn.Linear)]
    return dict(zip(config["layers"], found, strict=True))


def table_weights(model):
    """The live weights, in table order."""
    state = model.sparse_arch.embedding_bag_collection.state_dict()
    return [state[f"embedding_bags.t_{key}.weight"].detach() for key in keys]


def layers(model):
    back = np.argsort(columns())
    found = {}
    for name, layer in linear(model).items():
        weight = layer.weight.detach().numpy()
        found[f"{name}.weight"] = weight[:, back] if name == "t0" else weight
        found[f"{name}.bias"] = layer.bias.detach().numpy()
    return found


def natural(dense, ids, labels):
    flat = torch.from_numpy(ids.T.reshape(-1).astype(np.int64))
    features = KeyedJaggedTensor.from_offsets_sync(keys=keys, values=flat, offsets=torch.arange(len(flat) + 1))
    return torch.from_numpy(dense), features, torch.from_numpy(labels)


def run(kind, batch):
    """One optimizer and batch size, with a fresh model."""
    model, optimizer = build(kind)

    def step(given):
        dense, features, labels = given
        logits = model(dense_features=dense, sparse_features=features).squeeze(1)
        F.binary_cross_entropy_with_logits(logits, labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        return logits.detach().numpy()

    dlrm_case(
        config,
        kind,
        batch,
        natural,
        step,
        layers=lambda: layers(model),
        rows=lambda: np.concatenate([weight.numpy() for weight in table_weights(model)]),
    )


versions(torch=torch.__version__, fbgemm_gpu=fbgemm_gpu.__version__, torchrec=torchrec.__version__)
for kind in config["optimizers"]:
    for batch in config["batches"]:
        run(kind, batch)
