"""Compile what the operators launch, for targets that need not be there.

    TRITON_INTERPRET=0 python tests/compile_kernels.py 0/2 sm_90 sm_70 gfx942

does the first half of this work: for the first target every operator for
every dtype in every layout, for the others a selection. Prints a line of
JSON for each kernel: what it is, and on CUDA its registers, the bytes that
it spills, and its instructions for the maximum and minimum of floats.

    TRITON_INTERPRET=0 python tests/compile_kernels.py widths

says of layouts around 2**31 elements which get 64-bit offsets.
"""

import json
import re
import subprocess
import sys
import tempfile

from nbxtensor import runtime
from nbxtensor.ops.maximum import maximum_forward_kernel
from nbxtensor.ops.minimum import minimum_forward_kernel
from nbxtensor.ops.mish import mish_forward_kernel

import torch
import triton
from helpers import FLOATS, REAL
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}
ALIGNED = [["tt.divisibility", 16]]
# Operator: how many inputs, and of which dtypes.
OPERATORS = {
    "maximum": (2, REAL),
    "minimum": (2, REAL),
    "mish": (1, FLOATS),
    "maximum_backward": (3, FLOATS),
    "minimum_backward": (3, FLOATS),
    "mish_backward": (2, FLOATS),
}
# Three inputs each: a flat launch, tiles in both orders, an input that
# stands still along a dimension, five dimensions, two dtypes.
LAYOUTS = {
    "flat": lambda x: (x, x, x),
    "tiled": lambda x: (x[:, 1:98], x[:, :97], x[:, 2:99]),
    "turned": lambda x: (x, x.t().contiguous().t(), x),
    "broadcast": lambda x: (x, x[:, :1], x[0]),
    "deep": lambda x: 3 * (x.view(4, 32, 4, 4, 8)[::2, 1:, ::3, 1:, 1:],),
    "mixed": lambda x: (x, x.to(torch.int8), x.to(torch.int16)),
}
# Which of them with 64-bit offsets as well.
WIDE = {("maximum", "flat"), ("maximum", "turned"), ("mish", "flat"), ("mish_backward", "flat")}
KERNELS = {
    maximum_forward_kernel: (3, REAL),
    minimum_forward_kernel: (3, REAL),
    mish_forward_kernel: (2, FLOATS),
}
SOME = {
    ("maximum", torch.bfloat16, "turned"),
    ("minimum", torch.int64, "deep"),
    ("maximum_backward", torch.float32, "broadcast"),
    ("mish", torch.bfloat16, "flat"),
    ("mish", torch.float32, "flat"),
    ("mish", torch.float64, "tiled"),
    ("mish_backward", torch.float32, "flat"),
    ("mish_forward_kernel", torch.float16, "published"),
}


def caught():
    """A list that fills with the kernels and arguments of launches, none of which happens."""
    launched = []

    def catch(kernel, grid, inputs, outputs, like, arguments, warps):
        made = [torch.empty_strided(**like) for _ in range(outputs)]
        pointers = runtime._operands([t.dtype for t in inputs], [t.dtype for t in made])
        launched.append((kernel, (*pointers, *arguments), warps))
        return lambda *_: made[0] if outputs == 1 else tuple(made)

    runtime.check_device = lambda *_: None
    runtime._compiled = catch
    return launched


def widths():
    """Layouts on either side of 2**31, and whether their offsets have 64 bits."""
    launched = caught()
    # Never touched, hence never more than addresses.
    memory = torch.empty(2**31 + 2**20, dtype=torch.uint8)
    for what, tensor in {
        "flat below": memory[: 2**31 - 2**20],
        "flat": memory[: 2**31],
        "rows below": memory.as_strided((2, 3), (2**31 - 2**20, 1)),
        "rows": memory.as_strided((2, 3), (2**31, 1)),
        "columns": memory.as_strided((3, 2), (1, 2**31)),
        "turned": memory[: 2**31].view(2**16, 2**15).t(),
    }.items():
        torch.ops.nbx.maximum(tensor, tensor)
        kernel, values, _ = launched.pop()
        yield what, dict(zip(kernel.arg_names, values))["WIDE"]


