"""The layout explorer, in a browser, from a file. What it says is counted here anew."""

import importlib.util
import itertools
import json
import os
import re
import shutil
import sys
from functools import reduce
from operator import xor

import nbformat.v4 as v4
import pytest

from conftest import ROOT, Tree
from tools.notebooks import KERNEL

if importlib.util.find_spec("jupyter_book") is None:
    pytest.skip("the book's tools are not installed here", allow_module_level=True)

MIME = "application/vnd.nbxtensor.layout+json"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

# Bases and shape of each; the names are not in alphabetical order.
LAYOUTS = {
    "fragment": (
        {
            "register": [[0, 1], [8, 0]],
            "lane": [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
            "warp": [],
        },
        {"row": 16, "col": 8},
    ),
    "broadcast": (
        {
            "register": [[0, 1], [0, 2]],
            "lane": [[1, 0], [2, 0], [0, 0], [0, 0], [4, 0]],
            "warp": [[0, 0], [8, 0]],
        },
        {"row": 16, "col": 4},
    ),
    "swizzled": (
        {"offset": [[0, 1], [0, 2], [0, 4], [1, 1], [2, 2], [4, 4]], "block": []},
        {"row": 8, "col": 8},
    ),
    "with holes": (
        {"register": [[0, 2]], "lane": [[1, 0], [1, 2]]},
        {"row": 2, "col": 4},
    ),
    "volume": (
        {"register": [[0, 0, 1]], "lane": [[0, 1, 0], [1, 0, 0]], "warp": [[2, 0, 1]]},
        {"z": 4, "y": 2, "x": 2},
    ),
    "tensor memory": (
        {"row": [[1, 0], [2, 0], [4, 0]], "column": [[0, 1], [0, 2]]},
        {"dim0": 8, "dim1": 4},
    ),
    "line": ({"register": [[1]], "lane": [[2], [4], [8]], "warp": [[16], [32]]}, {"dim0": 64}),
    "four warps": (
        {
            "register": [[0, 1], [0, 2], [0, 4], [0, 8], [32, 0]],
            "lane": [[1, 0], [2, 0], [0, 16], [0, 32], [4, 0]],
            "warp": [[8, 0], [16, 0]],
        },
        {"row": 64, "col": 64},
    ),
}
every_layout = pytest.mark.parametrize("name", list(LAYOUTS))
# Names are escaped wherever they are written.
LAYOUTS["</script> & <i>"] = LAYOUTS["with holes"]

TOC = """format: jb-book
root: book/index
chapters:
  - file: notebooks/layouts
  - file: book/explorer
"""


# -------------------------------------------------------- layouts, by counting


class Layout:
    """A layout of the table above, one position after the other."""

    def __init__(self, name):
        self.bases, self.shape = LAYOUTS[name]
        self.outputs = list(itertools.product(*map(range, self.shape.values())))

    def positions(self):
        sizes = {name: range(2 ** len(bases)) for name, bases in self.bases.items()}
        return [dict(zip(sizes, values)) for values in itertools.product(*sizes.values())]

    def element(self, position):
        chosen = [
            basis
            for name, bases in self.bases.items()
            for bit, basis in enumerate(bases)
            if position[name] >> bit & 1
        ]
        return tuple(reduce(xor, column, 0) for column in zip([0] * len(self.shape), *chosen))

    def words(self, position):
        """What the explorer calls a position: other inputs, lane, register."""
        order = ["warp", "block", "lane", "register", "offset", "row", "column"]
        return " ".join(f"{n} {position[n]}" for n in order if self.bases.get(n))

    def owners(self):
        found = {coordinates: [] for coordinates in self.outputs}
        for position in self.positions():
            found[self.element(position)].append(self.words(position))
        return found


def written(coordinates):
    return f"({', '.join(map(str, coordinates))})"


def positions_said(words):
    """The positions that a sentence names: "lane 1 or 5, register 0", or one by one."""
    if words == "no owner":
        return set()
    if " or " not in words:
        return set(words.split("; "))
    parts = [part.split(" ", 1) for part in words.split(", ")]
    choices = [[f"{name} {value}" for value in values.split(" or ")] for name, values in parts]
    return {" ".join(choice) for choice in itertools.product(*choices)}


def owners_said(readout):
    """The element and the owners that a sentence names."""
    element, count, words = re.fullmatch(
        r"element (\(.*?\)): (?:(\d+) owners, )?(.*)", readout
    ).groups()
    owners = positions_said(words)
    assert int(count or len(owners)) == len(owners)
    return element, owners


# ------------------------------------------------------------- a book of one


def output(name):
    bases, shape = LAYOUTS[name]
    layout = {"name": name, "bases": list(bases.items()), "shape": list(shape.items())}
    return v4.new_output("execute_result", {"text/plain": "shown", MIME: layout}, execution_count=1)


def write_notebook(path, names=LAYOUTS):
    cells = [v4.new_markdown_cell("# Layouts", id="title")]
    for count, name in enumerate(names):
        cells.append(v4.new_markdown_cell(f"## Section {count}", id=f"heading-{count}"))
        outputs = [v4.new_output("stream", text="printed\n"), output(name)]
        cells.append(
            v4.new_code_cell("shown", id=f"cell-{count}", execution_count=1, outputs=outputs)
        )
    # Two layouts in a cell, and between them something else.
    other = v4.new_output("display_data", {"text/plain": "other"})
    cells[-1]["outputs"] += [other, output("line")]
    path.write_text(v4.writes(v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL})))


