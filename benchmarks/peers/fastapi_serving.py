"""A DLRM behind FastAPI, as one would write it by hand: dicts for vocabularies, eager torch or ONNX Runtime.

The argument names an .npz file with the weights, one .json file with the values of each column, the engine (``torch``
or ``onnx``), the port, the worker processes and the threads of each. Requests and answers are Arrow streams.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from torch import nn

GIVEN = json.loads(os.environ["SERVING"] if "SERVING" in os.environ else sys.argv[1])


class DLRM(nn.Module):
    """A constant instead of dense columns, products of all pairs, then the top layers."""

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        super().__init__()
        self.constant = nn.Parameter(torch.from_numpy(weights["constant"]))
        layers: list[nn.Module] = []
        for number in range(sum(name.endswith(".bias") for name in weights)):
            weight, bias = (torch.from_numpy(weights[f"top.layers.{number}.{kind}"]) for kind in ("weight", "bias"))
            layer = nn.Linear(weight.shape[1], weight.shape[0])
            layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)
            layers += [layer, nn.ReLU()]
        self.top = nn.Sequential(*layers[:-1])
        self.width = layers[0].in_features  # ours may be padded with zeros

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        first = self.constant.expand(rows.shape[0], 1, -1)
        every = torch.cat([first, rows], dim=1)
        count = every.shape[1]
        below = torch.tril_indices(count, count, -1)
        pairs = torch.bmm(every, every.transpose(1, 2))[:, below[0], below[1]]
        found = torch.cat([first[:, 0], pairs], dim=1)
        found = nn.functional.pad(found, (0, self.width - found.shape[1]))
        return torch.sigmoid(self.top(found)[:, 0])


def _engine(model: DLRM) -> Callable[[torch.Tensor], np.ndarray]:
    if GIVEN["engine"] == "torch":
        return lambda rows: model(rows).numpy()
    import onnxruntime

    example, held = torch.zeros(8, len(COLUMNS), model.constant.shape[-1]), io.BytesIO()
    rows = {0: torch.export.Dim("batch", min=1)}
    torch.onnx.export(model, (example,), dynamo=True, dynamic_shapes=(rows,), verbose=False).save(held)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = GIVEN["threads"]
    session = onnxruntime.InferenceSession(held.getvalue(), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda rows: session.run(None, {name: rows.numpy()})[0]


def _made() -> FastAPI:
    app = FastAPI()
    weights = dict(np.load(GIVEN["weights"]))
    tables = [torch.from_numpy(weights.pop(f"table {name}")) for name in COLUMNS]
    words = [{word: place + 1 for place, word in enumerate(WORDS[name])} for name in COLUMNS]
    engine = _engine(DLRM(weights).eval())

    @app.post("/score")
    async def score(request: Request) -> Response:
        table = pa.ipc.open_stream(await request.body()).read_all()
        found = []
        for name, rows, known in zip(COLUMNS, tables, words, strict=True):
            get = known.get
            ids = torch.tensor([get(value, 0) for value in table[name].to_pylist()])
            found.append(nn.functional.embedding(ids, rows))
        with torch.inference_mode():
            scores = engine(torch.stack(found, 1))
        out = pa.table({"score": scores}).replace_schema_metadata({"update": "0"})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, out.schema) as writer:
            writer.write_table(out)
        return Response(sink.getvalue().to_pybytes(), media_type="application/vnd.apache.arrow.stream")

    return app


torch.set_num_threads(GIVEN["threads"])
WORDS: dict[str, Any] = json.loads(Path(GIVEN["words"]).read_text())
COLUMNS = list(WORDS)

if __name__ == "__main__":
    os.environ["SERVING"] = json.dumps(GIVEN)  # worker processes import this file
    name = Path(__file__).stem
    uvicorn.run(f"{name}:app", app_dir=str(Path(__file__).parent), port=GIVEN["port"], workers=GIVEN["workers"],
                log_level="warning", loop="uvloop", http="httptools")  # fmt: skip
else:
    app = _made()
