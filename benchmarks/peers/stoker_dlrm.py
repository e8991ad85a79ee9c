"""Stoker's DLRM: the training loop's own four lines."""

from __future__ import annotations

import time

import numpy as np
import torch
from dlrm_tools import case_name, dlrm_case, initial_rows, start_of
from worker_tools import argument, say, versions

from stoker import DLRM, Batch, FeatureSpec, optim
from stoker.ops import loss as loss_module
from stoker.tables.storage import Rows

config = argument()
torch.set_num_threads(config["threads"])
sizes, layer_names = config["sizes"], config["layers"]


def build(kind):
    rule = {"sgd": optim.SGD, "rowwise_adagrad": optim.RowWiseAdagrad}[kind]
    options = {} if kind == "sgd" else {"eps": config["eps"]}
    model = DLRM(
        FeatureSpec.from_sizes(config["bottom"][0], sizes),
        bottom=config["bottom"][1:],
        top=config["top"],
        dense_dtype=config["dense_dtype"],
        optimizer=rule(lr=config["row_lr"][kind], **options),
    )
    initial, start = initial_rows(config), 0
    for i, rows in enumerate(sizes):
        state = {k: torch.zeros(rows, *v.shape[1:]) for k, v in model.embeddings.groups[0].storage.state.items()}
        model.embeddings.write(f"C{i + 1}", 0, Rows(torch.from_numpy(initial[start : start + rows].copy()), state))
        start += rows
    with torch.no_grad():
        for name, value in start_of(config).items():
            parameter(model, name).copy_(torch.from_numpy(value))
    if config["compile"]:
        model.compile_dense()
    return model, torch.optim.SGD(model.dense_parameters(), lr=config["lr"], fused=True)


def parameter(model, name):
    layer, kind = name.split(".")
    return getattr((model.bottom if layer[0] == "b" else model.top).layers[int(layer[1:])], kind)


def shares(model, dense, pool, batch, kind):
    """Where a step's time goes: MLPs and interaction, forward and backward, and all the rest."""
    group = model.embeddings.groups[0]
    spent = [0.0, 0.0]  # seconds inside the one backward: row update, gradient of the loss

    def timed(function, place):
        def call(*given):
            begin = time.perf_counter()
            result = function(*given)
            spent[place] += time.perf_counter() - begin
            return result

        return call

    update_rows, loss_backward = group.update, loss_module._Loss.backward
    group.update = timed(update_rows, 0)
    loss_module._Loss.backward = staticmethod(timed(loss_backward, 1))
    rest, whole, parts = [], [], []
    for number in range(10 if config["quick"] else 60):
        batch_ = pool[number % len(pool)]
        spent[:] = 0.0, 0.0
        clock = [time.perf_counter()]
        embedded = model.embeddings(batch_.ids, batch_.offsets, batch_.weights)
        clock.append(time.perf_counter())
        logits = model.dense_part(batch_.dense, embedded)
        clock.append(time.perf_counter())
        loss = loss_module.binary_cross_entropy(logits, batch_.labels)
        clock.append(time.perf_counter())
        loss.backward()
        clock.append(time.perf_counter())
        dense.step()
        dense.zero_grad()
        clock.append(time.perf_counter())
        lookup, _, loss_time, _, update = np.diff(clock)
        loss_time += spent[1]
        whole.append(clock[-1] - clock[0])
        parts.append([lookup, spent[0], loss_time, update])
        rest.append((lookup + loss_time + update + spent[0]) / whole[-1])
    group.update, loss_module._Loss.backward = update_rows, staticmethod(loss_backward)
    names = ("lookup", "row update", "loss", "dense optimizer")
    median = dict(zip(names, np.median(parts, axis=0).tolist(), strict=True))
    total = float(np.median(whole))
    say("extra", case=case_name(kind, batch), rest=float(np.median(rest)), parts=median, step=total)


def run(kind, batch):
    """One optimizer and batch size, with a fresh model."""
    model, dense = build(kind)

    kept = {}
    # What every contestant does too: keep a reference to the logits.
    handle = model.register_forward_hook(lambda module, given, output: kept.update(logits=output.detach()))

    def step(given):
        loss = model.loss(given)
        loss.backward()
        dense.step()
        dense.zero_grad()
        return kept["logits"].numpy()

    pool = dlrm_case(
        config,
        kind,
        batch,
        natural=lambda d, i, y: Batch(dense=torch.from_numpy(d), ids=torch.from_numpy(i), labels=torch.from_numpy(y)),
        step=step,
        layers=lambda: {
            f"{name}.{what}": parameter(model, f"{name}.{what}").detach().numpy()
            for name in layer_names
            for what in ("weight", "bias")
        },
        rows=lambda: model.embeddings.groups[0].storage.weight.numpy(),
    )
    handle.remove()
    if config["dense_dtype"] == "float32" and not config["compile"]:
        shares(model, dense, pool, batch, kind)


versions(torch=torch.__version__)
for kind in config["optimizers"]:
    for batch in config["batches"]:
        run(kind, batch)