def build(tree, *options):
    code = "from jupyter_book.cli.main import main; main()"
    strict = ("-W", "-n", "--keep-going")
    return tree.run(sys.executable, "-c", code, "build", ".", *strict, *options)


def layouts_on(html):
    text = (html / "book" / "explorer.html").read_text(encoding="utf-8")
    data = re.search(r'<script type="application/json">(.*?)</script>', text, re.S)[1]
    return json.loads(data)


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    tree = Tree(tmp_path_factory.mktemp("book"))
    shutil.copy(ROOT / "_config.yml", tree.root)
    ignored = shutil.ignore_patterns("__pycache__", "mathjax")
    for name in ("_ext", "_static"):
        shutil.copytree(ROOT / "book" / name, tree.root / "book" / name, ignore=ignored)
    for name in ("explorer.md", "references.bib"):
        shutil.copy(ROOT / "book" / name, tree.root / "book")
    (tree.root / "_toc.yml").write_text(TOC)
    (tree.root / "book" / "index.md").write_text("# Book\n\n```{bibliography}\n```\n")
    write_notebook(tree.root / "notebooks" / "layouts.ipynb")
    status, said = build(tree)
    assert status == 0, said
    return tree


@pytest.fixture(scope="module")
def html(book):
    return book.root / "_build" / "html"


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)}")
    with sync_api.sync_playwright() as playwright:
        # A browser's sandbox does not start for root.
        sandbox = os.geteuid() != 0
        started = playwright.chromium.launch(executable_path=program, chromium_sandbox=sandbox)
        yield started
        started.close()


class Explorer:
    """The explorer in a browser's tab."""

    def __init__(self, page, html):
        self.page, self.html = page, html
        self.url = f"file://{html / 'book' / 'explorer.html'}"
        self.tile = page.get_by_role("grid", name="The tile")
        self.hardware = page.get_by_role("grid", name="The hardware")
        self.map = page.get_by_role("table", name="The map")

    def open(self, name=None, more=""):
        key = f"#layout=layouts/cell-{list(LAYOUTS).index(name)}" if name else ""
        self.page.goto("about:blank")
        self.page.goto(self.url + key + more)
        return self

    def type(self, bases, shape):
        self.page.locator("summary").click()
        self.page.get_by_label("Bases").fill(bases)
        self.page.get_by_label("Shape").fill(shape)

    @property
    def readout(self):
        return self.page.get_by_role("status").inner_text()

    def state(self):
        """What is shown, where it does not depend on the window."""
        return self.page.evaluate(
            """() => [".readout", ".equation", ".tile .lit", ".hardware .lit", ".hardware .main",
              ".map .on", "[aria-pressed=true]", "[aria-pressed=mixed]"]
              .map((selector) => [...document.querySelectorAll("#nbx-explorer " + selector)]
                .map((found) => found.getAttribute("aria-label") ?? found.textContent))"""
        )

    def lit(self, grid):
        lit = grid.locator("td.lit")
        return [cell.get_attribute("aria-label") for cell in lit.all()]

    def remembered(self, *words):
        """The address, once it holds some words."""
        holds = "words => words.every((word) => location.hash.includes(word))"
        self.page.wait_for_function(holds, arg=list(words))
        return self.page.url


