"""TorchRec's DLRM with row-wise sharding on gloo: DistributedModelParallel, fused optimizers of FBGEMM."""

from __future__ import annotations

import fbgemm_gpu
import numpy as np
import torch
import torch.distributed as dist
import torchrec
from dlrm_tools import initial_rows
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from ranks_tools import ranks_case, run_on_ranks
from torch.nn import functional as F
from torchrec.distributed import DistributedModelParallel, ShardingEnv
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec_tools import fill_layers, keys_of, layers, linear
from worker_tools import argument, versions

config = argument()
CPU = torch.device("cpu")


def build(kind, case):
    rule = {"sgd": EmbOptimType.EXACT_SGD, "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD}[kind]
    fused = {"optimizer": rule, "learning_rate": case["row_lr"][kind], "eps": config["eps"]}
    tables = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=f"t_{key}", embedding_dim=case["dim"], num_embeddings=rows, feature_names=[key])
            for key, rows in zip(keys_of(case), case["sizes"], strict=True)
        ],
        device=torch.device("meta"),
    )
    model = DLRM(
        embedding_bag_collection=tables,
        dense_in_features=case["bottom"][0],
        dense_arch_layer_sizes=list(case["bottom"][1:]),
        over_arch_layer_sizes=list(case["top"]),
        dense_device=CPU,
    )
    fill_layers(model, case)
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    size = dist.get_world_size()
    plan = construct_module_sharding_plan(
        tables,
        {f"t_{key}": row_wise(compute_kernel="fused") for key in keys_of(case)},
        sharder=sharder,
        local_size=size,
        world_size=size,
        device_type="cpu",
    )
    whole = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=CPU,
        plan=ShardingPlan({"sparse_arch.embedding_bag_collection": plan}),
        sharders=[sharder],
    )
    rows, starts = initial_rows(case), np.cumsum([0, *case["sizes"]])
    for place, offset, weight in live_weights(whole, case):
        begin = starts[place] + offset
        weight.copy_(torch.from_numpy(np.array(rows[begin : begin + len(weight)])))
    dense = [parameter for layer in linear(whole.module, case).values() for parameter in layer.parameters()]
    return whole, torch.optim.SGD(dense, lr=config["lr"], fused=True)


def live_weights(whole, case):
    """(table, first row, weights) of the rows on this rank."""
    state = whole.state_dict()
    found = []
    for place, key in enumerate(keys_of(case)):
        for shard in state[f"sparse_arch.embedding_bag_collection.embedding_bags.t_{key}.weight"].local_shards():
            found.append((place, shard.metadata.shard_offsets[0], shard.tensor.detach()))
    return found


def all_rows(whole, case):
    """[N, D] on every rank."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, [(*at, weight.numpy()) for *at, weight in live_weights(whole, case)])
    starts = np.cumsum([0, *case["sizes"]])
    found = np.empty((starts[-1], case["dim"]), np.float32)
    for place, offset, rows in (piece for part in parts for piece in part):
        found[starts[place] + offset : starts[place] + offset + len(rows)] = rows
    return found


def run(kind, case):
    """One optimizer and shape, with a fresh model."""
    model, optimizer = build(kind, case)
    begin, end = (case["batch"] * each // dist.get_world_size() for each in (dist.get_rank(), dist.get_rank() + 1))

    def natural(dense, ids, labels):
        own = np.ascontiguousarray(ids[begin:end].T).reshape(-1).astype(np.int64)
        offsets = torch.arange(len(own) + 1)
        features = KeyedJaggedTensor.from_offsets_sync(
            keys=keys_of(case), values=torch.from_numpy(own), offsets=offsets
        )
        return torch.from_numpy(dense[begin:end].copy()), features, torch.from_numpy(labels[begin:end].copy())

    def step(given):
        dense, features, labels = given
        logits = model(dense_features=dense, sparse_features=features).squeeze(1)
        F.binary_cross_entropy_with_logits(logits, labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    ranks_case(
        config,
        kind,
        case,
        natural,
        step,
        layers=lambda: layers(model.module, case),
        rows=lambda: all_rows(model, case),
    )


def main():
    versions(torch=torch.__version__, fbgemm_gpu=fbgemm_gpu.__version__, torchrec=torchrec.__version__)
    for shape in config["cases"]:
        for name in config["optimizers"]:
            run(name, shape)


run_on_ranks(config, main)
