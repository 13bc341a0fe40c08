"""What the page of audit does not show: other kernels, other processes, the worker's end."""

import inspect
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import nbxtensor as nbx
from nbxtensor import audit, runtime
from nbxtensor.audit import (
    TARGETS,
    CompileError,
    chosen_layouts,
    compile_for,
    emulate,
    launched,
    listing,
    occupancy,
    report,
    signature_of,
)
from nbxtensor.layout import blocked, dot_operand, nvidia_mma, swizzled_shared
from nbxtensor.ptx import Fault

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from helpers import exact_mish
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

NVIDIA = TARGETS[:-1]
POINTERS = {"x_ptr": "*fp32", "y_ptr": "*fp32"}
TWO = tl.constexpr(2)


@triton.jit
def twice(x):
    return x * TWO


@triton.jit
def copy(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(y_ptr + offsets, x, mask=offsets < n)


@gluon.jit
def through_shared(x_ptr, y_ptr, LAYOUT: gl.constexpr, SHARED: gl.constexpr):
    i = gl.arange(0, 256, LAYOUT)
    tile = gl.allocate_shared_memory(gl.float32, [256], SHARED)
    tile.store(gl.load(x_ptr + i))
    gl.store(y_ptr + i, tile.load(LAYOUT))


def gluon_constants(lanes=32):
    return {
        "LAYOUT": gl.BlockedLayout([1], [lanes], [4], [0]),
        "SHARED": gl.SwizzledSharedLayout(1, 1, 1, [0]),
    }


def line_of(kernel, text):
    """The line of this file in which a kernel's source says something."""
    lines, first = inspect.getsourcelines(kernel.fn)
    (place,) = [k for k, line in enumerate(lines) if text in line]
    return first + place


def run(script, tmp_path, **environ):
    """Run a script of its own: exit status, what it printed, its complaints."""
    file = tmp_path / "script.py"
    file.write_text(script)
    done = subprocess.run(
        [sys.executable, file],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def gone(pid, patience=10):
    """Whether a process has ended, or ends soon."""
    for _ in range(10 * patience):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("target", TARGETS)
def test_triton_and_gluon_compile_for_every_target(target):
    made = compile_for(copy, {**POINTERS, "n": "i32"}, {"BLOCK": 256}, target)
    constants = gluon_constants(64 if target == "gfx942" else 32)
    other = compile_for(through_shared, POINTERS, constants, target)
    assert made.registers > 0 and made.spills == 0 and made.shared == 0
    assert other.registers > 0 and other.shared == 1024
    if target == "gfx942":
        assert ".amdgcn_target" in made.amdgcn and not hasattr(made, "ptx")
    else:
        assert f".target {target}" in made.ptx and not hasattr(made, "amdgcn")


@pytest.mark.parametrize("target", NVIDIA[1:])
def test_sass_is_counted_by_family(target):
    mix = compile_for(through_shared, POINTERS, gluon_constants(), target).mix
    moved = Counter()
    for name, count in mix.items():
        if found := re.match(r"(.*(?:load|store)) (\d+)", name):
            moved[found[1]] += count * int(found[2])
    each = ("global load", "shared store", "shared load", "global store")
    assert moved == dict.fromkeys(each, 2 * 32)  # bits of a thread
    assert mix["barrier"] == 1 and not mix["other"]


@pytest.mark.parametrize(
    "instruction, name",
    {
        "LDG.E.128 R4, [R2.64]": "global load 128",
        "@!P0 LDG.E.U16.CONSTANT R4, [R2.64]": "global load 16",
        "@P0 STG.E.64 desc[UR4][R2.64], R4": "global store 64",
        "LDS.S8 R4, [R2]": "shared load 8",
        "LDSM.16.MT88.4 R4, [R2]": "shared load 128",
        "STSM.16.M88 [R2], R4": "shared store 32",
        "STL.64 [R1+0x8], R4": "local 64",
        "HMMA.884.F32.F32.STEP0 R0, R1, R2, R3": "mma",
        "HGMMA.64x64x16.F32 R24, gdesc[UR4]": "mma",
        "HFMA2.MMA R13, -RZ, RZ, 0, 2": "float",
        "MUFU.EX2 R1, R2": "special",
        "DSETP.MAX.AND P0, P1, R2, R4, PT": "float",
        "IMAD.WIDE R2, R3, R4, c[0x0][0x160]": "integer",
        "UIADD3 UR4, UR4, 0x1, URZ": "integer",
        "SHFL.BFLY PT, R3, R2, 0x10, 0x1f": "shuffle",
        "BAR.SYNC.DEFER_BLOCKING 0x0": "barrier",
        "@P0 BRA `(.L_x_0)": "control",
        "FROBNICATE R1": "other",
    }.items(),
)
def test_families(instruction, name):
    assert audit.family(instruction) == name


def test_no_target_but_those():
    with pytest.raises(ValueError, match="sm_87.*allowed are sm_70, .*gfx942"):
        compile_for(copy, {**POINTERS, "n": "i32"}, {"BLOCK": 256}, "sm_87")
    with pytest.raises(ValueError, match="gfx942.*allowed are sm_70, .*sm_120"):
        occupancy("gfx942", 32)
    with pytest.raises(ValueError, match="registers is 256"):
        occupancy("sm_80", 256)


def test_signatures_are_checked():
    with pytest.raises(TypeError, match="copy: no type for 'n'"):
        compile_for(copy, POINTERS, {"BLOCK": 256})
    with pytest.raises(TypeError, match="copy has no parameter 'm'"):
        compile_for(copy, {**POINTERS, "n": "i32", "m": "i32"}, {"BLOCK": 256})
    with pytest.raises(TypeError, match="kernel must be a function under @triton.jit"):
        compile_for(len, POINTERS)
    with pytest.raises(CompileError, match="copy.*fp33"):
        compile_for(copy, {**POINTERS, "x_ptr": "*fp33", "n": "i32"}, {"BLOCK": 256})


@triton.jit
def variadic(pointers, sizes, out, DTYPE: tl.constexpr, WHICH: tl.constexpr, F: tl.constexpr):
    i = tl.arange(0, 64)
    x = tl.load(pointers[WHICH[0]] + i * sizes[0])
    tl.store(out + i * sizes[1], F(x).to(DTYPE))


def test_tuples_constants_and_functions():
    x, y = torch.randn(64), torch.randn(128)
    out = torch.empty(64, dtype=torch.float16)
    arguments = (x, y, None), (2, 1), out, tl.float16, (1, 0), twice
    signature, constants = signature_of(variadic, *arguments)
    assert signature["pointers"] == ("*fp32:16", "*fp32:16", None)
    assert signature["sizes"] == ("i32", 1)
    assert set(constants) == {"DTYPE", "WHICH", "F"}
    emulate(variadic, 1, *arguments)
    assert torch.equal(out, (2 * y[::2]).half())


def test_types_of_arguments():
    def kind(value):
        return audit._type_of(value)

    x = torch.zeros(64, dtype=torch.bfloat16)
    assert kind(x) == "*bf16:16" and kind(x[8:]) == "*bf16:16" and kind(x[1:]) == "*bf16:1"
    assert kind(np.zeros(4, np.uint8)) == "*u8:16" and kind(x.bool()) == "*u1:16"
    assert [kind(n) for n in (0, 1, 2, 16)] == ["i32:16", 1, "i32", "i32:16"]
    edges = 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63 - 1, 2**63 + 1
    assert [kind(n) for n in edges] == ["i32", "i64:16", "i32:16", "i64", "i64", "u64"]
    assert kind(True) == "u1" and kind(2.5) == "fp32" and kind(None) is None


@triton.jit(do_not_specialize=["n", 3])
def unspecialised(x_ptr, n, m, k):
    tl.store(x_ptr, n + m + k)


def test_what_must_not_be_specialised_is_not():
    signature, _ = signature_of(unspecialised, torch.zeros(1), 16, 16, 1)
    assert signature == {"x_ptr": "*fp32:16", "n": "i32", "m": "i32:16", "k": "i32"}


def test_a_kernel_in_a_function_sees_its_surroundings():
    step = tl.constexpr(3)

    @triton.jit
    def add(x):
        return x + step

    @triton.jit
    def kernel(x_ptr, y_ptr, N: tl.constexpr = 64):
        i = tl.arange(0, N)
        tl.store(y_ptr + i, add(twice(tl.load(x_ptr + i))))

    x, y = torch.randn(64), torch.empty(64)
    emulate(kernel, 1, x, y)
    assert torch.equal(y, 2 * x + 3)


@triton.jit(noinline=True)
def not_inlined(x):
    return x * 3


def test_noinline_is_kept():
    @triton.jit
    def kernel(x_ptr, y_ptr):
        tl.store(y_ptr, not_inlined(tl.load(x_ptr)))

    assert "noinline = true" in compile_for(kernel, POINTERS).ttir


def test_autotuned_kernels_are_unwrapped():
    tuned = triton.autotune([triton.Config({"BLOCK": 64})], key=[])(copy)
    assert compile_for(tuned, {**POINTERS, "n": "i32"}, {"BLOCK": 64}).name == "copy"


@triton.jit
def wrong_inside(x):
    return tl.reshape(x, (3, 5))


@triton.jit
def wrong_call(x_ptr, y_ptr):
    i = tl.arange(0, 64)

    tl.store(y_ptr + i, wrong_inside(tl.load(x_ptr + i)))  # here


@triton.jit
def wrong_range(x_ptr, y_ptr):
    tl.store(y_ptr + tl.arange(0, 100), 1.0)  # here


@pytest.mark.parametrize("kernel", [wrong_call, wrong_range])
def test_errors_name_kernel_line_and_reason(kernel):
    with pytest.raises(CompileError, match="power of (2|two)") as caught:
        compile_for(kernel, POINTERS)
    assert caught.value.line == line_of(kernel, "# here")
    assert str(caught.value).startswith(f"{kernel.__name__}, line {caught.value.line}, for sm_80: ")


def test_a_layout_for_another_number_of_warps_is_refused():
    constants = {**gluon_constants(), "LAYOUT": gl.BlockedLayout([1], [32], [2], [0])}
    with pytest.raises(CompileError, match="2 warps per CTA") as caught:
        compile_for(through_shared, POINTERS, constants)
    assert caught.value.line == line_of(through_shared, "gl.arange")
    assert "module attributes" not in caught.value.message


@triton.constexpr_function
def end_the_process(how):
    import os

    os.abort() if how == "abort" else os._exit(3)


@triton.jit
def crashing(x_ptr, y_ptr, HOW: tl.constexpr):
    end_the_process(HOW)


@pytest.mark.parametrize("how, said", [("abort", "SIGABRT"), ("exit", "exit 3")])
def test_the_worker_may_die(how, said):
    with pytest.raises(CompileError, match=f"crashing, for sm_80: .*stopped with {said}"):
        compile_for(crashing, POINTERS, {"HOW": how})
    assert compile_for(copy, {**POINTERS, "n": "i32"}, {"BLOCK": 128}).registers


def test_an_idle_worker_may_die():
    compile_for(copy, {**POINTERS, "n": "i32"}, {"BLOCK": 128})
    for worker in audit._IDLE:
        worker.process.kill()
        worker.process.wait()
    assert compile_for(copy, {**POINTERS, "n": "i32"}, {"BLOCK": 128}).registers


@triton.jit
def talking(x_ptr, y_ptr):
    tl.static_print("while compiling")


def test_what_the_compiler_prints_stays_with_it(capfd):
    compile_for(talking, POINTERS)
    assert capfd.readouterr() == ("", "")


def test_threads_compile_at_a_time():
    sizes = [128 << k % 4 for k in range(12)]

    def work(size):
        return compile_for(copy, {**POINTERS, "n": "i32"}, {"BLOCK": size}).ttgir

    with ThreadPoolExecutor(3) as pool:
        for size, text in zip(sizes, pool.map(work, sizes)):
            assert f"tensor<{size}x!tt.ptr<f32>" in text
    assert len(audit._IDLE) <= 4


def test_source_lines_are_those_of_the_file():
    made = compile_for(copy, {**POINTERS, "n": "i32"}, {"BLOCK": 128})
    load, store = line_of(copy, "tl.load"), line_of(copy, "tl.store")
    assert {load, store} <= set(made.lines)
    found = {(v.name, v.line) for v in chosen_layouts(made) if v.op == "tt.load"}
    assert found == {("x", load)}
    ran = emulate(made, 2, torch.zeros(256), torch.zeros(256), 256)
    assert ran.lines[load]["global_load_bytes"] == ran.lines[store]["global_store_bytes"] == 1024
    assert "x = tl.load(x_ptr" in repr(listing(ran, "global_load_bytes"))


# Other processes. Each script is its own module __main__, as a notebook is.

SCRIPT = """
import os, signal, sys, time, warnings
import nbxtensor as nbx
from nbxtensor import audit, runtime
import torch, triton
import triton.language as tl

FACTOR = tl.constexpr(3)

@triton.jit
def triple(x):
    return x * FACTOR

@triton.jit
def kernel(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, triple(tl.load(x_ptr + i)))

def check():
    x, y = torch.randn(64), torch.empty(64)
    audit.emulate(kernel, 1, x, y, N=64, empty=["y_ptr"])
    assert torch.equal(y, 3 * x)
    return audit._IDLE[0].process.pid

"""


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_an_interpreting_and_a_compiling_process(interpret, tmp_path):
    script = """
    assert runtime.INTERPRETED == (os.environ["TRITON_INTERPRET"] == "1")
    x = torch.randn(40, 64)
    (launch,) = audit.launched(nbx.maximum, x, x.flip(0))
    launch.emulate()
    assert torch.equal(launch.results[0], torch.maximum(x, x.flip(0)))
    print(check())
    """
    environ = {"TRITON_INTERPRET": interpret, "CUDA_VISIBLE_DEVICES": ""}
    status, printed, complaints = run(SCRIPT + textwrap.dedent(script), tmp_path, **environ)
    assert (status, complaints) == (0, "")
    assert gone(int(printed))


def test_the_worker_ends_with_a_process_that_is_killed(tmp_path):
    script = SCRIPT + "print(check(), flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    status, printed, _ = run(script, tmp_path)
    assert status == -signal.SIGKILL
    assert gone(int(printed))


def test_a_forked_child_has_a_worker_of_its_own(tmp_path):
    script = """
    # From Python 3.12 on, a fork beside torch's threads is warned of.
    warnings.simplefilter("ignore", DeprecationWarning)
    mine = check()
    child = os.fork()
    if child == 0:
        theirs = check()
        assert theirs != mine
        print(theirs, flush=True)
        sys.exit()
    _, status = os.waitpid(child, 0)
    assert status == 0 and check() == mine
    # A child that stays does not keep the parent's worker.
    if os.fork() == 0:
        os.close(1), os.close(2)
        time.sleep(20)
    print(mine, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    status, printed, complaints = run(SCRIPT + textwrap.dedent(script), tmp_path)
    assert (status, complaints) == (-signal.SIGKILL, "")
    theirs, mine = map(int, printed.split())
    assert gone(theirs) and gone(mine)


LOCK = threading.Lock()


def test_what_cannot_be_sent_is_named():
    @triton.jit
    def locked(x_ptr):
        tl.store(x_ptr, LOCK)

    with pytest.raises(CompileError, match="locked, for sm_80: cannot be sent.*lock"):
        compile_for(locked, {"x_ptr": "*fp32"})


def test_a_name_that_cannot_be_found_there_is_named(tmp_path):
    script = """
    class Thing: pass
    thing = Thing()

    @triton.jit
    def strange(x_ptr):
        tl.store(x_ptr, thing.value)

    try:
        audit.compile_for(strange, {"x_ptr": "*fp32"})
    except audit.CompileError as error:
        print(error)
    """
    status, printed, _ = run(SCRIPT + textwrap.dedent(script), tmp_path)
    assert status == 0 and "strange, for sm_80" in printed and "Thing" in printed


# Layouts


@triton.jit
def product(a_ptr, b_ptr, c_ptr, N: tl.constexpr, K: tl.constexpr):
    i, k = tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + i[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + i[None, :])
    c = tl.dot(a, b)
    tl.store(c_ptr + i[:, None] * N + i[None, :], c)


def test_layouts_of_a_matrix_product():
    pointers = {"a_ptr": "*fp16", "b_ptr": "*fp16", "c_ptr": "*fp32"}
    made = compile_for(product, pointers, {"N": 64, "K": 32}, "sm_80")
    found = chosen_layouts(made)
    (c,) = {v.layout for v in found if v.op == "tt.dot"}
    assert c == nvidia_mma([64, 64], 2, [2, 2], [16, 8])
    operands = {v.layout for v in found if v.op == "ttg.local_load"}
    assert operands == {
        dot_operand([64, 32], 0, 2, [2, 2]),
        dot_operand([32, 64], 1, 2, [2, 2]),
    }
    buffers = {v.name: v.layout for v in found if v.op == "ttg.local_alloc"}
    assert buffers == {
        "a": swizzled_shared([64, 32], 8, 2, 4, [1, 0]),
        "b": swizzled_shared([32, 64], 8, 1, 8, [1, 0]),
    }


SIZES = {"sm_70": 16, "sm_80": 64, "sm_90": 64, "sm_100": 128}


@pytest.mark.parametrize("target, n", SIZES.items())
def test_every_layout_on_nvidia_is_told(target, n):
    pointers = {"a_ptr": "*fp16", "b_ptr": "*fp16", "c_ptr": "*fp32"}
    made = compile_for(product, pointers, {"N": n, "K": 16}, target)
    found = chosen_layouts(made)
    kinds = {v.kind for v in found}
    assert kinds >= {"registers", "shared"}
    assert ("tensor memory" in kinds) == (target == "sm_100")
    unknown = [v for v in found if v.layout is None]
    old = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    assert not [v for v in unknown if not (old and v.kind == "tensor memory")]
    assert all(v.layout.is_surjective for v in found if v.layout)


def test_a_padded_layout_comes_with_its_padding():
    padded = gl.PaddedSharedLayout.with_identity_for([[32, 4]], [256], [0])
    constants = {**gluon_constants(), "SHARED": padded}
    made = compile_for(through_shared, POINTERS, constants)
    found = {v.kind: v for v in chosen_layouts(made) if v.name in ("tile", "i")}
    assert found["shared"].padding == ((32, 4),) and found["registers"].padding == ()
    assert found["shared"].layout == swizzled_shared([256], 1, 1, 1, [0])
    assert found["registers"].layout == blocked([256], [1], [32], [4], [0])


# Emulation


@gluon.jit
def strided(x_ptr, y_ptr, STRIDE: gl.constexpr):
    i = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(y_ptr + i, gl.load(x_ptr + i * STRIDE))


@pytest.mark.parametrize("stride, sectors", [(0, 1), (1, 4), (2, 8), (4, 16), (8, 32), (64, 32)])
def test_sectors_of_a_request(stride, sectors):
    x, y = torch.randn(64 * 128), torch.empty(128)
    ran = emulate(strided, 1, x, y, STRIDE=stride)
    assert torch.equal(y, x.as_strided((128,), (stride,)))
    assert ran["global_load_requests"] == ran["global_store_requests"] == 4
    assert ran["global_load_sectors"] == 4 * sectors
    assert ran["global_store_sectors"] == 16


def test_arguments_of_many_kinds():
    @triton.jit
    def kernel(out, x, flag, number, scale, missing, N: tl.constexpr):
        i = tl.arange(0, N)
        value = tl.load(x + i) * scale + number
        if missing is None:
            tl.store(out + i, tl.where(flag, value, 0))

    x = np.arange(32, dtype=np.float64)
    out = np.zeros((4, 32))[2]  # a view, inside of its memory
    for flag in (True, False):
        emulate(kernel, 1, out, x, flag, 5, 0.5, None, N=32)
        assert (out == (x * 0.5 + 5) * flag).all()


def test_arguments_by_name():
    x, y = torch.randn(128), torch.empty(128)
    ran = emulate(copy, 1, x, n=128, BLOCK=128, y_ptr=y)
    assert torch.equal(x, y) and ran.must == 2 * 4 * 128


def test_views_of_one_storage_are_one_memory():
    memory = torch.arange(300.0)
    want = memory.clone()
    want[150:278] = memory[:128]
    emulate(copy, 1, memory, memory[150:], 128, BLOCK=128)
    assert torch.equal(memory, want)


def test_faults_are_named():
    x, y = torch.randn(100), torch.empty(100)
    with pytest.raises(Fault, match="byte 400 of 'x_ptr'") as caught:
        emulate(copy, 1, x, y, 128, BLOCK=128)
    assert caught.value.kind == "out of bounds"
    assert caught.value.line.number == line_of(copy, "tl.load")
    with pytest.raises(Fault, match="x_ptr") as caught:
        emulate(copy, 1, x, y, 100, BLOCK=128, empty=["x_ptr"])
    assert caught.value.kind == "uninitialised"
    with pytest.raises(ValueError, match="'x_ptr' is on meta; it must be on the CPU"):
        emulate(copy, 1, x.to("meta"), y, 100, BLOCK=128)
    made = compile_for(copy, {**POINTERS, "n": "i32"}, {"BLOCK": 128})
    with pytest.raises(TypeError, match="copy: no value for 'n'"):
        emulate(made, 1, x, y)


def test_a_load_without_its_mask_is_out_of_bounds_though_nothing_is_stored():
    @triton.jit
    def kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y_ptr + i, tl.load(x_ptr + i), mask=i < n)

    x, y = torch.randn(5000), torch.empty(5000)
    with pytest.raises(Fault, match="reads.*byte 20000 of 'x_ptr'"):
        emulate(kernel, 5, x, y, 5000, BLOCK=1024)


def test_nothing_is_written_back_after_a_fault():
    x, y = torch.randn(100), torch.zeros(100)
    with pytest.raises(Fault):
        emulate(copy, 2, x, y, 128, BLOCK=64)
    assert not y.any()


def test_a_barrier_that_is_missing_is_a_race():
    layouts = {
        "LAYOUT": gl.BlockedLayout([1], [32], [4], [0]),
        "OTHER": gl.BlockedLayout([2], [32], [4], [0]),
        "SHARED": gl.SwizzledSharedLayout(1, 1, 1, [0]),
    }

    @gluon.jit
    def swap(
        x_ptr, y_ptr, LAYOUT: gl.constexpr, OTHER: gl.constexpr, SHARED: gl.constexpr
    ):
        i, j = gl.arange(0, 256, LAYOUT), gl.arange(0, 256, OTHER)
        tile = gl.allocate_shared_memory(gl.float32, [256], SHARED)
        tile.store(gl.load(x_ptr + i))
        gl.store(y_ptr + j, tile.load(OTHER))

    x, y = torch.randn(256), torch.empty(256)
    made = emulate(swap, 1, x, y, **layouts).compiled
    assert torch.equal(x, y)
    text = re.sub(r"bar\.sync\s+0;", "", made.ptx)
    broken = replace(made, stages={**made.stages, "ptx": text})
    with pytest.raises(Fault) as caught:
        emulate(broken, 1, x, y)
    assert caught.value.kind == "race"


def tensors(dtype):
    """Two matrices with everything that a dtype has: NaN, infinities, ties."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randint(-9, 9, (2, 64, 64), generator=generator).to(dtype)
    if dtype.is_floating_point:
        for k, value in enumerate((float("nan"), float("inf"), -float("inf"), -0.0)):
            x[k::8, ::3] = value
            y[::5, k::8] = value
    return x, y


VIEWS = {
    "flat": lambda x, y: (x, y),
    "turned": lambda x, y: (x, y.t()),
    "sliced": lambda x, y: (x[1:, 3:30], y[:-1, 5:32]),
    "row": lambda x, y: (x, y[3]),
    "odd": lambda x, y: (x.flatten()[1:1000], y.flatten()[3:1002]),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.int64])
def test_maximum_and_minimum_are_exact(dtype, view):
    x, y = VIEWS[view](*tensors(dtype))
    for name, target in (("maximum", "sm_70"), ("minimum", "sm_90")):
        (launch,) = launched(getattr(nbx, name), x, y)
        launch.emulate(target)
        (result,) = launch.results
        want = getattr(torch, name)(x, y)
        assert torch.equal(result.isnan(), want.isnan())
        assert torch.equal(result.nan_to_num(7), want.nan_to_num(7))


@pytest.mark.parametrize("target", ["sm_70", "sm_80"])
def test_mish_is_within_its_bound(target):
    x = torch.linspace(-30, 30, 2048)
    (launch,) = launched(nbx.mish, x)
    launch.emulate(target)
    want = exact_mish(x)
    error = abs(launch.results[0].double().numpy() - want)
    assert (error <= 4 * 2.0**-23 * abs(want)).all()


def test_an_operator_moves_each_byte_once():
    x, y = torch.randn(2, 4096)
    (launch,) = launched(nbx.maximum, x, y)
    ran = launch.emulate()
    assert ran.must == 3 * 4 * 4096
    assert ran["global_load_bytes"] + ran["global_store_bytes"] == ran.must
    sectors = ran["global_load_sectors"] + ran["global_store_sectors"]
    assert 32 * sectors == ran.must


def test_catching_leaves_operators_as_they_were():
    x = torch.randn(33, 7).to(runtime.DEVICE)
    operator = nbx.ops.maximum._maximum
    nbx.maximum(x, x)
    before = dict(operator.plans), dict(operator.recent)
    for _ in range(2):
        assert len(launched(nbx.maximum, x, x)) == 1
    with pytest.raises(TypeError):
        launched(nbx.maximum, x, 3)
    assert (dict(operator.plans), dict(operator.recent)) == before
    assert torch.equal(nbx.maximum(x, -x), torch.maximum(x, -x))


def test_several_launches_of_one_call():
    x = torch.randn(50, requires_grad=True)
    with torch.no_grad():
        found = launched(lambda t: nbx.mish(nbx.maximum(t, -t)), x)
    assert [launch.kernel.fn.__name__ for launch in found] == 2 * ["pointwise_flat"]


# Reports


def test_a_report_puts_runs_side_by_side():
    x, y = torch.randn(1024), torch.empty(1024)
    ran = emulate(copy, 2, x, y, 1024, BLOCK=512)
    unread = compile_for(copy, {**POINTERS, "n": "i32"}, {"BLOCK": 512}, "gfx942")
    table = report({"run": ran, "<compiled>": unread}, elements=1024)
    rows = {line[0]: line[1:] for line in table.lines}
    assert rows["bytes asked for"] == ["8192", ""]
    assert rows["bytes in their sectors"] == rows["bytes that must move"] == ["8192", ""]
    assert rows["sectors a load"] == ["16.0", ""]
    assert rows["resident warps"] == ["64 of 64", ""]
    assert 0 < float(rows["instructions an element"][0]) < 10
    assert int(rows["registers of a thread, in eights"][0]) % 8 == 0
    assert repr(table).count("\n") == len(rows)
    assert "<td" in table._repr_html_() and "&lt;compiled&gt;" in table._repr_html_()


@pytest.mark.parametrize(
    "target, registers, shared, num_warps, programs",
    [
        # Each from the limits of its architecture by hand.
        ("sm_70", 64, 0, 4, 8),
        ("sm_75", 32, 33 * 1024, 4, 1),
        ("sm_80", 32, 0, 1, 32),
        ("sm_80", 168, 0, 4, 3),
        ("sm_80", 40, 48 * 1024, 8, 3),
        ("sm_86", 40, 48 * 1024, 8, 2),
        ("sm_86", 40, 0, 4, 12),
        ("sm_89", 40, 0, 1, 24),
        ("sm_90", 255, 227 * 1024, 8, 1),
        ("sm_90", 32, 113 * 1024, 8, 2),
        ("sm_120", 255, 0, 16, 0),
    ],
)
def test_occupancy(target, registers, shared, num_warps, programs):
    assert occupancy(target, registers, shared, num_warps).programs == programs
