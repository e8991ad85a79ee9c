"""TorchRec's own DLRM on its FusedEmbeddingBagCollection (FBGEMM), through their public classes."""

from __future__ import annotations

import fbgemm_gpu
import numpy as np
import torch
import torchrec
from dlrm_tools import dlrm_case, initial_rows
from torch.nn import functional as F
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec_tools import fill_layers, keys_of, layers, linear
from worker_tools import argument, feature_major, versions

config = argument()
torch.set_num_threads(config["threads"])


def build(kind, case):
    optimizer, options = (torch.optim.SGD, {}) if kind == "sgd" else (RowWiseAdagrad, {"eps": config["eps"]})
    tables = FusedEmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=f"t_{key}", embedding_dim=case["dim"], num_embeddings=rows, feature_names=[key])
            for key, rows in zip(keys_of(case), case["sizes"], strict=True)
        ],
        optimizer_type=optimizer,
        optimizer_kwargs={"lr": case["row_lr"][kind], **options},
    )
    model = DLRM(
        embedding_bag_collection=tables,
        dense_in_features=case["bottom"][0],
        dense_arch_layer_sizes=list(case["bottom"][1:]),
        over_arch_layer_sizes=list(case["top"]),
    )
    rows, start = initial_rows(case), 0
    for weight in table_weights(model, case):
        weight.copy_(torch.from_numpy(np.array(rows[start : start + len(weight)])))
        start += len(weight)
    fill_layers(model, case)
    dense = [p for layer in linear(model, case).values() for p in layer.parameters()]
    return model, torch.optim.SGD(dense, lr=config["lr"], fused=True)


def table_weights(model, case):
    """The live weights, in table order."""
    state = model.sparse_arch.embedding_bag_collection.state_dict()
    return [state[f"embedding_bags.t_{key}.weight"].detach() for key in keys_of(case)]


def run(kind, case):
    """One optimizer and shape, with a fresh model."""
    model, optimizer = build(kind, case)

    def natural(dense, ids, offsets, labels):
        flat, after = map(torch.from_numpy, feature_major(ids, offsets, len(case["sizes"])))
        features = KeyedJaggedTensor.from_offsets_sync(keys=keys_of(case), values=flat, offsets=after)
        return torch.from_numpy(dense), features, torch.from_numpy(labels)

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
        case,
        natural,
        step,
        layers=lambda: layers(model, case),
        rows=lambda: np.concatenate([weight.numpy() for weight in table_weights(model, case)]),
    )


versions(torch=torch.__version__, fbgemm_gpu=fbgemm_gpu.__version__, torchrec=torchrec.__version__)
for shape in config["cases"]:
    for name in config["optimizers"]:
        run(name, shape)
