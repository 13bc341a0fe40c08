"""Profiles against the assembler and the GPU, the rule on all shapes, choices on disk."""

import json
import math
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace

from nbxtensor import audit
from nbxtensor.ops import _configs
from nbxtensor.ops._configs import (
    COMPUTES,
    PROFILES,
    MatrixUnit,
    matrix_unit,
    nbx_autotune,
    profile,
    prune_row_reduce,
    row_reduce_configs,
    row_tile,
    utilisation,
)
from nbxtensor.runtime import DEVICE

import pytest
import torch
import triton
import triton.language as tl
from helpers import needs_gpu
from triton import knobs
from triton.runtime.errors import OutOfResources

NAMED = [name for name in PROFILES if name != "generic"]
PTX = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
# Registers of A, of B, and of a float32 accumulator.
FRAGMENTS = {"m8n8k4": (2, 2, 8), "m16n8k8": (2, 1, 4), "m16n8k16": (4, 2, 4)}


@triton.jit
def mean_kernel(
    input_ptr,
    output_ptr,
    batch_dim,
    feat_dim,
    BATCH_BUCKET,
    FEAT_BUCKET,
    BLOCK_SIZE_BATCH: tl.constexpr,
    BLOCK_SIZE_FEAT: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK_SIZE_BATCH + tl.arange(0, BLOCK_SIZE_BATCH)[:, None]
    total = tl.zeros([BLOCK_SIZE_BATCH, BLOCK_SIZE_FEAT], tl.float32)
    start = 0
    while start < feat_dim:
        j = start + tl.arange(0, BLOCK_SIZE_FEAT)[None, :]
        mask = (i < batch_dim) & (j < feat_dim)
        total += tl.load(input_ptr + i * feat_dim + j, mask=mask, other=0.0)
        start += BLOCK_SIZE_FEAT
    mean = tl.sum(total, axis=1)[:, None] / feat_dim
    tl.store(output_ptr + i, mean, mask=i < batch_dim)


@triton.jit
def fill(y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, i, mask=i < n)


SIZES = [triton.Config({"BLOCK": block}, num_warps=1) for block in (16, 32, 64)]


def tuned_mean(**options):
    early = {"early_config_prune": prune_row_reduce}
    return nbx_autotune(
        configs=row_reduce_configs(),
        key=["BATCH_BUCKET", "FEAT_BUCKET"],
        prune_configs_by=early,
        **options,
    )(mean_kernel)


def tuned_fill(**options):
    return nbx_autotune(SIZES, ["n"], **options)(fill)


def whole(meta):
    return (triton.cdiv(100, meta["BLOCK"]),)


def block_of(call):
    return call.keywords["BLOCK"]


def likes(block):
    """A clock by which one size is fastest."""
    return lambda call: 1.0 if block_of(call) == block else 2.0


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NBX_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def y():
    return torch.zeros(100, device=DEVICE)


# Profiles


def fragment(kind, count):
    return "{" + ", ".join(f"%{kind}{k}" for k in range(count)) + "}"


def product(shape, operand, accumulator):
    """A matrix unit's instruction in PTX."""
    a, d = PTX[operand], PTX[accumulator]
    kind, packed = ("f", 1) if accumulator == "float32" else ("r", 2)
    if shape == "m64n256k16":
        out = fragment(kind, 4 // packed)
        return (
            f"wgmma.mma_async.sync.aligned.m64n8k16.{d}.{a}.{a} {out}, %l0, %l0, %p0, 1, 1, 0, 0;"
        )
    if shape == "m128n256k16":
        return "tcgen05.mma.cta_group::1.kind::f16 [%r0], %l0, %l0, %r1, %p0;"
    *inputs, words = FRAGMENTS[shape]
    out = fragment(kind, words // packed)
    left, right = (fragment("r", n) for n in inputs)
    return f"mma.sync.aligned.{shape}.row.col.{d}.{a}.{a}.{d} {out}, {left}, {right}, {out};"


def assembles(instruction, name, folder):
    target = name + ("a" if PROFILES[name].capability >= 90 else "")
    source = folder / "product.ptx"
    source.write_text(
        f".version 8.7\n.target {target}\n.address_size 64\n.visible .entry k() {{\n"
        ".reg .pred %p<1>; .reg .b32 %r<8>; .reg .f32 %f<8>; .reg .b64 %l<1>;\n"
        f"{instruction}\nret; }}\n"
    )
    command = [knobs.nvidia.ptxas.path, "-arch", target, source, "-o", folder / "product.cubin"]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.parametrize(("shape", "operand"), COMPUTES)
def test_matrix_units(shape, operand, tmp_path):
    accumulators, first, last = COMPUTES[shape, operand]
    for accumulator in ("float16", "float32"):
        if shape == "m128n256k16" and accumulator not in accumulators:
            continue  # tcgen05 has its types in a register
        instruction = product(shape, operand, accumulator)
        for name in NAMED:
            listed = accumulator in accumulators and first <= PROFILES[name].capability <= last
            assert assembles(instruction, name, tmp_path) == listed, (instruction, name)


@pytest.mark.parametrize(("shape", "operand"), [("m8n8k4", "bfloat16"), ("m16n8k16", "float64")])
def test_what_is_not_listed_is_refused(shape, operand):
    unit = MatrixUnit("mma.sync", shape, ("float16", operand))
    with pytest.raises(ValueError, match=f"sm_90: unit {shape} does not multiply {operand}"):
        replace(PROFILES["sm_90"], matrix_unit=unit)


def test_a_profile_is_refused_that_does_not_fit_its_unit():
    for name, given, said in [
        ("sm_120", matrix_unit("sm_90"), "from 90 to 90"),
        ("generic", matrix_unit("sm_70"), "from 70"),
        ("sm_80", matrix_unit("sm_80")._replace(shape="m3n3k3"), "nothing we know of"),
        ("sm_80", matrix_unit("sm_80")._replace(accumulator_dtype="float16"), "adds in float32"),
    ]:
        with pytest.raises(ValueError, match=said):
            replace(PROFILES[name], matrix_unit=given)


def test_profiles_are_those_of_the_compiler():
    nvidia = [target for target in audit.TARGETS if target.startswith("sm_")]
    assert nvidia == NAMED
    for name in NAMED:
        p = PROFILES[name]
        assert p.name == name == f"sm_{p.capability}"
        assert p.matrix_unit is not None and p.source
        generic = PROFILES["generic"]
        for limit in ("warps", "programs", "shared", "registers", "multiprocessors"):
            assert getattr(generic, limit) <= getattr(p, limit)


def test_sources_are_in_the_bibliography():
    root = _configs.Path(__file__).parents[1]
    known = re.findall(r"^@\w+\{(\w+),", (root / "book/references.bib").read_text(), re.M)
    used = {key for p in PROFILES.values() for key in p.source.split(", ") if key}
    assert used <= {*known}


def test_profile_of_a_device():
    assert profile("cpu") is profile(torch.device("cpu")) is PROFILES["generic"]
    assert profile(PROFILES["sm_75"]) is profile("sm_75")
    assert matrix_unit("generic") is None
    assert profile("meta") is PROFILES["generic"]
    for unknown in ("sm_42", 1.5):
        with pytest.raises(ValueError, match=f"device is {unknown!r}; allowed are sm_70"):
            profile(unknown)


@needs_gpu
def test_profile_is_what_the_driver_says():
    gpu, p = torch.cuda.get_device_properties(0), profile()
    assert (p.card, p.multiprocessors) == (gpu.name, gpu.multi_processor_count)
    if p.name != "generic":
        assert p.warp_size * p.warps == gpu.max_threads_per_multi_processor
        assert p.shared == gpu.shared_memory_per_multiprocessor
        assert p.registers == gpu.regs_per_multiprocessor


# The rule

LENGTHS = (0, 1, 2, 3, 63, 64, 100, 1000, 4096, 16384, 16385, 10**6, 2**32)


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_every_shape_has_a_tile(name, itemsize):
    gpu = profile(name)
    for rows in LENGTHS:
        for columns in LENGTHS:
            tile = row_tile(rows, columns, itemsize, name)
            assert all(n & (n - 1) == 0 for n in tile[:3])
            assert 4 <= tile.num_warps <= gpu.warps // 2
            held = tile.rows * tile.columns * max(itemsize, 4)
            assert held <= 64 * gpu.warp_size * tile.num_warps
            tiles = triton.cdiv(columns, tile.columns)
            assert 1 <= tile.splits <= max(tiles, 1)
            assert tile.splits == 1 or tiles > 1 == tile.rows
            # Rows are shared by a program only where each SM has one.
            assert tile.rows == 1 or tile.rows * gpu.multiprocessors <= rows


@pytest.mark.parametrize("name", NAMED)
def test_long_rows_keep_the_slots_busy(name):
    """Four waves, however many programs a multiprocessor holds; and no more than that."""
    gpu = profile(name)
    most = gpu.warps // 4
    for rows in range(1, 5 * most * gpu.multiprocessors, 7):
        splits = row_tile(rows, 2**28, 4, name).splits
        for resident in range(1, most + 1):
            assert utilisation(rows * splits, resident * gpu.multiprocessors) >= 0.8
        assert rows * (splits - 1) < 4 * most * gpu.multiprocessors


def test_utilisation_counts_waves():
    for programs in range(1, 50):
        for slots in range(1, 20):
            time = math.ceil(programs / slots)
            assert utilisation(programs, slots) == pytest.approx(programs / (time * slots))


@pytest.mark.parametrize("names", [("batch_dim", "feat_dim"), ("M", "N")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_pruning_keeps_the_rule_first(names, dtype):
    configs, x = row_reduce_configs(), torch.empty(0, dtype=dtype)
    for rows, columns in [(4, 64), (4096, 64), (1, 2**20), (512, 1024), (2**20, 16)]:
        named = {"x": x, **dict(zip(names, (rows, columns)))}
        kept = prune_row_reduce(configs, named)
        assert 1 < len(kept) <= 8 and all(c in configs for c in kept)
        rule = row_tile(rows, columns, dtype.itemsize, "cpu")
        first = (*kept[0].kwargs.values(), kept[0].num_warps)
        assert all(a in (b / 2, b, 2 * b) for a, b in zip(first, rule)), (first, rule)
        # Given by name they mean the same, and so do sizes of one bucket.
        assert prune_row_reduce(configs, {"x": x}, **dict(zip(names, (rows, columns)))) == kept
        below = {"x": x, names[0]: rows, names[1]: columns // 2 + 1}
        assert prune_row_reduce(configs, below) == kept


def test_pruning_says_what_it_misses():
    with pytest.raises(TypeError, match="feat_dim or N"):
        prune_row_reduce(row_reduce_configs(), {"x": torch.empty(0), "M": 1})


# The decorator


def test_a_call_is_right_and_never_times(monkeypatch):
    monkeypatch.setattr(_configs, "do_bench", None)
    kernel, x = tuned_mean(), torch.arange(15.0, device=DEVICE).view(3, 5)
    y = x.new_empty(3)
    kernel[lambda meta: (triton.cdiv(3, meta["BLOCK_SIZE_BATCH"]),)](x, y, 3, 5, 4, 8)
    assert y.tolist() == [2, 7, 12]
    # With the tile given, by name or in place, nothing is chosen.
    kernel.choose = None
    for tile in [(2, 4), (1, 16)]:
        y.zero_()
        kernel[(3,)](x, y, 3, 5, 4, 8, *tile)
        assert y.tolist() == [2, 7, 12]
        y.zero_()
        named = dict(zip(("BLOCK_SIZE_BATCH", "BLOCK_SIZE_FEAT"), tile))
        kernel[(3,)](x, y, 3, 5, 4, 8, **named)
        assert y.tolist() == [2, 7, 12]


def test_part_of_the_tile_may_be_given(y):
    kernel = tuned_mean()
    x = torch.arange(15.0, device=DEVICE).view(3, 5)
    kernel[(3,)](x, y, 3, 5, 4, 8, 1)
    assert y[:3].tolist() == [2, 7, 12]


def test_the_compiler_takes_a_tuned_kernel():
    signature = dict.fromkeys(("input_ptr", "output_ptr"), "*fp32")
    signature |= dict.fromkeys(mean_kernel.arg_names[2:6], "i32")
    tile = {"BLOCK_SIZE_BATCH": 1, "BLOCK_SIZE_FEAT": 128}
    assert audit.compile_for(tuned_mean(), signature, tile, "sm_80").name == "mean_kernel"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"configs": []}, "must not be empty"),
        ({"configs": [triton.Config({"WIDTH": 1})]}, "WIDTH"),
        ({"configs": [triton.Config({"BLOCK": 1}, pre_hook=print)]}, "pre_hook"),
        ({"key": ["m"]}, "'m'"),
        ({"prune_configs_by": {"perf_model": len, "top_k": 2}}, "perf_model, top_k"),
    ],
)
def test_what_the_decorator_refuses(change, said):
    options = {"configs": SIZES, "key": ["n"], **change}
    with pytest.raises(ValueError, match=said):
        nbx_autotune(**options)(fill)


def test_a_key_must_have_a_value(y):
    with pytest.raises(TypeError, match="'n'"):
        tuned_fill().choose(y)


def test_pruning_must_leave_something(y):
    kernel = tuned_fill(prune_configs_by={"early_config_prune": lambda *_: []})
    with pytest.raises(ValueError, match="fill: pruning left no config"):
        kernel[whole](y, 100)


def test_a_sweep_is_kept(y, cache):
    kernel = tuned_fill()
    assert kernel.choose(y, 100) is SIZES[0]
    assert kernel.sweep(whole, y, 100, timer=likes(32)) is SIZES[1]
    assert kernel.choose(y, 100) is kernel.choose(y, 65) is SIZES[1]
    assert kernel.choose(y, 200) is kernel.choose(y.int(), 100) is SIZES[0]
    # Found by a process that has not swept, and n may be given by name.
    assert tuned_fill().choose(y, n=128) is SIZES[1]
    assert tuned_fill(cache_results=False).choose(y, 100) is SIZES[0]
    (file,) = cache.rglob("*.json")
    assert json.loads(file.read_text())["time"] == 1
    kernel[whole](y, 100)
    assert y.tolist() == list(range(100))


def test_a_sweep_runs_the_kernel(y):
    def timer(call):
        y.zero_()
        call()
        assert y.tolist() == list(range(100))
        return 1.0

    assert tuned_fill().sweep(whole, y, 100, timer=timer) is SIZES[0]


def test_cards_do_not_share_choices(y, monkeypatch):
    monkeypatch.setattr(_configs, "_card", lambda: "NVIDIA A")
    kernel = tuned_fill()
    kernel.sweep(whole, y, 100, timer=likes(64))
    assert kernel.choose(y, 100) is SIZES[2]
    monkeypatch.setattr(_configs, "_card", lambda: "NVIDIA B")
    assert kernel.choose(y, 100) is tuned_fill().choose(y, 100) is SIZES[0]


def test_without_cache_results_nothing_is_written(y, cache):
    kernel = tuned_fill(cache_results=False)
    assert kernel.sweep(whole, y, 100, timer=likes(64)) is SIZES[2]
    assert kernel.choose(y, 100) is SIZES[2]
    assert not cache.exists()


def test_choices_of_the_checkout_come_second(y, monkeypatch, cache, tmp_path):
    checkout = tmp_path / "checkout"
    monkeypatch.setattr(_configs, "folders", lambda: [cache, checkout])
    tuned_fill().sweep(whole, y, 100, timer=likes(32), folder=checkout)
    assert not cache.exists() and tuned_fill().choose(y, 100) is SIZES[1]
    tuned_fill().sweep(whole, y, 100, timer=likes(64))
    assert tuned_fill().choose(y, 100) is SIZES[2]


@pytest.mark.skipif(DEVICE != "cpu", reason="about the interpreter")
def test_the_interpreter_does_not_sweep(y, cache, monkeypatch):
    monkeypatch.setattr(_configs, "do_bench", None)
    assert tuned_fill().sweep(whole, y, 100) is SIZES[0]
    assert not cache.exists()


@needs_gpu
def test_the_gpu_sweeps(y, cache):
    assert tuned_fill().sweep(whole, y, 100) in SIZES
    assert len([*cache.rglob("*.json")]) == 1


@pytest.mark.parametrize(
    ("times", "best"),
    [((1, 1, 1), 0), ((1.01, 1, 1), 0), ((1.05, 1.01, 1), 1), ((3, 2, 1), 2), ((None, 2, 1.99), 1)],
)
def test_ties_go_to_the_earlier(y, times, best):
    named = dict(zip((16, 32, 64), times))

    def timer(call):
        if named[block_of(call)] is None:
            raise OutOfResources(2, 1, "shared memory")
        return named[block_of(call)]

    for _ in range(2):
        assert tuned_fill().sweep(whole, y, 100, timer=timer) is SIZES[best]


def test_no_candidate_fits(y, cache):
    def timer(call):
        raise OutOfResources(2, 1, "shared memory")

    with pytest.raises(RuntimeError, match="fill: .* no candidate"):
        tuned_fill().sweep(whole, y, 100, timer=timer)
    assert not cache.exists()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"key": [128]}', '{"config": {}}', "\x00\xff", '"BLOCK"']
)
def test_a_damaged_file_is_ignored(y, cache, text):
    tuned_fill().sweep(whole, y, 100, timer=likes(64))
    (file,) = cache.rglob("*.json")
    file.write_bytes(text.encode("latin-1"))
    kernel = tuned_fill()
    with pytest.warns(UserWarning, match="is not a recorded choice"):
        assert kernel.choose(y, 100) is SIZES[0]
    assert kernel.choose(y, 100) is SIZES[0]  # said once
    kernel.sweep(whole, y, 100, timer=likes(64))  # and mended
    assert tuned_fill().choose(y, 100) is SIZES[2]


