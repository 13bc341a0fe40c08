"""The benchmark's command: what it writes, and when it writes nothing."""

import functools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

from nbxtensor import bench

import pytest
import torch

from conftest import ROOT

# Measured without a GPU: every call takes a microsecond.
measure = functools.partial(bench.measure, timer=lambda call: 1.0, backend="eager")
measure_host = functools.partial(bench.measure_host, calls=1, batches=3)
MACHINE = {"gpu": "NVIDIA Made Up", "commit": "unknown"}


def command(*arguments, **environ):
    return subprocess.run(
        [sys.executable, "-m", "nbxtensor.bench", *arguments],
        cwd=ROOT,
        env={**os.environ, **environ},
        text=True,
        capture_output=True,
        timeout=300,
    )


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """The whole command, with a clock that stands still; in a new folder."""
    all_cases = bench.cases

    def small_cases(ops):
        return sorted({replace(c, size=2**10) for c in all_cases(ops)}, key=str)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "_has_gpu", lambda: True)
    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "measure_host", measure_host)
    monkeypatch.setattr(bench, "machine", lambda: MACHINE)
    monkeypatch.setattr(
        bench, "ceilings", lambda rounds: {"copy_gbps": 4000.0, "read_gbps": 4200.0}
    )
    monkeypatch.setattr(bench, "cases", small_cases)
    return tmp_path


def test_without_a_gpu_it_says_so_and_fails():
    before = {p: p.read_bytes() for p in ROOT.glob("benchmarks/*")}
    done = command(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")
    assert done.returncode == 1
    assert "that needs a GPU and compiled kernels" in done.stderr
    assert before == {p: p.read_bytes() for p in ROOT.glob("benchmarks/*")}


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (("mush",), "unknown operator mush; there are maximum,"),
        (("--rounds", "0"), "--rounds is 0, it must be at least 1"),
    ],
)
def test_a_wrong_argument_is_refused(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as refused:
        bench.main(arguments)
    assert refused.value.code == 2
    assert sentence in capsys.readouterr().err


def test_a_dry_run_needs_no_gpu():
    done = command("--dry-run", "mish")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+ cases compute what torch computes\n", done.stdout)


def test_a_run_writes_one_row_a_line(timed, capsys):
    assert bench.main([]) == 0
    path = timed / "benchmarks" / "made-up.json"
    assert os.listdir(path.parent) == [path.name]
    lines = path.read_text().splitlines()
    record = json.loads(path.read_text())
    rows = [json.loads(line.rstrip(",")) for line in lines if line.startswith("  {")]
    assert rows == record["rows"]
    assert record["machine"] == MACHINE
    assert bench.load("made-up") == bench.derive(record)
    host = [row for row in rows if "host_us" in row]
    assert rows[: len(host)] == host, "host times come first"
    assert {row["op"] for row in rows} == set(bench.OPS)
    assert f"{len(rows)} rows in " in capsys.readouterr().out


def test_the_committed_row_has_the_documented_keys(timed):
    assert bench.main(["mish", "--output", "part.json"]) == 0
    record = json.loads((timed / "part.json").read_text())
    common = {"op", "case", "dtype", "shape", "layout", "bytes", "flops", "spread"}
    for row in record["rows"]:
        (us,) = set(row) - common
        versions = {"us": {"nbx", "torch", "compile"}, "host_us": {"nbx", "torch"}}[us]
        assert set(row[us]) == set(row["spread"]) == versions


def test_a_part_of_the_suite_replaces_nothing(timed, capsys):
    assert bench.main(["minimum"]) == 0
    assert os.listdir(timed) == []
    assert "not written" in capsys.readouterr().out


@pytest.mark.parametrize("version", ["nbx", "compile"])
def test_a_wrong_result_is_named_and_nothing_is_written(timed, monkeypatch, capsys, version):
    (timed / "benchmarks").mkdir()
    record = timed / "benchmarks" / "made-up.json"
    record.write_text("old")

    def spoiled(op, backend, versions=bench.versions):
        made = versions(op, backend)
        return {**made, version: lambda *t: made["torch"](*t) + 1} if op == "mish" else made

    monkeypatch.setattr(bench, "versions", spoiled)
    assert bench.main([]) == 1
    said = capsys.readouterr().err
    assert f"mish, contiguous, bfloat16, size 1024: '{version}' is not what torch" in said
    assert record.read_text() == "old"


def test_a_broken_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "made-up.json"
    path.write_text("old")

    def full(*paths):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        bench.write({"machine": {}, "ceilings": {}, "rows": []}, path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == [path.name]


def test_versions_are_timed_in_turn():
    turns = []

    def timer(call):
        turns.append(call.func)
        return 1.0

    case = bench.Case("maximum", "contiguous", "float32", 64)
    bench.measure(case, rounds=3, timer=timer, backend="eager")
    assert len(turns) == 9
    assert turns[:3] == turns[3:6] == turns[6:]
    assert turns[:2] == [bench.ours("maximum"), torch.maximum]


def test_every_operator_of_the_package_is_measured():
    import nbxtensor

    measured = {case.op for case in bench.cases()}
    assert measured == set(bench.OPS) >= set(nbxtensor.__all__)


def test_the_commit_is_the_one_named_in_the_environment(monkeypatch):
    class Gpu:
        name, L2_cache_size = "NVIDIA Made Up", 50 << 20

    monkeypatch.setattr(torch.cuda, "get_device_properties", Gpu)
    monkeypatch.setenv("NBX_COMMIT", "abc")
    assert bench.machine()["commit"] == "abc"
    monkeypatch.setenv("NBX_COMMIT", "")
    monkeypatch.setenv("PATH", "")
    found = bench.machine()
    assert (found["commit"], found["driver"], found["l2_mib"]) == ("unknown", "unknown", 50)
