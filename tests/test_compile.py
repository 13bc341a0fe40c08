"""Every kernel compiles for every target, on a machine that has none of them."""

import json
import os
import subprocess
import sys

import nbxtensor.runtime  # noqa: F401

import pytest

from conftest import ROOT

# The first is compiled for in full, the others in part.
TARGETS = ["sm_90", "sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_100", "sm_120", "gfx942"]
PROCESSES = 2


def start(cache, *arguments):
    """Start compile_kernels.py, with Triton's compiler and without a GPU."""
    environ = {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "TRITON_CACHE_DIR": str(cache)}
    return subprocess.Popen(
        [sys.executable, ROOT / "tests" / "compile_kernels.py", *arguments],
        env={**os.environ, **environ},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process):
    """The lines that it printed, read as JSON."""
    said, complaint = process.communicate(timeout=300)
    assert process.returncode == 0, complaint[-3000:]
    return [json.loads(line) for line in said.splitlines()]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What was compiled, by target and kernel."""
    cache = tmp_path_factory.mktemp("cache")
    started = [start(cache, f"{part}/{PROCESSES}", *TARGETS) for part in range(PROCESSES)]
    reports = {name: {} for name in TARGETS}
    try:
        for process in started:
            for report in finish(process):
                reports[report["target"]][report["what"]] = report
    finally:
        for process in started:
            process.kill()
    return reports


@pytest.mark.parametrize("target", TARGETS)
def test_it_compiles(compiled, target):
    assert len(compiled[target]) >= (150 if target == TARGETS[0] else 8)
    for name in ("maximum", "minimum", "mish", "maximum_backward", "mish_backward"):
        assert any(what.startswith(f"{name} ") for what in compiled[target])


@pytest.mark.parametrize("target", [t for t in TARGETS if t.startswith("sm_")])
def test_nothing_is_spilled(compiled, target):
    spilled = {
        what: (report["registers"], report["spilled"])
        for what, report in compiled[target].items()
        if report["spilled"]
    }
    assert not spilled


@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_the_compiled_extremum_keeps_nan(compiled, name):
    """The interpreter keeps it in any case, so its tests say nothing here."""
    for dtype in ("float16", "bfloat16", "float32"):
        for layout in ("flat", "turned"):
            used = compiled["sm_90"][f"{name} {dtype} {layout}"]["extrema"]
            assert used and all(u.startswith(f"{name[:3]}.NaN.") for u in used)


def test_offsets_have_64_bits_where_they_need_them(tmp_path):
    (wide,) = finish(start(tmp_path, "widths"))
    assert len(wide) == 6
    assert {what for what in wide if not wide[what]} == {"flat below", "rows below"}
