"""Notebooks are committed executed, clean and fit to be compared."""

import re
import sys

import nbformat
import pytest

from conftest import ROOT
from tools.notebooks import CELL_KEYS, KERNEL, OUTPUT_KEYS

NOTEBOOKS = sorted(ROOT.glob("notebooks/**/[!.]*.ipynb"))
COLUMNS = 76
MACHINE = re.compile(r"/(?:home|root|tmp|usr|opt|Users|private|var)/\S*|site-packages")


def faults(path):
    """What stands against committing this notebook, a line each."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    if notebook.metadata != {"kernelspec": KERNEL}:
        yield f"notebook metadata is {dict(notebook.metadata)}"
    code = [c for c in notebook.cells if c.cell_type == "code"]
    for cell in notebook.cells:
        name = f"cell {cell.get('id')}"
        if extra := set(cell.metadata) - set(CELL_KEYS):
            yield f"{name}: metadata {sorted(extra)}"
    for count, cell in enumerate(code, start=1):
        name = f"cell {cell.get('id')}"
        if not cell.source.strip():
            yield f"{name}: empty"
        if cell.execution_count is None:
            yield f"{name}: not executed"
        elif cell.execution_count != count:
            yield f"{name}: executed as {cell.execution_count}, stands at {count}"
        for line in cell.source.split("\n"):
            if len(line) > COLUMNS:
                yield f"{name}: {len(line)} columns: {line.strip()[:40]} ..."
        for output in cell.outputs:
            yield from (f"{name}: {fault}" for fault in output_faults(output))


def output_faults(output):
    if output.output_type == "error":
        yield f"ends in {output.ename}"
        return
    if output.get("name") == "stderr":
        yield f"writes to stderr: {output.text[:60]}"
    if extra := set(output.get("metadata", {})) - set(OUTPUT_KEYS):
        yield f"output metadata {sorted(extra)}"
    data = output.get("data", {"text/plain": output.get("text", "")})
    for kind, text in data.items():
        if not isinstance(text, str) or kind in ("image/png", "image/jpeg"):
            continue
        if "Traceback (most recent call last)" in text:
            yield "prints a traceback"
        if path := MACHINE.search(text):
            yield f"shows a path of this machine: {path[0][:40]}"


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_a_notebook_is_fit_to_be_committed(path):
    found = "\n".join(faults(path))
    assert not found, f"{found}\n`make notebooks NB={path.relative_to(ROOT)}` cleans and runs it"


# From here on, what is broken on purpose must be seen.

ERROR = nbformat.v4.new_output("error", ename="ZeroDivisionError", evalue="", traceback=[])
WARNING = nbformat.v4.new_output("stream", name="stderr", text="UserWarning: no")


def edited(path, change):
    notebook = nbformat.read(path, as_version=4)
    change(notebook)
    nbformat.write(notebook, path)
    return path


def test_a_clean_notebook_has_no_faults(tree):
    assert list(faults(tree.double())) == []


@pytest.mark.parametrize(
    "change, fault",
    [
        (lambda nb: nb.cells[1].update(execution_count=None), "cell cell-2: not executed"),
        (lambda nb: nb.cells[2].update(execution_count=7), "executed as 7, stands at 3"),
        (lambda nb: nb.cells[1].update(source=""), "cell cell-2: empty"),
        (lambda nb: nb.cells[1].update(source=f"x = '{'x' * 76}'"), "82 columns"),
        (lambda nb: nb.cells[1].metadata.update(execution={"a": "b"}), "metadata ['execution']"),
        (lambda nb: nb.metadata.kernelspec.update(name="venv"), "notebook metadata"),
        (lambda nb: nb.metadata.update(language_info={"name": "python"}), "notebook metadata"),
        (lambda nb: nb.cells[2].outputs[0].data.update({"text/plain": "/tmp/x"}), "path of this"),
        (lambda nb: nb.cells[2].outputs.append(ERROR), "ends in ZeroDivisionError"),
        (lambda nb: nb.cells[2].outputs.append(WARNING), "writes to stderr"),
    ],
)
def test_a_fault_is_named(tree, change, fault):
    path = edited(tree.double(), change)
    assert fault in "\n".join(faults(path))


def test_nbval_catches_a_stale_output_and_a_failing_cell(tree):
    tree.double("notebooks/good.ipynb")
    tree.notebook("notebooks/stale.ipynb", ("6 * 7", "41"))
    tree.notebook("notebooks/failing.ipynb", "1 / 0")
    (tree.root / "tests").mkdir()
    status, said = tree.run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v")
    assert status == 1, said
    assert len(re.findall(r"good\S*::Cell \d PASSED", said)) == 3, said
    assert re.search(r"stale\S*::Cell 0 FAILED", said)
    assert "Cell outputs differ" in said
    assert re.search(r"failing\S*::Cell 0 FAILED", said)
    assert "ZeroDivisionError" in said


def test_make_notebooks_writes_outputs_and_nothing_that_varies(tree):
    good = tree.notebook(
        "notebooks/good.ipynb",
        "import os, sys",
        ("print('out')\nsys.stdout.flush()\nprint('more')\n6 * 7", "stale"),
    )
    edited(good, lambda nb: nb.metadata.update(language_info={"name": "python"}))
    edited(good, lambda nb: nb.cells[0].metadata.update(collapsed=True, tags=["hide-input"]))
    failing = tree.notebook("notebooks/failing.ipynb", "1 / 0")
    before = failing.read_bytes()

    status, said = tree.make("notebooks", f"NB={good}")
    assert status == 0, said
    assert list(faults(good)) == []
    first, second = nbformat.read(good, as_version=4).cells
    assert first.metadata == {"tags": ["hide-input"]}
    assert [o.get("text") or o.data["text/plain"] for o in second.outputs] == ["out\nmore\n", "42"]

    once = good.read_bytes()
    status, said = tree.make("notebooks")
    assert status != 0, said
    assert "failing.ipynb" in said
    assert "ZeroDivisionError" in said
    assert good.read_bytes() == once
    assert failing.read_bytes() == before
