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
from worker_tools import argument, embedding_case, feature_major, versions

config = argument()
torch.set_num_threads(config["threads"])
kinds = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
versions(torch=torch.__version__, fbgemm_gpu=fbgemm_gpu.__version__)


def run(case):
    """One shape of the matrix."""
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [
            (rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
            for rows, dim in zip(case["sizes"], case["dims"], strict=True)
        ],
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

    def reset(initial):
        for part, rows in zip(tbe.split_embedding_weights(), initial, strict=True):
            part.copy_(torch.from_numpy(np.array(rows)))

    def step(given, grad):
        out = tbe(*given)
        out.backward(grad)
        return out

    embedding_case(
        config,
        case,
        reset,
        natural=lambda *batch: tuple(map(torch.from_numpy, feature_major(*batch, len(case["sizes"])))),
        gradient=torch.from_numpy,
        step=step,
        output=lambda out: out.detach().numpy(),
        weights=lambda: [part.detach().numpy() for part in tbe.split_embedding_weights()],
    )


for shape in config["cases"]:
    run(shape)
