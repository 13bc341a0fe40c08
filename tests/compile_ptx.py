"""Compile what the operators launch to PTX, and say how it was launched.

    TRITON_INTERPRET=0 python tests/compile_ptx.py sm_80 flat turned

Prints a line of JSON for each kernel: the PTX, its grid and shared memory,
its arguments in order (["input", k], ["output", k] or a number), and the
layout of its outputs. The inputs are those of inputs(), whose values do not
matter here.
"""

import json
import sys

from nbxtensor import runtime

import torch
import triton
from compile_kernels import ALIGNED, LAYOUTS, OPERATORS, POINTERS, Types, target
from triton.compiler import ASTSource

SIZE = 128  # of the square matrix that all layouts view
# Each dtype takes part in these; the others only for two dtypes.
ALL_DTYPES = ("flat", "turned")


def inputs(matrix, layout, count):
    """An operator's inputs: views of a matrix of SIZE by SIZE."""
    return LAYOUTS[layout](matrix)[:count]


def cases(layouts):
    """Operator, dtype and layout of each launch."""
    for name, (count, dtypes) in OPERATORS.items():
        for dtype in dtypes:
            for layout in layouts:
                some = dtype in (torch.float32, torch.int64)
                if layout in ALL_DTYPES or (some and (layout != "mixed" or count > 1)):
                    yield name, dtype, layout


class Exact(Types):
    """Types of a launch, with tensors for pointers: aligned if they are."""

    def of(self, parameter, value, path):
        if not isinstance(value, torch.Tensor):
            return super().of(parameter, value, path)
        if value.storage_offset() * value.itemsize % 16 == 0:
            self.attributes[path] = ALIGNED
        return POINTERS[value.dtype]


def launches(layouts):
    """What is launched: case, kernel, grid, inputs, outputs, values, warps."""
    launched = []

    def catch(kernel, grid, tensors, outputs, like, arguments, warps):
        made = [torch.empty_strided(**like) for _ in range(outputs)]
        values = (*runtime._operands(tensors, made), *arguments)
        launched.append((kernel, grid, tensors, made, values, warps))
        return lambda *_: made[0] if outputs == 1 else tuple(made)

    runtime.check_device = lambda *_: None
    runtime._compiled = catch
    for name, dtype, layout in cases(layouts):
        operator = getattr(torch.ops.nbx, name)
        made = torch.ones(SIZE, SIZE).to(dtype)
        operator(*inputs(made, layout, OPERATORS[name][0]))
        if launched:  # else it is launched as another case was
            yield (name, dtype, layout), *launched.pop()


def flatten(parameters, values, places):
    """What is left of the values when constants are compiled in."""

    def of(parameter, value, place):
        if value is None or parameter.is_constexpr:
            return []
        if isinstance(value, tuple):
            return [x for v in value for x in of(parameter, v, None)]
        if place is not None:
            return [place]
        constant = value == 1 and not parameter.do_not_specialize
        return [] if constant else [value]

    places = (*places, *(None,) * (len(values) - len(places)))
    return [x for triple in zip(parameters, values, places) for x in of(*triple)]


def names(kind, tensors):
    return [[kind, k] for k in range(len(tensors))]


def main(name, *layouts):
    machine, _ = target(name)
    for case, kernel, grid, tensors, made, values, warps in launches(layouts):
        types = Exact(kernel.params, values, wide=False)
        source = ASTSource(
            kernel, types.signature, constexprs=types.constants, attrs=types.attributes
        )
        compiled = triton.compile(source, target=machine, options={"num_warps": warps})
        places = runtime._operands(names("input", tensors), names("output", made))
        operator, dtype, layout = case
        report = {
            "what": [operator, str(dtype).removeprefix("torch."), layout],
            "ptx": compiled.asm["ptx"],
            "grid": grid,
            "shared": compiled.metadata.shared,
            "arguments": flatten(kernel.params, values, places),
            "outputs": [[t.shape, t.stride()] for t in made],
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
