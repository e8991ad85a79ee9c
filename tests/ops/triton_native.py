"""Compile every kernel of the Triton back end to machine code for a GPU that need not be there.

Run as a program: ``python triton_native.py 80`` compiles for compute capability 8.0, ``--full`` for all widths of rows,
``--few`` for one width and type and half of the rules (others for each GPU), and prints one JSON object: kernels
compiled, and what in their PTX would make results differ from the reference, and what each costs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from stoker.ops import Bags, Part, Parts, Rounding, RowRule
from stoker.ops.rule import RULES
from stoker.ops.space import make_space

# A fused multiply-add, an approximate division or square root, or flushing of tiny numbers to zero.
INEXACT = re.compile(r"\b(?:fma\.\w+(?:\.ftz)?\.f32|div\.(?:full|approx)\S*|sqrt\.approx\S*|\w+\.(?:rn\.)?ftz\.f32)")
_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


#: Kernels that equal the reference within rounding.
ROUNDING = {"interaction_kernel", "interaction_gradient_kernel", "relu_gradient_kernel", "loss_kernel"}


def _cost(cubin: bytes) -> dict[str, int]:
    """Count registers, bytes on the stack (spills) and loads of 16 bytes."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "-res-usage", "-sass", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    [(registers, stack)] = re.findall(r"REG:(\d+) STACK:(\d+)", said)
    return {"registers": int(registers), "stack": int(stack), "wide loads": said.count("LDG.E.128")}


class Compiler:
    """Takes the place of a launch."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)
        self.seen: dict[str, list[str]] = {}
        self.cost: dict[tuple[Any, ...], dict[str, int]] = {}

    def run(self, kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        values = dict(zip(kernel.arg_names, args, strict=False))
        values |= {name: options.pop(name) for name in kernel.arg_names if name in options}
        constants = {p.name: values[p.name] for p in kernel.params if p.is_constexpr}
        signature, divisible = {}, {}
        for place, name in enumerate(kernel.arg_names):
            value = values[name]
            if name in constants:
                signature[name] = "constexpr"
            elif isinstance(value, torch.Tensor):
                signature[name] = _TYPES[value.dtype]
                divisible[place,] = [["tt.divisibility", 16]]
            elif isinstance(value, float):
                signature[name] = "fp32"
            else:  # another number must not compile anew
                assert kernel.params[place].do_not_specialize, f"{kernel.fn.__name__} is specialised by {name}"
                signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        label = f"{kernel.fn.__name__} {sorted(constants.items())} {sorted(signature.items())}"
        if label in self.seen:
            return
        exact = kernel.fn.__name__ not in ROUNDING
        assert not exact or options["enable_fp_fusion"] is False, f"{kernel.fn.__name__} may contract multiply and add"
        source = ASTSource(kernel, signature, constants, divisible)
        built = triton.compile(source, target=self.target, options=options)
        assert built.asm["cubin"]
        self.seen[label] = sorted(set(INEXACT.findall(built.asm["ptx"]))) if exact else []
        if (kernel.fn.__name__, *options.items()) not in self.cost:
            self.cost[kernel.fn.__name__, *options.items()] = _cost(built.asm["cubin"])


def launches(dims: Sequence[int], types: Sequence[torch.dtype], kinds: Sequence[str], *, full: bool) -> None:
    """Call the back end in every way that selects another kernel, with these rules. Nothing runs."""
    from stoker.ops.gpu.backend import TritonBackend
    from stoker.ops.gpu.kernels import copy_rows

    backend = TritonBackend(lazy=True)
    for dim in dims:
        for dtype in types:
            for index in (torch.int32, torch.int64) if full else (torch.int32,):
                rows = 40 if index == torch.int32 else 2**31 + 5
                space = make_space(["a", "b"], [7, rows], [["x", "z"], ["y"]], ["x", "y", "z"])
                weight = torch.zeros(64, dim, dtype=dtype)
                backend.init_rows(weight, 2**62 + 1, 3, 0.5)
                places = torch.arange(5)
                for rows_of in (weight, weight[:, 0].contiguous()):
                    copy_rows(rows_of, places, rows_of.clone(), places)
                one = Bags(torch.zeros(30, 3, dtype=index))
                flat = torch.zeros(96, dtype=index)
                offsets = torch.arange(0, 97, 16)
                jagged = [
                    Bags(flat, offsets),
                    Bags(flat, offsets, None, True),
                    Bags(flat, offsets, torch.ones(96)),
                ]
                for bags in (one, Bags(one.ids, None, torch.ones(90)), *jagged):
                    grad = torch.zeros(bags.batch_size(3), 3, dim)
                    backend.lookup(weight, space, bags)
                    backend.weight_gradient(weight, space, bags, grad)
                    if bags.offsets is not None:
                        backend.check_offsets(bags.offsets, 96, (9, 9, 9), lambda: None)
                    _updates(backend, weight, space, bags, grad, kinds, full=full and bags is one)
                few = Bags(one.ids[:4])  # no row can have more than 64
                _updates(backend, weight, space, few, torch.zeros(4, 3, dim), kinds, full=False)
                for bags in (one, jagged[1]):
                    _parts(backend, weight, space, bags)


def _parts(backend: Any, weight: Any, space: Any, bags: Bags) -> None:
    """Call the back end for two parts, of the same width here: the features y, and x and z."""
    dim, state = weight.shape[1], {"sum": torch.zeros(64)}
    spaces = make_space(["a"], [7], [["x", "z"]], ["x", "z"]), make_space(["b"], [40], [["y"]], ["y"])
    parts = Parts([
        Part(weight, state, spaces[0], (0, 2), (0, 2 * dim), bags.mean),
        Part(weight, state, spaces[1], (1,), (dim,), False),
    ])  # fmt: skip
    out = backend.lookup_parts(parts, space, bags, (bags.batch_size(3), 3 * dim))
    rule = RowRule("rowwise_adagrad", 0.1, 1e-8, 0.9, 0.999, 0.1, 0.001)
    backend.update_parts(parts, space, bags, out, rule, Rounding((1, 2)))


def dense_launches(kinds: Sequence[tuple[str, torch.dtype]]) -> None:
    """Call the kernels of the dense part for DLRM's 26 features of 128 columns, in these precisions."""
    from stoker.ops.gpu import dense

    rows, grad = torch.zeros(4, 26, 128), torch.zeros(4, 480)
    dense.loss(torch.zeros(8192), torch.zeros(8192))
    for precision, dtype in kinds:
        torch.set_float32_matmul_precision(precision)
        dense.interaction(rows[:, 0].to(dtype), rows, 480)
        dense.interaction_gradient(rows[:, 0].to(dtype), rows, grad.to(dtype))
        dense.relu_gradient(grad.to(dtype), grad.to(dtype))
        dense.relu_gradient(grad[:, :1].to(dtype), grad.to(dtype), grad[:1].to(dtype))


