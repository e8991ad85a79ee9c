"""Random programs whose calls are compiled, and batches from workers: slow, so few."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from campaigns import numbers
from placed import difference, draw, placed_run, reconcile, resident_run

import stoker
from stoker import EmbeddingTables, TableConfig

pytestmark = [pytest.mark.slow]


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch._dynamo.config.patch(recompile_limit=100):  # every shape and mode of a program is another
        yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


@pytest.mark.parametrize("seed", [65 + number for number in numbers(8)])
def test_a_compiled_program_equals_the_resident_one_that_is_not(seed: int) -> None:
    case = reconcile(replace(draw(seed, backend="reference"), compiled=True))
    found = difference(resident_run(replace(case, compiled=False)), placed_run(case))
    assert not found, f"seed {seed}: {found}"


class Examples(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 50, (2,), generator=generator), torch.rand(8, generator=generator)


@pytest.mark.parametrize("background", [False, True])
def test_workers_and_an_evaluation_inside_a_compiled_staged_loop(background: bool) -> None:
    found = []
    for placement in (None, stoker.Cached(slots=14)):
        table = TableConfig(name="t", num_embeddings=50, embedding_dim=4, features=("a", "b"))
        tables = EmbeddingTables([table], optimizer=stoker.Adagrad(lr=0.1), placement=placement)
        loader = torch.utils.data.DataLoader(Examples(), batch_size=6, num_workers=2, persistent_workers=True)
        model = torch.compile(lambda ids, t=tables: t(ids).flatten(1), fullgraph=True, backend="aot_eager")
        call, scores = model if placement else lambda ids, t=tables: t(ids).flatten(1), []

        def staged(loader: Any = loader, tables: EmbeddingTables = tables) -> Any:
            return stoker.stage(loader, tables, lookahead=3, background=background, lookups=lambda item: item[0])

        with tables.accumulate():
            for step, (ids, target) in enumerate(staged()):
                (call(ids) * target).sum().backward()
                if step == 3:
                    with torch.no_grad():
                        scores = [call(other).clone() for other, _ in staged([(ids // 2, 0)] * 3)]
        found.append((scores, tables.rows("t")))
        tables.close()
    assert len(found[0][0]) == 3
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
    assert torch.equal(found[0][1], found[1][1])
