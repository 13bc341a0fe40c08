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


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What compile_kernels.py reports, by target and kernel."""
    environ = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    environ["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    script = ROOT / "tests" / "compile_kernels.py"
    started = [
        subprocess.Popen(
            [sys.executable, script, f"{part}/{PROCESSES}", *TARGETS],
            env=environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for part in range(PROCESSES)
    ]
    reports = {name: {} for name in TARGETS}
    try:
        for process in started:
            said, complaint = process.communicate(timeout=300)
            assert process.returncode == 0, complaint[-3000:]
            for report in map(json.loads, said.splitlines()):
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
