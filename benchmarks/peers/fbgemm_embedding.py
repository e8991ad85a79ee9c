"""FBGEMM's table-batched embedding on the CPU through its public class."""

from __future__ import annotations

import fbgemm_gpu
import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from worker_tools import argument, embedding_case, versions

config = argument()
torch.set_num_threads(config["threads"])
kinds = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
versions(torch=torch.__version__, fbgemm_gpu=fbgemm_gpu.__version__)


def build():
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, 16, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in config["sizes"]],
        optimizer=kinds[config["optimizer"]],
        learning_rate=config["lr"],
        eps=config["eps"],
        weights_precision=SparseType.FP32,
        output_dtype=SparseType.FP32,
        pooling_mode=PoolingMode.SUM,
        stochastic_rounding=False,
        # The ids are known to be good: spare the peer the check.
        bounds_check_mode=BoundsCheckMode.NONE,
    )


class Current:
    tbe = None


def reset(initial):
    Current.tbe = None
    Current.tbe = build()
    start = 0
    for part in Current.tbe.split_embedding_weights():
        part.copy_(torch.from_numpy(np.array(initial[start : start + len(part)])))
        start += len(part)


def step(given, grad):
    out = Current.tbe(*given)
    out.backward(grad)
    return out


def natural(ids, bases):
    flat = torch.from_numpy(ids.T.reshape(-1).astype(np.int64))  # feature-major, as TBE takes it
    return flat, torch.arange(len(flat) + 1)


for batch in config["batches"]:
    embedding_case(
        config,
        batch,
        reset,
        natural,
        gradient=lambda grad: torch.from_numpy(grad).view(len(grad), -1),
        step=step,
        output=lambda out: out.detach().numpy(),
        weights=lambda: torch.cat([part.detach() for part in Current.tbe.split_embedding_weights()]).numpy(),
    )