@pytest.mark.parametrize("part", ["key", "config"])
def test_a_choice_of_something_else_is_ignored(y, cache, part):
    tuned_fill().sweep(whole, y, 100, timer=likes(64))
    (file,) = cache.rglob("*.json")
    entry = json.loads(file.read_text())
    other = {"key": [256, "float32"], "config": {**entry["config"], "BLOCK": 48}}
    file.write_text(json.dumps(entry | {part: other[part]}))
    assert tuned_fill().choose(y, 100) is SIZES[0]


def test_a_cache_that_cannot_be_written(y, cache):
    cache.parent.mkdir(exist_ok=True)
    cache.write_text("a file in the folder's place")
    kernel = tuned_fill()
    with pytest.warns(UserWarning, match="not recorded"):
        assert kernel.sweep(whole, y, 100, timer=likes(64)) is SIZES[2]
    assert kernel.choose(y, 100) is SIZES[2]


def test_a_write_that_fails_leaves_nothing(cache, monkeypatch):
    file = cache / "card" / "kernel" / "1.json"
    _configs._write(file, {"key": 1})
    monkeypatch.setattr(_configs.os, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _configs._write(file, {"key": 2})
    assert [*file.parent.iterdir()] == [file]
    assert json.loads(file.read_text()) == {"key": 1}


WRITER = """
import sys
from pathlib import Path
from nbxtensor.ops._configs import _write
folder, me = Path(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for k in range(200):
    entry = {"key": ["shared"], "config": {"me": me, "pad": "x" * 5000 * (me + 1)}}
    _write(folder / "shared.json", entry)
    _write(folder / f"{me}-{k}.json", entry)
"""


def test_processes_share_the_cache(cache):
    command = [sys.executable, "-c", WRITER, str(cache)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    writers = [subprocess.Popen([*command, str(me)], **pipes) for me in range(3)]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    read = 0
    while any(writer.poll() is None for writer in writers):
        file = cache / "shared.json"
        if file.exists():
            config = json.loads(file.read_text())["config"]  # never a part
            assert len(config["pad"]) == 5000 * (config["me"] + 1)
            read += 1
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    assert read and len([*cache.iterdir()]) == 3 * 200 + 1


def test_threads_share_a_kernel(y):
    kernel, found = tuned_fill(), []
    kernel.sweep(whole, y, 100, timer=likes(32))
    kernel.chosen.clear()
    threads = [
        threading.Thread(target=lambda: found.append(kernel.choose(y, 100))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [SIZES[1]] * 8


def test_progress_is_for_terminals(y, capsys, monkeypatch):
    tuned_fill().sweep(whole, y, 100, timer=likes(32))
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    tuned_fill().sweep(whole, y, 100, timer=likes(32))
    steps = re.findall(r"\rsweep of fill [█░]{3} (\d)/3", capsys.readouterr().err)
    assert steps == ["0", "1", "2", "3"]


def test_the_default_cache_is_the_users(monkeypatch):
    monkeypatch.delenv("NBX_CACHE_DIR")
    home, checkout = _configs.folders()
    assert str(home) == os.path.expanduser("~/.cache/nbxtensor")
    assert checkout.parts[-2:] == ("benchmarks", "choices")
