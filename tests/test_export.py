"""The package is what the notebooks export, and a difference is noticed."""

import subprocess
import sys

import pytest

from conftest import ROOT


@pytest.fixture
def exported(tree):
    tree.double()
    status, said = tree.make("export")
    assert status == 0, said
    return tree


def refused(tree, *words):
    status, said = tree.make("check-export")
    assert status != 0, said
    for word in words:
        assert word in said
    return said


def test_this_checkout_is_a_fresh_export():
    done = subprocess.run(
        [sys.executable, "tools/export.py", "--check"], cwd=ROOT, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr


def test_an_export_is_accepted_and_says_where_it_came_from(exported):
    status, said = exported.make("check-export")
    assert status == 0, said
    text = (exported.root / "nbxtensor/ops/double.py").read_text()
    assert text.startswith('"""Derived, explained and tested in notebooks/ops/double.ipynb."""')
    assert "# %% ../../notebooks/ops/double.ipynb #cell-2\ndef double(x):" in text
    assert (exported.root / "nbxtensor/ops/__init__.py").read_text() == ""


def test_only_the_package_is_written(exported):
    wrote = {p.name for p in exported.root.rglob("*") if p.is_file()}
    assert "_modidx.py" not in wrote
    assert "llms.txt" not in wrote
    assert (exported.root / "pyproject.toml").read_bytes() == (ROOT / "pyproject.toml").read_bytes()


def test_a_hand_edit_is_caught_and_undone_by_an_export(exported):
    module = exported.root / "nbxtensor/ops/double.py"
    module.write_text(module.read_text().replace("2 * x", "x + x"))
    refused(
        exported,
        "nbxtensor/ops/double.py: differs",
        "notebooks/ops/double.ipynb",
        "`make export`",
    )
    exported.make("export")
    assert exported.make("check-export")[0] == 0


def test_a_notebook_ahead_of_its_module_is_caught(exported):
    notebook = exported.root / "notebooks/ops/double.ipynb"
    notebook.write_text(notebook.read_text().replace("2 * x", "x + x"))
    refused(exported, "nbxtensor/ops/double.py: differs", "`make export`")


def test_a_deleted_notebook_is_caught_and_its_module_removed(exported):
    (exported.root / "notebooks/ops/double.ipynb").unlink()
    refused(exported, "nbxtensor/ops/double.py: no notebook exports it")
    status, said = exported.make("export")
    assert status == 0, said
    assert "removed nbxtensor/ops/double.py" in said
    assert exported.make("check-export")[0] == 0


def test_a_notebook_that_was_never_exported_is_caught(exported):
    exported.double("notebooks/triple.ipynb", "triple")
    refused(exported, "nbxtensor/triple.py: missing", "notebooks/triple.ipynb exports it")


def test_a_module_written_by_hand_is_caught_and_kept(exported):
    module = exported.root / "nbxtensor/ops/extra.py"
    module.write_text("x = 1\n")
    refused(exported, "nbxtensor/ops/extra.py: no notebook exports it")
    status, said = exported.make("export")
    assert status != 0
    assert "nbxtensor/ops/extra.py" in said
    assert module.exists()


def test_two_notebooks_cannot_share_a_module(exported):
    exported.double("notebooks/again.ipynb")
    refused(exported, "again.ipynb", "double.ipynb", "one notebook makes one module")


@pytest.mark.parametrize(
    "cells, why",
    [
        (["x = 1"], "0 cells say '#| default_exp'"),
        (["#| default_exp a", "#| default_exp b"], "2 cells say '#| default_exp'"),
        (["#| default_exp a", "x = 1"], "no cell says '#| export'"),
        (["#| default_exp a", "#| export b\nx = 1"], "names another module"),
    ],
)
def test_a_notebook_makes_exactly_one_module(exported, cells, why):
    exported.notebook("notebooks/odd.ipynb", *cells)
    refused(exported, "odd.ipynb", why)
