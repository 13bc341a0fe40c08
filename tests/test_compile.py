"""Every kernel compiles for every target, on a machine that has none of them."""

import re
from concurrent.futures import ThreadPoolExecutor

from nbxtensor.audit import TARGETS, compile_for, launched, signature_of
from nbxtensor.ops.maximum import maximum_forward_kernel
from nbxtensor.ops.minimum import minimum_forward_kernel
from nbxtensor.ops.mish import mish_forward_kernel

import pytest
import torch
from helpers import FLOATS, LAUNCHES, REAL, VIEWS

FULL = "sm_90"  # compiled for in full, the other targets in part
THREADS = 2
# Inputs of other dtypes, too.
LAYOUTS = {**VIEWS, "mixed": lambda x, y, z: (x, y.to(torch.int8), z.to(torch.int16))}
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


def widened(entry):
    """A signature's entry with integers of 64 bits."""
    if isinstance(entry, tuple):
        return tuple(map(widened, entry))
    return entry.replace("i32", "i64") if isinstance(entry, str) and entry[0] != "*" else entry


def calls():
    """What the operators are called with: (operator, dtype, layout), tensors."""
    for name, (inputs, dtypes) in LAUNCHES.items():
        for dtype in dtypes:
            for layout, view in LAYOUTS.items():
                if layout in ("deep", "mixed") and dtype not in (torch.float32, torch.int64):
                    continue
                if layout == "mixed" and inputs == 1:
                    continue
                # Minimum is maximum with another comparison.
                if name.startswith("minimum") and layout not in ("flat", "turned", "deep"):
                    continue
                yield (name, dtype, layout), view(*[torch.ones(128, 128).to(dtype)] * 3)[:inputs]


def work():
    """All that there is to compile: what, kernel, signature and constants, warps."""
    for what, tensors in calls():
        name, dtype, layout = what
        (launch,) = launched(getattr(torch.ops.nbx, name), *tensors)
        signature, constants = signature_of(launch.kernel, *launch.arguments)
        yield what, launch.kernel, signature, constants, launch.num_warps
        if (name, layout) in WIDE:
            signature = {k: widened(v) for k, v in signature.items()}
            what = name, dtype, f"wide {layout}"
            yield what, launch.kernel, signature, {**constants, "WIDE": True}, launch.num_warps
    for kernel, (pointers, dtypes) in KERNELS.items():
        for dtype in dtypes:
            values = [torch.empty(1, dtype=dtype)] * pointers
            typed = signature_of(kernel, *values, 4100, BLOCK_SIZE=1024)
            yield (kernel.__name__, dtype, "published"), kernel, *typed, 4


@pytest.fixture(scope="module")
def compiled():
    """What was compiled, by target and by kernel."""
    jobs = [
        (target, what, arguments, warps)
        for what, *arguments, warps in work()
        for target in TARGETS
        if target == FULL or what in SOME
    ]

    def do(job):
        target, _, arguments, warps = job
        made = compile_for(*arguments, target, warps)
        assert made.registers > 0  # asks for them in this thread
        return made

    found = {target: {} for target in TARGETS}
    with ThreadPoolExecutor(THREADS) as pool:
        for (target, what, *_), made in zip(jobs, pool.map(do, jobs)):
            found[target][what] = made
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_it_compiles(compiled, target):
    assert len(compiled[target]) >= (150 if target == FULL else 8)
    names = {name for name, _, _ in compiled[target]}
    assert names >= {"maximum", "minimum", "mish", "maximum_backward", "mish_backward"}


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_spilled(compiled, target):
    spilled = {
        what: (made.registers, made.spills)
        for what, made in compiled[target].items()
        if made.spills
    }
    assert not spilled


@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_the_compiled_extremum_keeps_nan(compiled, name):
    """The interpreter keeps it in any case, so its tests say nothing here."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for layout in ("flat", "turned"):
            ptx = compiled[FULL][name, dtype, layout].ptx
            used = re.findall(r"\b(?:max|min)\S*\.b?f\d+", ptx)
            assert used and all(u.startswith(f"{name[:3]}.NaN.") for u in used)


def test_offsets_have_64_bits_where_they_need_them():
    # Never touched, hence never more than addresses.
    memory = torch.empty(2**31 + 2**20, dtype=torch.uint8)
    layouts = {
        "flat below": memory[: 2**31 - 2**20],
        "flat": memory[: 2**31],
        "rows below": memory.as_strided((2, 3), (2**31 - 2**20, 1)),
        "rows": memory.as_strided((2, 3), (2**31, 1)),
        "columns": memory.as_strided((3, 2), (1, 2**31)),
        "turned": memory[: 2**31].view(2**16, 2**15).t(),
    }
    narrow = set()
    for what, tensor in layouts.items():
        (launch,) = launched(torch.ops.nbx.maximum, tensor, tensor)
        _, constants = signature_of(launch.kernel, *launch.arguments)
        if not constants["WIDE"]:
            narrow.add(what)
    assert narrow == {"flat below", "rows below"}
