"""Settings for pytest and for the kernels that nbval starts from it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat.v4 as v4
import pytest

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

from tools.notebooks import KERNEL, prepare_kernels  # noqa: E402

prepare_kernels(ROOT)


class Tree:
    """A small checkout of its own, with this one's tools, to break."""

    def __init__(self, root):
        self.root = root
        for name in ("Makefile", "pyproject.toml", "conftest.py"):
            shutil.copy(ROOT / name, root)
        shutil.copytree(ROOT / "tools", root / "tools")
        (root / "notebooks").mkdir()
        (root / "nbxtensor").mkdir()

    def notebook(self, path, *cells):
        """Write a notebook; a cell is its source, or source and output."""
        made = []
        for count, cell in enumerate(cells, start=1):
            source, *shown = [cell] if isinstance(cell, str) else cell
            outputs = [
                v4.new_output("execute_result", {"text/plain": text}, execution_count=count)
                for text in shown
            ]
            made.append(
                v4.new_code_cell(
                    source, id=f"cell-{count}", execution_count=count, outputs=outputs
                )
            )
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        notebook = v4.new_notebook(cells=made, metadata={"kernelspec": KERNEL})
        file.write_text(v4.writes(notebook) + "\n")
        return file

    def double(self, path="notebooks/ops/double.ipynb", module="ops.double"):
        """A notebook as all of them are: a module, a cell, a result."""
        return self.notebook(
            path,
            f"#| default_exp {module}",
            "#| export\ndef double(x):\n    return 2 * x",
            ("double(21)", "42"),
        )

    def run(self, *command):
        """Run a command in the tree: its exit status and what it said."""
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "MAKE"))}
        done = subprocess.run(
            command, cwd=self.root, env=environ, text=True, capture_output=True, timeout=300
        )
        return done.returncode, done.stdout + done.stderr

    def make(self, *target):
        return self.run("make", *target, f"PYTHON={sys.executable}")


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)