@pytest.fixture(scope="module")
def tab(browser):
    """A tab without a network, and what it complained of."""
    context = browser.new_context(offline=True)
    page, faults = context.new_page(), []
    page.set_default_timeout(5000)
    page.on("console", lambda m: m.type in ("error", "warning") and faults.append(m.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    own = ("file:", "data:", "about:")
    page.on("request", lambda r: r.url.startswith(own) or faults.append(r.url))
    # A page that is left while it loads breaks off its own requests.
    page.on("requestfailed", lambda r: "ABORTED" in r.failure or faults.append(r.url))
    yield page, faults
    context.close()


@pytest.fixture
def explorer(tab, html):
    """An explorer that must not complain, and must not ask for anything."""
    page, faults = tab
    faults.clear()
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": 1280, "height": 900})
    yield Explorer(page, html)
    assert not faults


# ------------------------------------------------------------------ the build


def test_layouts_are_collected_with_their_place(html):
    found = layouts_on(html)
    assert [layout["name"] for layout in found] == [*LAYOUTS, "line"]
    page = (html / "notebooks" / "layouts.html").read_text(encoding="utf-8")
    for count, layout in enumerate(found):
        bases, shape = LAYOUTS[layout["name"]]
        assert list(layout["bases"].items()) == list(bases.items())
        assert list(layout["shape"].items()) == list(shape.items())
        section = min(count, len(LAYOUTS) - 1)
        assert (layout["page"], layout["heading"]) == ("Layouts", f"Section {section}")
        anchor = f"cell-cell-{section}" + ("-2" if count > section else "")
        assert layout["href"] == f"../notebooks/layouts.html#{anchor}"
        assert page.count(f'id="{anchor}"') == 1


def test_a_link_stands_under_its_output(html):
    page = (html / "notebooks" / "layouts.html").read_text(encoding="utf-8")
    anchor, link = 'id="(cell-cell[^"]*)"', 'explorer.html#layout=([^"]*)"'
    output = 'class="output text_plain.*?<pre>(?:<[^>]*>)*([a-z]+)'
    found = re.findall(f"{anchor}|{output}|{link}", page, re.S)
    said = [next(filter(None, groups)) for groups in found]
    last = len(LAYOUTS) - 1
    expected = []
    for count in range(last + 1):
        expected += [f"cell-cell-{count}", "shown", f"layouts/cell-{count}"]
    assert said == [*expected, "other", f"cell-cell-{last}-2", "shown", f"layouts/cell-{last}/2"]
    assert "vnd.nbxtensor" not in page


def test_only_the_explorer_loads_its_script(html):
    for name, count in (("book/explorer", 1), ("book/index", 0), ("notebooks/layouts", 0)):
        text = (html / f"{name}.html").read_text(encoding="utf-8")
        assert len(re.findall(r'<script[^>]*src="[^"]*explorer\.js', text)) == count, name
        assert len(re.findall(r'<link[^>]*href="[^"]*explorer\.css', text)) == count, name


@pytest.fixture
def copy(book, tmp_path):
    """The book again, to change."""
    tree = object.__new__(Tree)
    tree.root = tmp_path / "book"
    shutil.copytree(book.root, tree.root)
    return tree


def test_a_changed_notebook_changes_the_explorer(copy):
    write_notebook(copy.root / "notebooks" / "layouts.ipynb", ["line", "volume"])
    status, said = build(copy)
    assert status == 0, said
    found = layouts_on(copy.root / "_build" / "html")
    assert [layout["name"] for layout in found] == ["line", "volume", "line"]


def test_no_link_leads_to_a_page_that_is_not_there(copy):
    (copy.root / "book" / "explorer.md").unlink()
    (copy.root / "_toc.yml").write_text(TOC.replace("  - file: book/explorer\n", ""))
    status, said = build(copy, "--all")
    assert status == 0, said
    page = copy.root / "_build" / "html" / "notebooks" / "layouts.html"
    assert "nbx-explore" not in page.read_text(encoding="utf-8")


def test_a_mapping_is_refused(copy):
    path = copy.root / "notebooks" / "layouts.ipynb"
    notebook = json.loads(path.read_text())
    layout = notebook["cells"][2]["outputs"][1]["data"][MIME]
    layout["shape"] = dict(layout["shape"])
    path.write_text(json.dumps(notebook))
    status, said = build(copy)
    assert status != 0
    assert "cell cell-0: a notebook file sorts the keys of a mapping" in said


# --------------------------------------------------------- what it says is true


@every_layout
def test_pointing_at_elements(explorer, name):
    layout = Layout(name)
    owners = layout.owners()
    explorer.open(name)
    cells = explorer.tile.get_by_role("gridcell").all()
    assert len(cells) == len(owners)
    for i in range(0, len(cells), max(1, len(cells) // 10)):
        coordinates = layout.outputs[i]
        assert cells[i].get_attribute("aria-label") == f"element {written(coordinates)}"
        cells[i].hover()
        said = explorer.readout
        assert owners_said(said) == (written(coordinates), set(owners[coordinates])), said
        assert explorer.lit(explorer.tile) == [f"element {written(coordinates)}"]
        shown = set(explorer.lit(explorer.hardware))
        assert shown <= set(owners[coordinates])
        assert bool(shown) or not owners[coordinates] or "warp" in said


@every_layout
def test_positions_hold_what_the_bases_say(explorer, name):
    layout = Layout(name)
    explorer.open(name)
    held = {layout.words(p): layout.element(p) for p in layout.positions()}
    cells = explorer.hardware.get_by_role("gridcell").all()
    for cell in cells[:: max(1, len(cells) // 10)]:
        cell.click()
        words = cell.get_attribute("aria-label")
        element = held[words]
        assert explorer.readout.startswith(f"{words}: element {written(element)}")
        owners = {w for w, e in held.items() if e == element}
        _, _, shared = explorer.readout.partition(", one of ")
        assert positions_said(re.sub(r"^\d+ owners, ", "", shared) or words) == owners
        # The equation, added up, and the sums beside the matrix.
        left, right = explorer.page.locator(".equation").inner_text().split(" = ")
        terms = [[int(c) for c in re.findall(r"\d+", term)] for term in left.split(" ⊕ ")]
        total = [0] * len(element)
        for term in terms if left != "no bit set" else []:
            total = [a ^ b for a, b in zip(total, term, strict=True)]
        assert written(total) == right == written(element)
        sums = [int(s) for s in explorer.page.locator(".map tbody .sum").all_inner_texts()]
        bits = [
            value >> bit & 1
            for value, size in zip(element, layout.shape.values())
            for bit in range(size.bit_length() - 1)
        ]
        assert sums == [*element, *bits]


@pytest.mark.parametrize("name", ["fragment", "broadcast", "with holes", "four warps"])
def test_a_lane_and_its_elements(explorer, name):
    layout = Layout(name)
    explorer.open(name)
    for lane in (0, 2**len(layout.bases["lane"]) - 1):
        head = explorer.hardware.get_by_role("rowheader").nth(lane)
        words = head.get_attribute("aria-label")
        head.click()
        warp = int(re.search(r"warp (\d+)", words)[1]) if "warp" in words else 0
        held = [
            layout.element(p)
            for p in layout.positions()
            if p["lane"] == lane and p.get("warp", 0) == warp
        ]
        assert explorer.readout.startswith(f"{words}: {len(set(held))} element")
        assert set(explorer.lit(explorer.tile)) == {f"element {written(e)}" for e in held}
        assert len(explorer.lit(explorer.hardware)) == len(held)
        mixed = explorer.page.locator("[aria-pressed=mixed]")
        assert mixed.count() == len(layout.bases["register"])


@every_layout
def test_toggles_add_bases(explorer, name):
    layout = Layout(name)
    explorer.open(name)
    inputs = {n: b for n, b in layout.bases.items() if b}
    position = dict.fromkeys(layout.bases, 0)
    while explorer.map.get_by_role("button", pressed=True).count():
        explorer.map.get_by_role("button", pressed=True).first.click()
    zero = written([0] * len(layout.shape))
    assert explorer.page.locator(".equation").inner_text() == f"no bit set = {zero}"
    for n, bases in inputs.items():
        for bit, basis in enumerate(bases):
            position[n] |= 1 << bit
            button = explorer.map.get_by_role(
                "button", name=f"{n} bit {bit}, basis {written(basis)}", exact=True
            )
            button.click()
            assert button.get_attribute("aria-pressed") == "true"
            start = f"{layout.words(position)}: element {written(layout.element(position))}"
            assert explorer.readout.startswith(start)
            assert layout.words(position) in explorer.lit(explorer.hardware)


def test_the_matrix(explorer):
    bases, _ = LAYOUTS["broadcast"]
    explorer.open("broadcast")
    rows = explorer.page.locator(".map .bit")
    columns = list(itertools.chain(*bases.values()))
    expected = [[c[0] >> bit & 1 for c in columns] for bit in range(4)]
    expected += [[c[1] >> bit & 1 for c in columns] for bit in range(2)]
    shown = [[int(t) for t in row.locator("[data-c]").all_inner_texts()] for row in rows.all()]
    assert shown == expected
    zero = explorer.page.locator(".map .vector").first.locator(".zero")
    assert [td.get_attribute("data-c") for td in zero.all()] == ["4", "5", "7"]


@pytest.mark.parametrize(
    "name, said",
    [
        (
            "fragment",
            "7 input bits, 7 output bits, rank 7. A permutation: each element has one owner.",
        ),
        (
            "broadcast",
            "9 input bits, 6 output bits, rank 6. Each element held has 8 owners: toggling "
            "lane bit 2, or lane bit 3, or warp bit 0 leads to the same element.",
        ),
        (
            "with holes",
            "3 input bits, 3 output bits, rank 2. Each element held has 2 owners: toggling "
            "register bit 0 with lane bit 0 with lane bit 1 leads to the same element. "
            "4 of 8 elements have no owner.",
        ),
    ],
)
def test_rank_kernel_and_image_in_words(explorer, name, said):
    explorer.open(name)
    assert explorer.page.locator(".facts").inner_text() == said


def test_replicas_and_holes_are_marked(explorer):
    layout = Layout("broadcast")
    explorer.open("broadcast")
    marked = explorer.hardware.locator("td.replica")
    lanes = {int(re.search(r"lane (\d+)", m.get_attribute("aria-label"))[1]) for m in marked.all()}
    assert lanes == {lane for lane in range(32) if lane & 0b01100}
    explorer.open("with holes")
    layout = Layout("with holes")
    holes = {f"element {written(e)}" for e, owners in layout.owners().items() if not owners}
    none = explorer.tile.locator("td.none")
    assert {td.get_attribute("aria-label") for td in none.all()} == holes
    none.first.click()
    assert explorer.readout.endswith(": no owner")
    assert "No sum of bases" in explorer.page.locator(".equation").inner_text()
    assert not explorer.lit(explorer.hardware)


def test_warps_are_turned_like_pages(explorer):
    layout = Layout("four warps")
    explorer.open("four warps")
    warps = explorer.page.get_by_role("combobox", name="warp", exact=True)
    assert warps.locator("option").all_inner_texts() == ["0", "1", "2", "3"]
    for warp in (1, 3):
        warps.select_option(str(warp))
        vivid = explorer.tile.locator("td:not(.away)")
        held = {written(layout.element(p)) for p in layout.positions() if p["warp"] == warp}
        labels = vivid.evaluate_all("cells => cells.map((td) => td.getAttribute('aria-label'))")
        assert {text.removeprefix("element ") for text in labels} == held
        assert f"warp {warp}" in explorer.readout
    # An element of another warp turns the page.
    explorer.tile.get_by_role("gridcell", name="element (8, 0)", exact=True).click()
    assert warps.input_value() == "1"


# -------------------------------------------------------------- from the pages


def test_from_a_page_and_back(explorer, html):
    page = explorer.page
    page.goto(f"file://{html / 'notebooks' / 'layouts.html'}")
    page.get_by_role("link", name="open broadcast in the explorer").click()
    layout = page.get_by_label("Layout", exact=True)
    assert layout.locator("option:checked").inner_text() == "broadcast"
    page.get_by_role("link", name="Layouts, Section 1").click()
    page.wait_for_url("**/notebooks/layouts.html#cell-cell-1")


def test_any_layout_can_be_picked(explorer):
    explorer.open()
    select = explorer.page.get_by_label("Layout", exact=True)
    assert select.locator("optgroup").get_attribute("label") == "Layouts"
    assert select.locator("option").all_inner_texts() == [*LAYOUTS, "line", "your own"]
    # lane 9 register 1 is where the page starts, and stays while layouts change.
    assert explorer.readout == "lane 9 register 1: element (2, 3)"
    select.select_option(label="four warps")
    assert explorer.readout == "warp 0 lane 9 register 1: element (1, 33)"


# ---------------------------------------------------------------- the keyboard


def test_arrows_walk_the_grids(explorer):
    page = explorer.open("fragment").page
    page.get_by_label("Layout", exact=True).focus()
    focused = "document.activeElement.getAttribute('aria-label')"
    for _ in range(3):
        page.keyboard.press("Tab")
    assert page.evaluate(focused) == "element (2, 3)"

    def press(keys, name, readout):
        for key in keys.split():
            page.keyboard.press(key)
        assert page.evaluate(focused) == name
        assert explorer.readout.startswith(readout)
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"

    press("ArrowRight ArrowRight", "element (2, 5)", "element (2, 5): lane 10 register 1")
    press("ArrowDown", "element (3, 5)", "element (3, 5): lane 14 register 1")
    press("Home", "element (3, 0)", "element (3, 0): lane 12 register 0")
    press("ArrowLeft", "element (3, 0)", "element (3, 0): lane 12")
    press("Control+End", "element (15, 7)", "element (15, 7): lane 31 register 3")
    press("ArrowDown ArrowRight", "element (15, 7)", "element (15, 7)")
    press("Control+Home ArrowUp", "element (0, 0)", "element (0, 0): lane 0")
    press("End", "element (0, 7)", "element (0, 7): lane 3 register 1")

    page.keyboard.press("Tab")
    press("ArrowDown", "lane 4 register 1", "lane 4 register 1: element (1, 1)")
    press("Home", "lane 4", "lane 4: 4 elements, (1, 0); (1, 1); (9, 0); (9, 1)")
    press("ArrowDown", "lane 5", "lane 5: 4 elements, (1, 2)")
    press("ArrowRight", "lane 5 register 0", "lane 5 register 0: element (1, 2)")

    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "register bit 0, basis (0, 1)"
    page.keyboard.press("Space")
    assert explorer.readout == "lane 5 register 1: element (1, 3)"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert explorer.readout == "lane 5 register 3: element (9, 3)"


def test_focus_survives_a_turned_page(explorer):
    page = explorer.open("four warps").page
    explorer.tile.get_by_role("gridcell", name="element (7, 3)", exact=True).click()
    page.keyboard.press("ArrowDown")
    focused = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert focused == "element (8, 3)"
    assert explorer.readout.startswith("element (8, 3): warp 1")


@pytest.mark.parametrize("name", ["fragment", "swizzled", "tensor memory"])
def test_one_stop_a_grid(explorer, name):
    explorer.open(name)
    for grid in (explorer.tile, explorer.hardware):
        assert grid.locator("[tabindex='0']").count() == 1
        grid.get_by_role("gridcell").last.click()
        assert grid.locator("[tabindex='0']").count() == 1


def test_everything_has_a_name(explorer):
    page = explorer.open("broadcast").page
    page.locator("summary").click()
    for role, name in (
        ("combobox", "Layout"),
        ("combobox", "warp"),
        ("textbox", "Bases, one for each bit of an input"),
        ("textbox", "Shape, a size for each coordinate"),
        ("grid", "The tile: row 16 × col 4"),
        ("grid", "The hardware: lane × register"),
        ("table", "The map: bits in, bits out"),
        ("gridcell", "element (2, 3)"),
        ("gridcell", "warp 0 lane 2 register 3"),
        ("rowheader", "warp 0 lane 2"),
        ("button", "lane bit 2, basis (0, 0)"),
    ):
        assert page.get_by_role(role, name=name, exact=True).count() == 1, (role, name)
    nameless = page.locator("#nbx-explorer [role=gridcell]:not([aria-label])")
    assert nameless.count() == 0


# ------------------------------------------------------------------ own bases


def test_own_bases(explorer):
    explorer.open("fragment").type("{'register': [(0, 1),], 'lane': [(1, 1), (2, 0)]}", "4 x 2")
    assert explorer.page.get_by_label("Layout", exact=True).input_value() == ""
    cells = explorer.tile.get_by_role("gridcell")
    assert cells.count() == 8
    cells.nth(3).hover()
    assert explorer.readout == "element (1, 1): lane 1 register 0"
    explorer.page.get_by_label("Bases").fill('{"register": [1, 2], "lane": [4]}')
    explorer.page.get_by_label("Shape").fill('{"i": 8}')
    cells.nth(6).hover()
    assert explorer.readout == "element (6): lane 1 register 2"


BAD = [
    ('{"lane": [[1, 0]', "4, 4", "Bases", "This cannot be read"),
    ("", "4, 4", "Bases", "This cannot be read"),
    ("[[1, 0]]", "4, 4", "Bases", "Bases are listed by input"),
    ("{}", "4, 4", "Bases", "Bases are listed by input"),
    ('{"lane": 3}', "4, 4", "Bases", "lane needs a list, a basis for each bit."),
    ('{"lane": [[1, 0], [1]]}', "4, 4", "Bases", "bit 1 is (1): 1 coordinate for a shape of 2."),
    ('{"lane": [[4, 0]]}', "4, 4", "Bases", "lane bit 0 is (4, 0); dim0 goes from 0 to 3."),
    ('{"lane": [[0, -1]]}', "4, 4", "Bases", "dim1 goes from 0 to 3."),
    ('{"lane": [[0, 0.5]]}', "4, 4", "Bases", "dim1 goes from 0 to 3."),
    ('{"lane": [[0, "1"]]}', "4, 4", "Bases", "dim1 goes from 0 to 3."),
    (json.dumps({"lane": [[0, 1]] * 15}), "4, 4", "Bases", "positions of at most 14 bits are"),
    ('{"lane": []}', "6, 4", "Shape", "dim0 is 6; a size is a power of two."),
    ('{"lane": []}', '{"m": 0}', "Shape", "m is 0; a size is a power of two."),
    ('{"lane": []}', '{"m": null}', "Shape", "m is null; a size is a power of two."),
    ('{"lane": []}', "256, 128", "Shape", "The shape has 32768 elements; at most 16384"),
    ('{"lane": []}', "", "Shape", "This cannot be read"),
    ('{"lane": []}', "[]", "Shape", "A size for each dimension"),
    ('{"lane": []}', "row: 4", "Shape", "This cannot be read"),
]


@pytest.mark.parametrize("bases, shape, field, message", BAD)
def test_bad_bases_are_refused_in_words(explorer, bases, shape, field, message):
    explorer.open("fragment").type(bases, shape)
    page = explorer.page
    wrong = page.get_by_label(field)
    assert wrong.get_attribute("aria-invalid") == "true"
    said = page.locator(f"#{wrong.get_attribute('aria-describedby')}")
    assert message in said.inner_text()
    assert page.locator(".problem:visible").count() == 1
    # Nothing is lost: the text, what was drawn, and the text once more.
    assert page.get_by_label("Bases").input_value() == bases
    assert explorer.tile.get_by_role("gridcell").count() > 0
    select = page.get_by_label("Layout", exact=True)
    select.select_option(label="volume")
    assert page.locator(".problem:visible").count() == 0
    select.select_option(label="your own")
    assert page.get_by_label("Bases").input_value() == bases
    assert page.get_by_label("Shape").input_value() == shape
    assert message in said.inner_text()
    # It can be corrected where it stands.
    page.get_by_label("Bases").fill('{"lane": [[1, 0]]}')
    page.get_by_label("Shape").fill("2, 2")
    assert page.locator(".problem:visible").count() == 0
    assert explorer.tile.get_by_role("gridcell").count() == 4


def test_the_largest(explorer):
    bits = [[0, 1 << b] for b in range(7)] + [[1 << b, 0] for b in range(7)]
    bases = {"register": bits[:7], "lane": bits[7:12], "warp": bits[12:]}
    explorer.open().type(json.dumps(bases), "128, 128")
    assert explorer.page.locator(".problem:visible").count() == 0
    assert explorer.tile.get_by_role("gridcell").count() == 2**14
    explorer.page.get_by_role("button", name="warp bit 1").click()
    assert explorer.readout.startswith("warp 2")


# ----------------------------------------------------------------- the address


@pytest.mark.parametrize("name", ["broadcast", "with holes", "volume"])
@pytest.mark.parametrize(
    "role, kind", [("gridcell", "slot="), ("gridcell", "element="), ("rowheader", "row=")]
)
def test_the_address_leads_back(explorer, name, role, kind):
    page = explorer.open(name).page
    start = explorer.remembered("slot=")
    grid = explorer.tile if kind == "element=" else explorer.hardware
    cells = grid.get_by_role(role)
    cells.nth(cells.count() - 2).click()
    page.mouse.move(0, 0)
    before = explorer.state()
    page.wait_for_function("start => location.href !== start", arg=start)
    url = explorer.remembered(kind)
    page.goto("about:blank")
    page.goto(url)
    assert explorer.state() == before


def test_the_address_keeps_own_bases(explorer):
    page = explorer.open().page
    explorer.type("{'lane': [(0, 1), (1, 1)]}", "2, 2")
    explorer.tile.get_by_role("gridcell").last.click()
    page.mouse.move(0, 0)
    before = explorer.state()
    url = explorer.remembered("bases=", "element=1,1")
    page.goto("about:blank")
    page.goto(url)
    assert explorer.state() == before
    page.get_by_label("Bases").fill("{'lane': [(0, 1), (1, 1)")
    url = explorer.remembered("(1,1)&")
    page.goto("about:blank")
    page.goto(url)
    assert page.get_by_label("Bases").input_value() == "{'lane':[(0,1),(1,1)"
    assert page.locator("#nbx-bases-problem").is_visible()


@pytest.mark.parametrize(
    "more", ["&slot=1", "&slot=99,0,0", "&slot=a,b,c", "&element=16,0", "&row=", "&slot=1,-1,0"]
)
def test_a_wrong_selection_is_left_out(explorer, more):
    explorer.open("fragment", more)
    assert explorer.readout == "lane 9 register 1: element (2, 3)"


def test_a_layout_that_is_gone(explorer):
    explorer.open(more="#layout=gone/away")
    assert "no layout gone/away" in explorer.page.locator("#nbx-layout-problem").inner_text()
    assert explorer.tile.get_by_role("gridcell").count() == 128


def test_a_new_address_on_the_open_page(explorer):
    page = explorer.open("fragment").page
    page.evaluate("location.hash = '#layout=layouts/cell-4&slot=1,2,1'")
    page.wait_for_function("document.querySelector('.readout').textContent.startsWith('warp 1')")
    assert explorer.readout == "warp 1 lane 2 register 1: element (3, 0, 0)"
    page.evaluate("location.hash = '#what-you-see'")
    page.wait_for_timeout(300)
    assert explorer.readout == "warp 1 lane 2 register 1: element (3, 0, 0)"


# ---------------------------------------------------------------------- looks

CONTRAST = """(selectors) => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const luminance = (colour, under) => {
    canvas.fillStyle = under;
    canvas.fillRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((v) => v / 255)
      .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const page = getComputedStyle(document.body).backgroundColor;
  return selectors.flatMap((selector) => [...document.querySelectorAll(selector)].map((found) => {
    const style = getComputedStyle(found);
    const back = style.backgroundColor;
    const [low, high] = [luminance(style.color, back), luminance(back, page)].sort((a, b) => a - b);
    return [selector, (high + 0.05) / (low + 0.05)];
  }));
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_light_and_dark(explorer, theme):
    explorer.page.emulate_media(color_scheme=theme)
    explorer.open("broadcast")
    assert explorer.page.locator("html").get_attribute("data-theme") == theme
    explorer.page.mouse.move(0, 0)
    background = explorer.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (theme == "light")
    shown = [".tile [data-i]", ".hardware [data-i]", ".map [data-c]", ".map button", ".readout"]
    selectors = [f"#nbx-explorer {selector}" for selector in shown]
    found = explorer.page.evaluate(CONTRAST, selectors)
    assert {selector for selector, _ in found} == set(selectors)
    least = min(found, key=lambda pair: pair[1])
    assert least[1] >= 4.5, least


@pytest.mark.parametrize("name", ["broadcast", "line", "four warps"])
def test_nothing_is_wider_than_the_window(explorer, name):
    explorer.open(name)
    for width in (320, 390, 768, 1280, 2560):
        explorer.page.set_viewport_size({"width": width, "height": 844})
        fits = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        explorer.page.wait_for_function(fits)
        # The whole tile is in sight, down to a phone.
        tile = "document.querySelector('.tile .scroll')"
        if width >= 390:
            explorer.page.wait_for_function(f"{tile}.scrollWidth <= {tile}.clientWidth")
