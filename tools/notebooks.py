"""Run notebooks from top to bottom and write their outputs in place.

    python tools/notebooks.py [notebook ...]       all of them by default

What is written holds nothing that changes between two runs of the same
code: no times, no kernel or language versions, no identifiers of outputs.
A notebook with a failing cell stays as it was.
"""

import argparse
import atexit
import os
import shutil
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).parents[1]
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
# What a cell or an output may say of itself; the rest is dropped.
CELL_KEYS = ("tags", "mystnb")
OUTPUT_KEYS = ("needs_background", "filename")


def prepare_kernels(root=ROOT):
    """Give the kernels that this process starts the same plain setting.

    They import the package from the checkout, and no profile of the user
    changes what they print.
    """
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    profile = tempfile.mkdtemp(prefix="ipython-")
    atexit.register(shutil.rmtree, profile, ignore_errors=True)
    os.environ["IPYTHONDIR"] = profile
    os.environ["JUPYTER_PLATFORM_DIRS"] = "1"
    os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"
    for name in ("MPLBACKEND", "MATPLOTLIBRC", "FORCE_COLOR", "COLUMNS"):
        os.environ.pop(name, None)


def clean(notebook):
    """Drop from the notebook what does not belong in version control."""
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL})
    for cell in notebook.cells:
        cell.metadata = keep(cell.metadata, CELL_KEYS)
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output.metadata = keep(output.metadata, OUTPUT_KEYS)
    return notebook


def keep(metadata, keys):
    return nbformat.from_dict({k: metadata[k] for k in keys if k in metadata})


def run(path):
    """Execute one notebook in place; return its first failure, if any."""
    notebook = clean(nbformat.read(path, as_version=4))
    client = NotebookClient(
        notebook,
        timeout=120,
        kernel_name=KERNEL["name"],
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(path.parent)}},
    )
    try:
        client.execute()
    except CellExecutionError as error:
        return f"{path}: {error}"
    nbformat.write(clean(notebook), path)
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("notebook", nargs="*", type=Path)
    paths = parser.parse_args().notebook
    prepare_kernels()
    failures = []
    for path in paths or sorted(ROOT.glob("notebooks/**/[!.]*.ipynb")):
        path = path.resolve()
        print(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path, flush=True)
        failures.append(run(path))
    if any(failures):
        sys.exit("\n".join(filter(None, failures)))


if __name__ == "__main__":
    main()
