"""Packages, layers and budgets of docs/maintainers/architecture.md."""

from __future__ import annotations

import ast
import doctest
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import stoker
from stoker.ops.codegen.jit import USED

ROOT = Path(stoker.__file__).parent
LAYERS = {
    "base": 0, "ops": 1, "dataset": 2, "optim": 2, "tables": 3, "models": 4, "placement": 4, "training": 5,
    "rewrite": 6, "prep": 7, "synthetic": 8, "live": 8, "serve": 9, "cli": 10, "distributed": 10, "testing": 10,
    "__init__": 11, "__main__": 11,
}  # fmt: skip
# Most lines of each package, of which it has at least 0.9. Who raises one says why: docs/maintainers/architecture.md.
LINES = {
    "base": 2_476,
    "ops": 7_115,
    "dataset": 3_137,
    "optim": 607,
    "tables": 13_482,
    "models": 1_957,
    "placement": 2_768,
    "training": 11_239,
    "rewrite": 1_811,
    "prep": 13_774,
    "synthetic": 1_645,
    "cli": 3_496,
    "live": 1_343,
    "serve": 1_643,
}  # fmt: skip
ALL_LINES = 66_884
MODULES = 15  # in a folder
LONGEST = 800  # lines of a module

FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))
#: Names of a class and of something else, and why.
SHARED_NAMES = {
    "Array",  # an array in machine code, and in modules that use NumPy ``NDArray[Any]``
    "Split",  # the rows of a split, and the feature that is called ``split`` in a schema: users see both
}
STUBS = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.pyi"))
NAMES = {".".join(("stoker", *(path.parent if path.stem == "__init__" else path.with_suffix("")).parts)): path
         for path in FILES}  # fmt: skip


def package(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


@cache
def nodes(text: str) -> list[ast.AST]:
    """All nodes of a module, the module first. Its text is parsed once for all tests."""
    return list(ast.walk(ast.parse(text)))


def imported(text: str) -> Iterator[str]:
    """The modules of stoker that a module imports, wherever the import stands: in functions and for types, too."""
    for node in nodes(text):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "stoker")
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports are not followed here"
            if node.module and node.module.split(".")[0] == "stoker":
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    yield whole if whole in NAMES else node.module


@cache
def all_imports() -> dict[Path, list[Path]]:
    return {path: sorted({NAMES[name] for name in imported((ROOT / path).read_text())} - {path}) for path in FILES}


def faults(imports: Mapping[Path, list[Path]]) -> list[str]:
    """Imports that do not go to a lower layer."""
    found = []
    for path, others in imports.items():
        for other in others:
            if package(path) == package(other):
                continue
            if package(other) == "testing" or LAYERS[package(other)] >= LAYERS[package(path)]:
                found.append(f"{path} (layer {LAYERS[package(path)]}) imports {other} (layer {LAYERS[package(other)]})")
    return found


def cycles(imports: Mapping[Path, list[Path]]) -> list[list[Path]]:
    """Modules that import each other, by way of others too: the strongly connected parts (Tarjan 1972)."""
    number: dict[Path, int] = {}
    lowest: dict[Path, int] = {}
    stack: list[Path] = []
    found = []

    def visit(path: Path) -> None:
        number[path] = lowest[path] = len(number)
        stack.append(path)
        for other in imports[path]:
            if other not in number:
                visit(other)
                lowest[path] = min(lowest[path], lowest[other])
            elif other in stack:
                lowest[path] = min(lowest[path], number[other])
        if lowest[path] == number[path]:
            part = stack[stack.index(path) :]
            del stack[stack.index(path) :]
            if len(part) > 1:
                found.append(sorted(part))

    for path in imports:
        if path not in number:
            visit(path)
    return found


def test_every_package_is_in_a_layer() -> None:
    assert {package(path) for path in FILES} == set(LAYERS)
    assert set(LINES) == {name for name in LAYERS if (ROOT / name).is_dir()}


def test_imports_go_down() -> None:
    assert faults(all_imports()) == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert cycles(all_imports()) == []


def test_kernels_use_modules_whose_change_compiles_them_anew() -> None:
    makers = ("import jit", "PLAIN, jit", "import Kernel", "stamped")
    kernels = [path for path in FILES if any(each in (ROOT / path).read_text() for each in makers)]
    assert {package(path) for path in kernels} > {"ops", "tables", "prep"}
    for path in kernels:
        used = {package(other) for other in all_imports()[path]}
        assert used <= {*USED, package(path)}, path


def test_folders_and_modules_are_small_and_explained() -> None:
    count: dict[Path, int] = defaultdict(int)
    for path in FILES:
        count[path.parent] += 1
        text = (ROOT / path).read_text()
        assert len(text.splitlines()) <= LONGEST, path
        assert ast.get_docstring(nodes(text)[0]), f"{path} has no docstring"  # type: ignore[arg-type]
    assert {folder: modules for folder, modules in count.items() if modules > MODULES} == {}


def shared_names(texts: Mapping[Path, str]) -> dict[str, list[str]]:
    """Return the names of a class and another class or a type, and where these are; ``_Part`` and ``Part`` are one."""
    found: dict[str, list[str]] = defaultdict(list)
    classes = set()
    for path, text in texts.items():
        for node in nodes(text):
            if isinstance(node, ast.ClassDef):
                classes.add(name := node.name.lstrip("_"))
                found[name].append(f"{path}:{node.lineno}")
        for node in nodes(text)[0].body:  # type: ignore[attr-defined]
            if isinstance(node, ast.Assign | ast.AnnAssign):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if not (name := ast.unparse(target).lstrip("_")).isupper():  # a constant
                    found[name].append(f"{path}:{node.lineno}")
    return {name: found[name] for name in sorted(classes) if len(found[name]) > 1}