def launches():
    """What the operators would launch: (operator, dtype, layout), kernel, arguments, warps."""
    launched = caught()
    for name, (inputs, dtypes) in OPERATORS.items():
        operator = getattr(torch.ops.nbx, name)
        for dtype in dtypes:
            for layout, view in LAYOUTS.items():
                if layout in ("deep", "mixed") and dtype not in (torch.float32, torch.int64):
                    continue
                if layout == "mixed" and inputs == 1:
                    continue
                # Minimum is maximum with another comparison.
                if name.startswith("minimum") and layout not in ("flat", "turned", "deep"):
                    continue
                operator(*view(torch.ones(128, 128).to(dtype))[:inputs])
                if launched:  # else its first inputs are those of another layout
                    yield (name, dtype, layout), *launched.pop()


class Types:
    """The types of a launch's arguments, as Triton reads them off the values."""

    def __init__(self, parameters, values, wide):
        self.constants, self.attributes, self.wide = {}, {}, wide
        self.signature = {
            p.name: self.of(p, v, (k,)) for k, (p, v) in enumerate(zip(parameters, values))
        }

    def of(self, parameter, value, path):
        if value is None or parameter.is_constexpr:
            self.constants[path] = value
            if self.wide and parameter.name == "WIDE":
                self.constants[path] = True
            return "constexpr"
        if isinstance(value, torch.dtype):
            self.attributes[path] = ALIGNED
            return POINTERS[value]
        if isinstance(value, tuple):
            return tuple(self.of(parameter, v, (*path, k)) for k, v in enumerate(value))
        if value == 1 and not parameter.do_not_specialize:
            self.constants[path] = 1
            return "constexpr"
        if value % 16 == 0 and not parameter.do_not_specialize:
            self.attributes[path] = ALIGNED
        return "i64" if self.wide else "i32"


def source(kernel, values, wide=False):
    types = Types(kernel.params, values, wide)
    return ASTSource(kernel, types.signature, constexprs=types.constants, attrs=types.attributes)


def sources():
    """All that there is to compile: (what, source, warps)."""
    for what, kernel, values, warps in launches():
        yield what, source(kernel, values), warps
        name, dtype, layout = what
        if (name, layout) in WIDE:
            yield (name, dtype, f"wide {layout}"), source(kernel, values, wide=True), warps
    for kernel, (pointers, dtypes) in KERNELS.items():
        for dtype in dtypes:
            values = [*pointers * [dtype], 4100, 1024]
            yield (kernel.__name__, dtype, "published"), source(kernel, values), 4


def target(name):
    """The target that goes by a name, and what its compiler makes."""
    if name.startswith("gfx"):
        return GPUTarget("hip", name, 64), "hsaco"
    return GPUTarget("cuda", int(name.removeprefix("sm_")), 32), "cubin"


def usage(cubin):
    """Registers of a kernel, and the bytes of its stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    (found,) = re.findall(r"REG:(\d+) STACK:(\d+)", said)
    return dict(zip(("registers", "spilled"), map(int, found)))


def main(part, *targets):
    part, parts = map(int, part.split("/"))
    everything = list(sources())
    work = [
        (name, what, made, warps)
        for name in targets
        for what, made, warps in everything
        if name == targets[0] or what in SOME
    ]
    for name, what, made, warps in work[part::parts]:
        machine, form = target(name)
        compiled = triton.compile(made, target=machine, options={"num_warps": warps})
        report = {"target": name, "what": " ".join(map(str, what)).replace("torch.", "")}
        if form == "cubin":
            report |= usage(compiled.asm[form])
            extrema = re.findall(r"\b(?:max|min)\S*\.b?f\d+", compiled.asm["ptx"])
            report["extrema"] = sorted(set(extrema))
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["widths"]:
        print(json.dumps(dict(widths())))
    else:
        main(*sys.argv[1:])
