"""Documentation quotes messages that exist, its code runs, and README stays short (`make check` builds the site)."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import stoker

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FILES = sorted(Path(stoker.__file__).parent.rglob("*.py"))
SCREENS = 2 * 1080  # pixels that README may be high
COLUMN, LETTER = 830, 7.7  # pixels of GitHub's column, and of a letter there
CODE = 97  # letters of a line of code that the column shows
SCREEN = 66  # lines of the loop: what happens in a step


def name(path: Path) -> str:
    return ".".join(path.relative_to(Path(stoker.__file__).parents[1]).with_suffix("").parts).removesuffix(".__init__")


def messages() -> str:
    """Every text of the package, one a line, with ... where a value is put in."""

    def text_of(node: ast.AST) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, ast.JoinedStr):
            return "".join("..." if isinstance(part, ast.FormattedValue) else text_of(part) for part in node.values)
        if isinstance(node, ast.BinOp):
            return text_of(node.left) + text_of(node.right)
        return ""

    found = []
    for path in FILES:
        found += [text_of(node) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    return "\n".join(found)


def test_troubleshooting_quotes_messages_that_exist() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^### `(.+)`$", page, re.MULTILINE)
    known = messages()
    assert len(quoted) >= 30
    assert [text for text in quoted if text not in known] == []


def shown(text: str) -> int:
    """Estimate the height of a page in pixels, as GitHub shows it; Chromium needs 2,114 for README (in Noto Sans)."""
    text = re.sub(r"^!\[.*\]\((.*)\)", lambda found: "height " + picture_height(found[1]), text, flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    height = 0
    for place, part in enumerate(re.split(r"(?m)^```.*\n", text)):
        if place % 2:
            assert max(map(len, part.splitlines())) <= CODE, "GitHub cuts longer lines of code"
            height += 20 * part.count("\n") + 48
            continue
        for block in filter(None, part.strip().split("\n\n")):
            rows = [line.strip("| ").split(" | ") for line in block.splitlines() if line.startswith("| ")]
            if rows:
                longest = [max(map(len, column)) for column in zip(*rows, strict=True)]
                free = round((COLUMN - 27 * len(longest)) / LETTER)  # 27: a border and blanks
                widths = [max(4, min(each, free * each // sum(longest))) for each in longest]
                lines = [max(len(textwrap.wrap(*cell)) for cell in zip(row, widths, strict=True)) for row in rows]
                height += sum(24 * count + 13 for count in lines) + 16
            elif block.startswith("#"):
                height += 62
            elif block.startswith("height "):
                height += int(block[7:]) + 22
            else:
                height += 24 * len(textwrap.wrap(block, round(COLUMN / LETTER))) + 16
    return height


def picture_height(path: str) -> str:
    """Return the height of an SVG file in pixels."""
    return str(round(float(re.findall(r'height="([0-9.]+)pt"', (ROOT / path).read_text(encoding="utf-8"))[0]) * 4 / 3))


def test_readme_fits_two_screens_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert shown(text) <= SCREENS
    links = re.findall(r"\]\(([^)# ]+)", text)
    assert [link for link in links if not link.startswith("http") and not (ROOT / link).exists()] == []


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.stem)
def test_the_python_of_a_page_imports_what_it_uses(page: Path) -> None:
    imported: set[str] = set()
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        nodes = list(ast.walk(ast.parse(block)))
        imported |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        assert used & {"stoker", "torch"} <= imported, block


def test_how_it_works_names_modules_that_exist() -> None:
    page = (DOCS / "how_it_works.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_]+/[a-z_/]*(?:\.py)?)`", page)
    assert len(named) >= 15
    assert [name for name in named if not any((root / name).exists() for root in (ROOT, ROOT / "src" / "stoker"))] == []
    loop = (ROOT / "src" / "stoker" / "training" / "loop.py").read_text(encoding="utf-8")
    assert all(f"def {name}(" in loop for name in ("fit", "train_step", "after_step"))
    assert loop[loop.index("def fit(") : loop.index("def _record(")].count("\n") <= SCREEN


def test_every_public_name_is_in_the_reference() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    named = set(re.findall(r"^\.\. auto\w+:: stoker\.(\w+)$", pages, re.MULTILINE))
    modules = {"distributed", "features", "optim", "recipes", "synthetic"}
    assert set(stoker.__all__) - modules - {"__version__"} == named - modules


def modules() -> Iterator[ModuleType]:
    for found in pkgutil.walk_packages(stoker.__path__, "stoker."):
        if not found.name.endswith("__main__"):
            yield importlib.import_module(found.name)


def test_every_public_method_is_explained_in_its_class_or_a_parent() -> None:
    missing = []
    for module in modules():
        for name, each in vars(module).items():
            if not inspect.isclass(each) or each.__module__ != module.__name__ or name.startswith("_"):
                continue
            for method, value in vars(each).items():
                written = isinstance(value, staticmethod | classmethod | property) or inspect.isfunction(value)
                if written and not method.startswith("_") and not inspect.getdoc(getattr(each, method)):
                    missing.append(f"{module.__name__}.{name}.{method}")
    assert missing == []


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in FILES if ">>> " in path.read_text(encoding="utf-8")], ids=name)
def test_examples_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each module in an empty directory, with ``stoker`` and ``torch`` imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stoker.training.defaults.EPOCHS", 10)  # other tests shorten it
    names = {"stoker": stoker, "torch": torch}
    found = doctest.testmod(importlib.import_module(name(path)), extraglobs=names, optionflags=doctest.ELLIPSIS)
    assert found.attempted
    assert found.failed == 0


def test_every_public_class_and_function_has_an_example() -> None:
    public = {each: getattr(stoker, each) for each in stoker.__all__}
    assert [each for each, value in public.items() if callable(value) and ">>> " not in (value.__doc__ or "")] == []
