"""The book: built strictly, complete, and asking nothing of the network."""

import importlib.util
import json
import os
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import nbformat.v4 as v4
import pytest

from conftest import ROOT, Tree

if importlib.util.find_spec("jupyter_book") is None:
    pytest.skip("the book's tools are not installed here", allow_module_level=True)

sys.path.insert(0, str(ROOT / "book" / "_ext"))

BUILT = ROOT / "_build" / "html"
URL = "https://github.com/example/kernels"
HOSTED = ("colab.research.google.com", "mybinder.org", "/edit/", "/issues/new", URL)

KERNEL = '''#| export
import os

os.environ["TRITON_INTERPRET"] = "1"
import triton
import triton.language as tl

from nbxtensor.other import other_kernel


@triton.jit
def double_kernel(x_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    """Double `n_elements` numbers in place.

    Page: ops/double
    """
    offsets = tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(x_ptr + offsets, 2 * x, mask=mask)'''

OTHER = '''import triton


@triton.jit
def other_kernel(x_ptr):
    """Written elsewhere."""
'''

DOUBLE = '''#| export
def double(x: float) -> float:
    """Twice `x`.

    Args:
        x: Any number.

    Page: ops/double
    """
    return 2 * x'''

MACHINE = '{"machine": {"gpu": "Some GPU", "date": "2026-01-31"}, "rows": [{}, {}]}'

INDEX = """# Stub

```{figure} _static/flow.svg
:name: fig-flow
:alt: Three arrows

A caption.
```

[A page](../notebooks/ops/double.ipynb), {numref}`fig-flow`, {py:func}`double
<nbxtensor.ops.double.double>`, {cite:p}`misra2020`, $x^2$.

:::{only} repository
```
pip install git+NBX_REPOSITORY_URL@NBX_REPOSITORY_BRANCH
```
:::

```{nbx-machines}
```

```{nbx-versions} torch triton
```

```{bibliography}
```
"""

API = """# API

```{eval-rst}
.. automodule:: nbxtensor.ops.double
   :members:
```
"""

TOC = """format: jb-book
root: book/index
chapters:
  - file: notebooks/ops/double
  - file: book/api
"""


class Page(HTMLParser):
    """What a page names, what it links to and what it would load."""

    def __init__(self, file):
        super().__init__()
        self.ids, self.links, self.loads, self.images = set(), [], [], []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids.update(attrs[key] for key in ("id", "name") if attrs.get(key))
        if tag == "a" and attrs.get("href"):
            self.links.append(attrs["href"])
        if tag == "link" and attrs.get("href"):
            self.loads.append(attrs["href"])
        for key in ("src", "srcset", "data", "poster"):
            if attrs.get(key) and tag != "a":
                self.loads.append(attrs[key])
        if tag == "img":
            self.images.append((attrs.get("src"), attrs.get("alt") or ""))


def pages(html):
    # The theme leaves two templates of its own in _static.
    files = [f for f in sorted(html.rglob("*.html")) if "_static" not in f.parts]
    return {file: Page(file) for file in files}


def build(tree, url=""):
    return tree.make("book", f"NBX_REPOSITORY_URL={url}", "NBX_REPOSITORY_BRANCH=trunk")