def _updates(backend: Any, weight: Any, space: Any, bags: Any, grad: Any, kinds: Sequence[str], *, full: bool) -> None:
    extras = [{"weight_decay": 0.1, "clip_value": 1.0, "clip_norm": 1.0, "cow_ratio": 1.0}]
    # The step comes after the sums: every rule with one layout, and with the others only those that differ in shape.
    for kind in kinds:
        if not full and bags.offsets is not None and kind not in ("sgd", "rowwise_adagrad", "adam"):
            continue
        names = RULES[kind].state
        state = {name: torch.zeros_like(weight, dtype=torch.float32) for name in names}
        for extra in [*extras, {}] if full else extras:
            rule = RowRule(kind, 0.1, 1e-8, 0.9, 0.999, 0.1, 0.001, **extra)
            backend.update(weight, state, space, bags, grad, rule, Rounding((1, 2)))


def main(capability: int, *, full: bool, few: bool) -> None:
    compiler = Compiler(capability)
    JITFunction.run = lambda kernel, *args, **options: compiler.run(kernel, *args, **options)
    torch.utils.deterministic.fill_uninitialized_memory = True
    types: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    dims: tuple[int, ...] = (16, 100)
    rules = [kind for kind, rule in RULES.items() if rule.scope == "row"]
    if full:
        dims = (1, 4, 8, 16, 32, 64, 100, 128, 256, 384, 1024)
    elif few:
        dims, types = ((100,), types[:1]) if capability < 90 else ((16,), types[1:])
        rules = rules[capability < 90 :: 2]
    launches(dims, types, rules, full=full)
    kinds = [("highest", torch.float32), ("high", torch.float32), ("high", torch.bfloat16)]
    dense_launches(kinds[:1] if few and capability < 90 else kinds[1:2] if few else kinds)
    names = sorted({label.split(" ")[0] for label in compiler.seen})
    inexact = {label: found for label, found in compiler.seen.items() if found}
    print(json.dumps({"variants": len(compiler.seen), "kernels": names, "inexact": inexact,
                      "cost": {str(kind): cost for kind, cost in compiler.cost.items()}}))  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]), full="--full" in sys.argv, few="--few" in sys.argv)
