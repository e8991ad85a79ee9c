"""The notebooks of examples/ run as they stand, and show what they should without a warning."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    assert all(not cell.get("outputs") for cell in book.cells), "clear the outputs before you commit"
    NotebookClient(book, timeout=240, resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    shown = "".join(output.get("text", "") for cell in book.cells for output in cell.get("outputs", []))
    assert "Warning" not in shown