def small_book(root):
    """A book of three pages with this checkout's configuration."""
    tree = Tree(root)
    for name in ("_config.yml", "requirements.txt"):
        shutil.copy(ROOT / name, root)
    for name in ("_ext", "_static"):
        shutil.copytree(
            ROOT / "book" / name,
            root / "book" / name,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    shutil.copy(ROOT / "book" / "references.bib", root / "book")
    (root / "_toc.yml").write_text(TOC)
    (root / "book" / "index.md").write_text(INDEX)
    (root / "book" / "api.md").write_text(API)
    cells = ("#| default_exp ops.double", KERNEL, DOUBLE, ("double(21)", "42"))
    tree.notebook("notebooks/ops/double.ipynb", *cells)
    lines = [cell.split("\n", 1)[1] for cell in (KERNEL, DOUBLE)]
    (root / "nbxtensor" / "__init__.py").write_text("")
    (root / "nbxtensor" / "ops").mkdir()
    (root / "nbxtensor" / "ops" / "__init__.py").write_text("")
    (root / "nbxtensor" / "ops" / "double.py").write_text("\n\n\n".join(lines) + "\n")
    (root / "nbxtensor" / "other.py").write_text(OTHER)
    (root / "benchmarks").mkdir()
    (root / "benchmarks" / "some.json").write_text(MACHINE)
    title = '{"cell_type": "markdown", "id": "title", "metadata": {}, "source": "# double"}'
    notebook = root / "notebooks" / "ops" / "double.ipynb"
    notebook.write_text(notebook.read_text().replace('"cells": [', f'"cells": [{title},', 1))
    add_figures(notebook, ("A square.", None), ("<Figure>", "A circle."))
    return tree


def add_figures(path, *figures):
    """Append cells that show an image: its text form, and the cell's alt."""
    notebook = nbformat.read(path, as_version=4)
    for text, alt in figures:
        svg = f'<svg xmlns="http://www.w3.org/2000/svg"><title>{len(text)}</title></svg>'
        data = {"image/svg+xml": svg, "text/plain": text}
        output = v4.new_output("display_data", data)
        metadata = {"mystnb": {"image": {"alt": alt}}} if alt else {}
        notebook.cells.append(v4.new_code_cell("draw()", metadata=metadata, outputs=[output]))
    nbformat.write(notebook, path)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    tree = small_book(tmp_path_factory.mktemp("book"))
    status, said = build(tree)
    assert status == 0, said
    assert "_build/html" in said.splitlines()[-1]
    return tree.root / "_build" / "html"


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A book with a fault of each kind, built with an address."""
    tree = small_book(tmp_path_factory.mktemp("broken"))
    index = tree.root / "book" / "index.md"
    faults = (
        "[](../notebooks/ops/gone.ipynb)",
        "{ref}`no-label`",
        "{py:func}`nbxtensor.gone`",
        "{cite:p}`nobody1900`",
    )
    index.write_text(INDEX + "\n\n".join(("", *faults, "")))
    module = tree.root / "nbxtensor" / "ops" / "double.py"
    module.write_text(module.read_text().replace("Page: ops/double", "Page: ops/away", 1))
    notebook = tree.root / "notebooks" / "ops" / "double.ipynb"
    text = notebook.read_text()
    assert text.count('"#| export\\n"') == 2
    notebook.write_text(text.replace('"#| export\\n"', '"#| export ops.lost\\n"', 1))
    status, said = build(tree, URL + ".git")
    return status, said, tree.root / "_build" / "html"


@pytest.fixture(params=["small", "whole"])
def html(request):
    """The small book, and this one when it has been built."""
    if request.param == "small":
        return request.getfixturevalue("small")
    if not (BUILT / "index.html").is_file():
        pytest.skip("the book is not built here; `make test` builds it first")
    return BUILT


# ------------------------------------------------------- what a build refuses


@pytest.mark.parametrize(
    "fault",
    ["gone.ipynb", "no-label", "nbxtensor.gone", "nobody1900", "ops/away", "nbxtensor.ops.lost"],
)
def test_a_broken_reference_fails_the_build(broken, fault):
    status, said, _ = broken
    assert status != 0
    warnings = [line for line in said.splitlines() if "WARNING" in line]
    assert any(fault in line for line in warnings), said


# --------------------------------------------------------- what a page holds


def test_nothing_is_loaded_from_elsewhere(html):
    loads = {
        (file.name, url)
        for file, page in pages(html).items()
        for url in page.loads
        if re.match(r"(https?:)?//", url)
    }
    assert not loads
    for file in html.rglob("*.css"):
        found = re.findall(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')]+)", file.read_text())
        assert not found, file
    for file in pages(html):
        scripts = re.findall(r"<script\b[^>]*>(.*?)</script>", file.read_text(), re.S)
        assert not any("http" in script for script in scripts), file


def test_the_formula_fonts_are_here(html):
    math = html / "_static" / "mathjax"
    assert (math / "tex-chtml-full.js").is_file()
    assert (math / "LICENSE").is_file()
    assert len(list((math / "output" / "chtml" / "fonts" / "woff-v2").glob("*.woff"))) > 20


def states(file):
    """The fragments that name a layout of the explorer, if the file is its page."""
    found = re.search(r'type="application/json">(.*?)</script>', file.read_text("utf-8"), re.S)
    return [f"layout={layout['key']}" for layout in json.loads(found[1])] if found else []


def test_links_inside_the_book_lead_somewhere(html):
    every, dead = pages(html), []
    for file, page in every.items():
        for url in page.links + page.loads:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc or url == "#":
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if not target.is_file():
                dead.append((file.name, url))
            elif parts.fragment and target in every:
                there = unquote(parts.fragment)
                if there not in every[target].ids and there not in states(target):
                    dead.append((file.name, url))
    assert not dead


def test_directives_are_badges(html):
    badges = 0
    for file in pages(html):
        text = file.read_text(encoding="utf-8")
        for block in re.findall(r"<pre\b[^>]*>(.*?)</pre>", text, re.S):
            assert not re.search(r"^\s*#\s*\|", re.sub("<[^>]*>", "", block), re.M), file
        for badge in re.findall(r'<p class="nbx-badge">(.*?)</p>', text):
            href = re.search(r'href="([^"#]+)', badge)[1]
            source = (file.parent / href).resolve()
            assert source.is_file() and "_modules" in source.parts
            module = ".".join(source.with_suffix("").parts).split("_modules.")[1]
            assert module in re.sub("<[^>]*>", "", badge)
            badges += 1
    assert badges


def test_source_pages_lead_back(small):
    source = (small / "_modules" / "nbxtensor" / "ops" / "double.html").read_text()
    assert 'href="../../../notebooks/ops/double.html"' in source
    assert 'href="../../../book/api.html#nbxtensor.ops.double.double_kernel"' in source


def test_kernels_and_functions_are_documented(small):
    page = Page(small / "book" / "api.html")
    for name in ("double", "double_kernel"):
        assert f"nbxtensor.ops.double.{name}" in page.ids
        assert f"../_modules/nbxtensor/ops/double.html#{name}" in page.links
    text = (small / "book" / "api.html").read_text()
    assert "numbers in place" in text
    assert "Written elsewhere" not in text
    assert text.count('href="../notebooks/ops/double.html"><span class="doc">') == 2


def test_status_shows_machines_and_versions(small):
    text = re.sub("<[^>]*>", " ", (small / "book" / "index.html").read_text())
    words = " ".join(text.split())
    assert "file benchmarks/some.json gpu Some GPU date 2026-01-31 rows 2" in words
    pin = re.search(r"^triton==(.*)$", (ROOT / "requirements.txt").read_text(), re.M)[1]
    lowest = re.search(r'"triton(>=[\d.]+)', (ROOT / "pyproject.toml").read_text())[1]
    assert f"triton {pin} {lowest.replace('>', '&gt;')}" in words


def test_images_say_what_they_show(html):
    silent = [
        (file.name, source)
        for file, page in pages(html).items()
        for source, alt in page.images
        if not alt.strip() or re.search(r"\.(svg|png|jpe?g)$|^<", alt)
    ]
    assert not silent


def test_the_text_form_of_a_figure_describes_it(small):
    images = Page(small / "notebooks" / "ops" / "double.html").images
    assert [alt for _, alt in images][-2:] == ["A square.", "A circle."]


def test_every_module_is_on_the_api_page():
    from nbx_book import default_export

    api = (ROOT / "book" / "api.md").read_text()
    listed = set(re.findall(r"automodule:: (\S+)", api))
    notebooks = ROOT.glob("notebooks/**/[!.]*.ipynb")
    assert {default_export(path) for path in notebooks} - {None} <= listed


def test_every_notebook_is_in_the_table_of_contents():
    listed = set(re.findall(r"file: (notebooks/\S+)", (ROOT / "_toc.yml").read_text()))
    here = {
        path.relative_to(ROOT).with_suffix("").as_posix()
        for path in ROOT.glob("notebooks/**/[!.]*.ipynb")
    }
    assert here == listed


# ------------------------------------------------------------ the repository


def test_no_repository_is_invented(html):
    if html == BUILT and os.environ.get("NBX_REPOSITORY_URL"):
        pytest.skip("this book was given an address")
    for file, page in pages(html).items():
        assert not [u for u in page.links if any(h in u for h in HOSTED)], file
        text = file.read_text()
        assert "source-buttons" not in text and "launch-buttons" not in text, file
        assert "NBX_REPOSITORY" not in text, file


def test_the_given_repository_is_linked(broken):
    _, _, html = broken
    links = Page(html / "notebooks" / "ops" / "double.html").links
    path = "notebooks/ops/double.ipynb"
    assert f"{URL}/edit/trunk/{path}" in links
    assert any(link.startswith(f"{URL}/issues/new?") for link in links)
    short = URL.removeprefix("https://github.com/")
    host = "https://colab.research.google.com/github"
    assert f"{host}/{short}/blob/trunk/{path}" in links
    assert any(link.startswith(f"https://mybinder.org/v2/gh/{short}/trunk") for link in links)
    text = re.sub("<[^>]*>", "", (html / "book" / "index.html").read_text())
    assert f"pip install git+{URL}@trunk" in text


# ------------------------------------------------------------- the extension


@pytest.mark.parametrize(
    "source, directives, code",
    [
        ("#| export\nx = 1", {"export": ""}, "x = 1"),
        ("#|export ops.a\n\nx = 1", {"export": "ops.a"}, "x = 1"),
        ("# | hide\n#| exporti\nx", {"hide": "", "exporti": ""}, "x"),
        ("\n#| default_exp ops.a\n", {"default_exp": "ops.a"}, ""),
        ("x = 1\n#| export", {}, "x = 1\n#| export"),
        ("# a comment | with a bar", {}, "# a comment | with a bar"),
    ],
)
def test_split_directives(source, directives, code):
    from nbx_book import split_directives

    assert split_directives(source) == (directives, code)


def test_module_names():
    from nbx_book import module_file, module_name, source_page

    assert module_name("ops.mish") == "nbxtensor.ops.mish"
    assert module_name("__init__") == "nbxtensor"
    assert source_page("nbxtensor") == "_modules/nbxtensor"
    assert module_file(ROOT / "book" / "_ext", "nbx_book") == Path(ROOT / "book/_ext/nbx_book.py")
    assert module_file(ROOT, "nbxtensor.no_such_module") is None


@pytest.mark.parametrize(
    "line, link",
    [
        ("Page: elementwise/mish", "Page: :doc:`/notebooks/elementwise/mish`"),
        ("  Page: `start`.", "  Page: :doc:`/notebooks/start`"),
        ("Page: notebooks/start.ipynb", "Page: :doc:`/notebooks/start`"),
        ("Page: one of many", "Page: one of many"),
        ("Tested in notebooks/ops/a.ipynb.", "Tested in :doc:`/notebooks/ops/a`."),
        ("See book/notebooks/a.ipynb", "See book/notebooks/a.ipynb"),
    ],
)
def test_page_lines_become_links(line, link):
    from nbx_book import link_pages

    lines = [line]
    link_pages(None, "function", "f", None, None, lines)
    assert lines == [link]
