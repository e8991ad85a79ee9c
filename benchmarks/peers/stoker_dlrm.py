"""Stoker's DLRM: the training loop's own four lines; rows resident, or staged behind slots."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import numpy as np
import torch
from dlrm_tools import case_name, dlrm_case, initial_rows, start_of
from placed_tools import placement_of
from worker_tools import argument, say, versions

from stoker import DLRM, Batch, FeatureSpec, optim, stage
from stoker.ops import loss as loss_module
from stoker.tables.storage import Rows

config = argument()
torch.set_num_threads(config["threads"])


def build(kind, case):
    rule = {"sgd": optim.SGD, "rowwise_adagrad": optim.RowWiseAdagrad}[kind]
    options = {} if kind == "sgd" else {"eps": config["eps"]}
    model = DLRM(
        FeatureSpec.from_sizes(case["bottom"][0], case["sizes"]),
        embedding_dim=case["dim"],
        bottom=case["bottom"][1:],
        top=case["top"],
        pooling="sum",
        matmul={"float32": "fp32", "bfloat16": "bf16"}[config["dense_dtype"]],
        optimizer=rule(lr=case["row_lr"][kind], **options),
        placement=placement_of(config, {f"C{i + 1}": rows for i, rows in enumerate(case["sizes"])}),
    )
    initial, start = initial_rows(case), 0
    for i, rows in enumerate(case["sizes"]):
        state = {k: torch.zeros(rows, *v.shape[1:]) for k, v in model.embeddings.groups[0].storage.state.items()}
        model.embeddings.write(f"C{i + 1}", 0, Rows(torch.from_numpy(initial[start : start + rows].copy()), state))
        start += rows
    with torch.no_grad():
        for name, value in start_of(case).items():
            parameter(model, name).copy_(torch.from_numpy(value))
    if config["compile"]:
        model.compile_dense()
    return model, torch.optim.SGD(model.dense_parameters(), lr=config["lr"], fused=True)


def parameter(model, name):
    layer, kind = name.split(".")
    return getattr((model.bottom if layer[0] == "b" else model.top).layers[int(layer[1:])], kind)


def shares(model, dense, pool, case, kind):
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
    for number in range(10 if config["quick"] else 40):
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
    say("extra", case=case_name(kind, case), rest=float(np.median(rest)), parts=median, step=total)


def run(kind, case):
    """One optimizer and shape, with a fresh model."""
    model, dense = build(kind, case)

    kept = {}
    # What every contestant does too: keep a reference to the logits.
    handle = model.register_forward_hook(lambda module, given, output: kept.update(logits=output.detach()))

    def natural(dense, ids, offsets, labels):
        if case["longest"] == 1:
            where = {"ids": torch.from_numpy(ids.reshape(case["batch"], -1))}
        else:
            where = {"ids": torch.from_numpy(ids), "offsets": torch.from_numpy(offsets)}
        made.append(Batch(dense=torch.from_numpy(dense), labels=torch.from_numpy(labels), **where))
        return made[-1]

    def endless():
        """The pool again and again, each time as other tensors: a stage knows a batch by its ids."""
        for number in itertools.count():
            batch = made[number % len(made)]
            yield replace(batch, ids=batch.ids.view_as(batch.ids), step=number)

    made = []
    feed = iter(stage(endless(), model, lookahead=config["lookahead"])) if config.get("placement") else None

    def step(given):
        loss = model.loss(given if feed is None else next(feed))
        loss.backward()
        dense.step()
        dense.zero_grad()
        return kept["logits"].float().numpy()

    pool = dlrm_case(
        config,
        kind,
        case,
        natural,
        step,
        layers=lambda: {
            f"{name}.{what}": parameter(model, f"{name}.{what}").detach().numpy()
            for name in case["layers"]
            for what in ("weight", "bias")
        },
        rows=lambda: torch.cat([model.embeddings.rows(f"C{i + 1}") for i in range(len(case["sizes"]))]).numpy(),
    )
    handle.remove()
    if feed is not None:
        feed.close()
    if config["dense_dtype"] == "float32" and not config["compile"] and case["shares"]:
        shares(model, dense, pool, case, kind)


versions(torch=torch.__version__)
for shape in config["cases"]:
    for name in config["optimizers"]:
        run(name, shape)
