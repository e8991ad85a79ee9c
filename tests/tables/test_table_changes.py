"""Marks of changed rows of tables that several ranks train: segments are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranked import on_threads
from test_table_ranks import make, train

import stoker
from stoker.base.errors import ConfigError
from stoker.tables import Ranks


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["device", "few slots", "hot"])
def test_any_number_of_ranks_writes_the_same_segments(tmp_path: Path, place: str) -> None:
    def saved(folder: Path, group: Ranks | None) -> dict[str, bytes]:
        tables = make(stoker.Adam(lr=0.1), place)
        stoker.track_changes(tables)
        tables.replicate(group)
        path = stoker.save(folder / "base", tables)
        for number in range(2):
            train(tables, 7 * number, 21, "jagged")
            path = stoker.save(folder / f"s{number}", tables, parent=path)
        tables.close()
        return files(folder)

    alone = saved(tmp_path / "alone", None)
    for size in (2, 3):
        folder = tmp_path / str(size)
        for each in on_threads(size, lambda group, to=folder: saved(to / str(group.rank), group)):
            assert each == alone


def test_rows_that_are_divided_among_ranks_are_not_tracked() -> None:
    def work(group: Ranks) -> str:
        with pytest.raises(ConfigError, match="divided among ranks, whose changes are not tracked") as error:
            stoker.track_changes(make(stoker.SGD(lr=0.1), ranks=group))
        return str(error.value)

    assert len(on_threads(2, work)) == 2
