"""What the tables replace, with their face: ``nn.EmbeddingBag`` for every table, and ``torch.optim.SGD``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from stoker import TableConfig
from stoker.tables.storage import Rows

__all__ = ["Bags"]


class Bags(nn.Module):
    """Bags of plain PyTorch that programs (tests/tables/programs.py) run on. Rows step when those of tables do."""

    def __init__(self, tables: Sequence[TableConfig], steps: dict[str, int], *, lr: float, include_last_offset: bool):
        super().__init__()
        self.configs = {table.name: table for table in tables}
        self.features = [(name, table) for table in tables for name in table.features]
        self.steps, self.include_last_offset = steps, include_last_offset
        self.bags = nn.ParameterDict(
            {t.name: nn.Parameter(torch.zeros(t.num_embeddings, t.embedding_dim)) for t in tables}
        )
        self.rate, self.gradient_scale, self.tick = lr, 1.0, 0
        self.frozen: set[str] = set()
        for name, rows in self.bags.items():  # what is frozen is decided by each backward
            rows.register_hook(lambda grad, name=name: torch.zeros_like(grad) if name in self.frozen else grad)
        self.accumulating = self.driven = False
        self.optimizer = torch.optim.SGD(self.parameters(), lr=lr)

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        self.optimizer.param_groups[0]["lr"] = value

    def as_optimizer(self) -> torch.optim.Optimizer:
        self.driven = True
        return self.optimizer

    def freeze(self, name: str) -> None:
        self.frozen.add(name)

    def unfreeze(self, name: str) -> None:
        self.frozen.remove(name)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        self.accumulating = True
        try:
            yield
            if not self.driven:
                self.optimizer.step()
        finally:
            self.accumulating = False
            if not self.driven:
                self.optimizer.zero_grad()

    def before_backward(self) -> list[Tensor | None]:
        """The gradients so far."""
        return [None if p.grad is None else p.grad.clone() for p in self.parameters()]

    def after_backward(self, before: list[Tensor | None], *, failed: bool) -> None:
        """A backward has ended: rows step, or what it left is taken away."""
        for parameter, grad, old in zip(self.parameters(), [p.grad for p in self.parameters()], before, strict=True):
            if failed:
                parameter.grad = old
            elif grad is not None and self.gradient_scale != 1.0:
                new = grad if old is None else grad - old
                parameter.grad = new * self.gradient_scale + (0.0 if old is None else old)
        if not failed and not self.driven and not self.accumulating:
            for name in self.frozen:
                self.bags[name].grad = None  # so that the step does not touch them
            self.optimizer.step()
            self.optimizer.zero_grad()

    def read(self, name: str, chunk: int = 2**18) -> Iterator[tuple[int, Rows]]:
        weight = self.bags[name].detach()
        for start in range(0, len(weight), chunk):
            yield start, Rows(weight[start : start + chunk], {})

    def write(self, name: str, start: int, rows: Rows) -> None:
        with torch.no_grad():
            self.bags[name][start : start + len(rows.weight)] = rows.weight

    def rows(self, name: str) -> Tensor:
        return self.bags[name].detach().clone()

    def forward(self, ids: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        flat, count = ids.reshape(-1).long(), len(self.features)
        ends = torch.arange(len(flat) + 1) if offsets is None else offsets.long()
        if offsets is not None and not self.include_last_offset:
            ends = torch.cat([ends, torch.tensor([len(flat)])])
        spans = list(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True))
        found = []
        for place, (name, table) in enumerate(self.features):
            mine = spans[place::count]
            for span in _steps(mine, self.steps[name]) if name in self.steps else [mine]:
                which = torch.cat([torch.arange(begin, end) for begin, end in span])
                starts = torch.tensor([0, *(end - begin for begin, end in span)]).cumsum(0)
                found.append(
                    nn.functional.embedding_bag(
                        flat[which], self.bags[table.name], starts, mode=table.pooling,
                        per_sample_weights=None if weights is None else weights[which],
                        include_last_offset=True, padding_idx=table.padding_idx,
                    )
                )  # fmt: skip
        if len({part.shape[1] for part in found}) > 1:
            return torch.cat(found, dim=1)
        return torch.stack(found, dim=1)


def _steps(spans: list[tuple[int, int]], steps: int) -> list[list[tuple[int, int]]]:
    """For every step the ids that each example has there: one or none, the newest in the last step."""
    place = [[end - steps + step for _, end in spans] for step in range(steps)]
    return [
        [(at, at + 1) if at >= begin else (begin, begin) for at, (begin, _) in zip(row, spans, strict=True)]
        for row in place
    ]