def test_no_class_name_stands_for_two_things() -> None:
    assert set(shared_names({path: (ROOT / path).read_text() for path in FILES})) == SHARED_NAMES
    texts = {
        Path("a.py"): "class _Part: ...\nclass Rows: ...\nInts = list[int]",
        Path("b.py"): "def f():\n    class Part: ...\n_Rows = list[int]\nInts = list[int]",
    }
    assert shared_names(texts) == {"Part": ["a.py:1", "b.py:2"], "Rows": ["a.py:2", "b.py:3"]}


@cache
def lines(path: Path) -> int:
    """Count the lines of a module but for the examples in its docstrings."""
    text, parser = (ROOT / path).read_text(), doctest.DocTestParser()
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = [ast.get_docstring(node) or "" for node in nodes(text) if isinstance(node, kinds)]
    shown = [example for each in texts for example in parser.get_examples(each)]
    return len(text.splitlines()) - sum(each.source.count("\n") + each.want.count("\n") for each in shown)


@pytest.mark.parametrize("name", LINES)
def test_a_package_keeps_its_budget(name: str) -> None:
    used = sum(lines(path) for path in FILES if package(path) == name)
    assert used <= LINES[name]
    assert used > 0.9 * LINES[name], "the package has become smaller: lower its budget, so that it stays so"


def test_the_source_keeps_its_budget() -> None:
    assert sum(map(lines, FILES + STUBS)) <= ALL_LINES


#: Module -> names that only it may use: it replaces and locks files, or counts cores and memory, for all others.
ONE_WAY = {
    "base/files.py": {"os.replace", "os.rename", "os.renames", "shutil.move", "fcntl.flock", "fcntl.lockf", "msvcrt"},
    "base/device.py": {
        "os.cpu_count",
        "os.sched_getaffinity",
        "resource.getrusage",
        "VmHWM",
        "os.process_cpu_count",
    },
}


def other_ways(path: Path, text: str) -> list[str]:
    """Uses of what another module does for all, calls of Path.replace and Path.rename, and translations of OSError.

    An error of the operating system that becomes an error of ours, and nothing else, goes through ``errors_as``.
    """
    banned = set().union(*(names for owner, names in ONE_WAY.items() if owner != path.as_posix()))
    moves = {"replace"} if package(path) == "prep" else {"replace", "rename"}  # frames of Polars have a rename(), too
    found = []
    for node in nodes(text):
        if isinstance(node, ast.ImportFrom):
            names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        else:
            plain = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)  # all banned ones are os.name
            names = {f"{node.value.id}.{node.attr}"} if plain else set()  # type: ignore[attr-defined]
            names |= {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()
        found += [f"{path}: {name}" for name in sorted(map(str, names & banned))]
        plain = isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords
        if plain and isinstance(node.func, ast.Attribute) and node.func.attr in moves:  # type: ignore[attr-defined]
            found.append(f"{path}: {ast.unparse(node)}")
        if isinstance(node, ast.Try) and len(node.handlers) == 1 and not node.finalbody and not node.orelse:
            (handler,) = node.handlers
            translated = len(handler.body) == 1 and isinstance(handler.body[0], ast.Raise) and handler.body[0].exc
            if translated and "OSError" in ast.unparse(handler.type or node) and ".errno" not in ast.unparse(handler):
                found.append(f"{path}: {ast.unparse(handler.body[0])}")
    return found


def test_there_is_one_way_each() -> None:
    assert [each for path in FILES for each in other_ways(path, (ROOT / path).read_text())] == []


def test_other_ways_are_found() -> None:
    used = [
        "os.replace(a, b)", "from os import rename", "shutil.move(a, b)", "path.rename(other)", "path.replace(other)",
        "import fcntl\nfcntl.flock(file, 2)", "len(os.sched_getaffinity(0))", "os.cpu_count()", "field('VmHWM')",
        "try:\n    f()\nexcept (OSError, ValueError) as error:\n    raise DataError('x') from error",
    ]  # fmt: skip
    for text in used:
        assert len(other_ways(Path("cli/x.py"), text)) == 1, text
    assert other_ways(Path("base/files.py"), "os.replace(a, b)") == []
    fine = "text.replace('a', 'b')\nwhen.replace(hour=0)\ntry:\n    f()\nexcept OSError:\n    pass"
    assert other_ways(Path("cli/x.py"), fine) == []


def test_the_quick_tests_are_of_every_package() -> None:
    tests = Path(__file__).parent
    named = {Path(line).relative_to("tests") for line in (tests / "quick.txt").read_text().splitlines()}
    files = {path.relative_to(tests) for path in tests.rglob("test_*.py")}
    assert named <= files
    assert {path.parent for path in named} == {path.parent for path in files}


def test_faults_are_found() -> None:
    base, ops, cli = Path("base/x.py"), Path("ops/x.py"), Path("cli/x.py")
    assert faults({cli: [ops], ops: [base], base: []}) == []
    assert len(faults({base: [ops], ops: [cli, base], cli: []})) == 2
    assert len(faults({Path("dataset/x.py"): [Path("optim/x.py")]})) == 1, "the same layer is not below"
    assert cycles({base: [ops], ops: [base], cli: [base]}) == [[base, ops]]
    text = "def f():\n    from stoker.base import errors\n    import stoker.base.units\n"
    assert list(imported(text)) == ["stoker.base.errors", "stoker.base.units"]
