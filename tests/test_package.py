"""The wheel installs, and imports without the tools of the book."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from conftest import ROOT

# In a child process: the wheel is imported while everything that only the
# book and the tests need is hidden.
USE = """
import sys

class Hidden:
    names = {
        "IPython", "docutils", "fastcore", "ipykernel", "jupyter_book",
        "jupyter_client", "jupyter_core", "matplotlib", "myst_nb", "nbclient",
        "nbdev", "nbformat", "nbval", "pytest", "sphinx",
    }
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"hidden from this test: {name}", name=name)

sys.meta_path.insert(0, Hidden())

import nbxtensor
import torch

where, = sys.argv[1:]
assert nbxtensor.__file__.startswith(where), nbxtensor.__file__
device = "cuda" if torch.cuda.is_available() else "cpu"
a, b = torch.tensor([[1.0, 5.0], [float("nan"), 3.0]], device=device).unbind(1)
print(nbxtensor.maximum(a, b).tolist())
"""


def run(*command, cwd):
    done = subprocess.run(command, cwd=cwd, env=ENV, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# No PYTHONPATH: the checkout must not stand in for what was installed.
ENV = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "nbxtensor", source / "nbxtensor", ignore=shutil.ignore_patterns("__pycache__")
    )
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", cwd=source)
    (made,) = (source / "dist").glob("nbxtensor-*.whl")
    return made


def test_the_wheel_holds_the_package_and_its_licence(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    package = {p.relative_to(ROOT).as_posix() for p in ROOT.glob("nbxtensor/**/*.py")}
    assert package == {n for n in names if not n.split("/")[0].endswith(".dist-info")}
    assert any(n.endswith("/LICENSE") for n in names)


def test_the_wheel_imports_without_the_tools_of_the_book(wheel, tmp_path):
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    run(*pip, "--target", str(target), str(wheel), cwd=tmp_path)
    bootstrap = f"import sys; sys.path.insert(0, {str(target)!r})\n{USE}"
    said = run(sys.executable, "-c", bootstrap, str(target), cwd=tmp_path)
    assert said.split() == ["[5.0,", "nan]"]
