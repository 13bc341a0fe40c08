"""Figures of layouts and accesses, read back and counted another way."""

import inspect
import io
import itertools
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from nbxtensor import plots
from nbxtensor.layout import LinearLayout, blocked, wavefronts

from matplotlib import font_manager, get_data_path, rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

LANES = np.arange(32)


@pytest.fixture(autouse=True)
def style():
    with rc_context():
        plots.use_style()
        yield


def random_layout(seed=0, shape=(8, 16), warps=2):
    """A layout with bases drawn at random: some elements may have no owner."""
    random = np.random.default_rng(seed)

    def vector():
        return tuple(int(random.integers(size)) for size in shape)

    bits = {"register": 2, "lane": 5, "warp": warps}
    return LinearLayout({name: [vector() for _ in range(n)] for name, n in bits.items()}, shape)


def cells(axes):
    """{(row, column): (text, colour)} of a grid."""
    found = {}
    for patch in axes.patches:
        if patch.get_fill():
            place = int(patch.get_y()), int(patch.get_x())
            found[place] = "", to_hex(patch.get_facecolor(), keep_alpha=patch.get_alpha() is None)
    for text in axes.texts:
        x, y = text.get_position()
        found[int(y), int(x)] = text.get_text(), found[int(y), int(x)][1]
    return {place: (text, colour.removesuffix("ff")) for place, (text, colour) in found.items()}


def frames(axes):
    return {
        (round(p.get_y()), round(p.get_x()), round(p.get_height()), round(p.get_width()))
        for p in axes.patches
        if not p.get_fill()
    }


def hue(number, bits):
    return plots.HUES[sum((number >> bit & 1) << k for k, bit in enumerate(bits))]


def svg(figure):
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()


ROWS = [
    {
        "dtype": "float32",
        "case": "sliced",
        "shape": [size],
        "percent": {"nbx": 90.0, "torch": 80.0, "compile": percent},
    }
    for size, percent in ((1024, 50.0), (4096, 70.0))
]
EXAMPLES = {
    "owner_grid": lambda: plots.owner_grid(random_layout(), mark={"lane": 3}),
    "hardware_view": lambda: plots.hardware_view(random_layout(), warp=1),
    "bit_matrix": lambda: plots.bit_matrix(random_layout()),
    "slice_view": lambda: plots.slice_view(random_layout(), "dim0"),
    "slice_view beside": lambda: plots.slice_view(random_layout(), "dim1"),
    "sector_view": lambda: plots.sector_view({"x": 8 * LANES}),
    "bank_phases": lambda: plots.bank_phases({"x": 8 * LANES}),
    "butterfly": lambda: plots.butterfly([16, 8, 4, 2, 1]),
    "tile_walk": lambda: plots.tile_walk({"A": ((4, 4), {"0": np.s_[:2, :2]})}),
    "roofline": lambda: plots.roofline({"k": (2e9, 1e9, 1e-3)}, 4e12, {"fp32": 6e13}),
    "offset_grids": lambda: plots.offset_grids({"x": ((3, 5), (5, 1))}),
    "curves": lambda: plots.curves([1, 2], {"line": [3, 4]}),
    "speed_chart": lambda: plots.speed_chart(ROWS),
    "bars": lambda: plots.bars(ROWS[:1]),
}


# ------------------------------------------------------------------- layouts


@pytest.mark.parametrize("case", range(12))
def test_owner_grid_names_every_owner(case):
    layout = random_layout(case, warps=case % 3)
    bits = (case % 5, (case + 2) % 5)
    (axes,) = plots.owner_grid(layout, hue={"lane": bits}, mark={"lane": 3}).axes
    table, drawn, marked = layout.table("warp", "lane", "register"), cells(axes), set()
    assert set(drawn) == set(np.ndindex(8, 16))
    for place, (text, colour) in drawn.items():
        owners = np.argwhere((table == place).all(-1))[:, [2, 1, 0]]
        owners = sorted(owners.tolist())  # register, lane, warp
        names = [f"{lane}·{register}" for register, lane, _ in owners]
        if any(lane == 3 for _, lane, _ in owners):
            marked.add((*place, 1, 1))
        if not owners:
            assert (text, colour) == ("", plots.PALE)
            continue
        assert colour == hue(owners[0][1], bits)
        first, *rest = text.split("\n")
        assert first == names[0]
        if len(names) == 2 and names[0] != names[1]:
            assert rest == [names[1]]
        else:
            assert rest == [f"×{len(names)}"] * (len(names) > 1)
    assert frames(axes) == marked


def test_owner_grid_takes_the_warp_for_its_hue():
    layout = blocked((16, 16), (1, 4), (8, 4), (2, 1), (1, 0))
    figure = plots.owner_grid(layout)
    table = layout.table("warp", "lane", "register")
    drawn = cells(figure.axes[0])
    for warp, lane, register in np.ndindex(table.shape[:3]):
        place = tuple(table[warp, lane, register].tolist())
        assert drawn[place] == (f"{lane}·{register}", plots.HUES[warp])
    assert [text.get_text() for text in figure.legends[0].texts] == ["warp 0", "warp 1"]


def test_owner_grid_of_memory_shows_offsets():
    layout = LinearLayout({"offset": [(0, 1), (0, 2), (1, 1), (2, 2)]}, (4, 4))
    drawn = cells(plots.owner_grid(layout).axes[0])
    for offset, place in enumerate(layout.table().tolist()):
        assert drawn[tuple(place)][0] == str(offset)


@pytest.mark.parametrize("case", range(6))
def test_hardware_view_names_every_element(case):
    layout = random_layout(case)
    warp = case % 4
    figure = plots.hardware_view(layout, warp=warp)
    expected = layout.table("warp", "lane", "register")[warp].reshape(-1, 2).tolist()
    texts, colours = [], {}
    for axes in figure.axes:
        for text, colour in cells(axes).values():
            texts.append(text)
            colours.setdefault(text, set()).add(colour)
    assert texts == [f"{row},{column}" for row, column in expected]
    assert all(len(found) == 1 for found in colours.values())
    assert len(set.union(*colours.values())) == len(colours)  # and no two share one
    rows = [t.get_text() for axes in figure.axes for t in axes.get_yticklabels()]
    assert rows == [str(lane) for lane in range(32)]


@pytest.mark.parametrize("case", range(6))
def test_bit_matrix_is_the_matrix(case):
    layout = random_layout(case)
    (axes,) = plots.bit_matrix(layout).axes
    drawn = cells(axes)
    ones = np.array([[drawn[i, j][0] == "1" for j in range(9)] for i in range(7)])
    assert (ones == layout.matrix).all()
    names = [label.get_text() for label in axes.get_xticklabels()]
    assert names[:3] + names[-1:] == ["register 0", "register 1", "lane 0", "warp 1"]
    assert [label.get_text() for label in axes.get_yticklabels()][2:4] == ["dim0 2", "dim1 0"]
    empty = {(0, j, 7, 1) for j in range(9) if not layout.matrix[:, j].any()}
    assert frames(axes) == empty


@pytest.mark.parametrize("dim", ["dim0", "dim1"])
def test_slice_view_lists_the_copies(dim):
    for seed in range(6):
        layout = random_layout(seed)
        whole, part = plots.slice_view(layout, dim).axes
        table = layout.slice(dim).table("lane", "register", "warp")[..., 0]
        for place, (text, _) in cells(part).items():
            lanes = set(np.nonzero(table == max(place))[0].tolist())
            listed = re.split(r"\n|, ", text) if text else []
            shown = [part for part in listed if part not in "…⋮"]
            ends = [tuple(map(int, part.split("–"))) for part in shown]
            numbers = {n for end in ends for n in range(end[0], end[-1] + 1)}
            assert numbers == lanes or ({*"…⋮"} & {*listed} and numbers < lanes)
            assert not lanes or {min(lanes), max(lanes)} <= numbers
        assert len(cells(whole)) == 128


# -------------------------------------------------------------------- memory


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("reach", [1, 8, 64, 4096])
def test_accesses_are_counted_like_elsewhere(size, reach):
    addresses = size * np.random.default_rng(reach).integers(reach, size=32)
    (axes,) = plots.bank_phases({"x": addresses}, size).axes
    count, phases = wavefronts(addresses, size)
    assert axes.get_ylim()[0] == count
    noun = "wavefront" if count == 1 else "wavefronts"
    assert axes.get_title("left") == f"x: {count} {noun}"
    needed = [column[0] for column in cells(axes).items() if column[1][1] == plots.HUES[0]]
    assert len({row for row, _ in needed}) == phases

    touched = np.unique(addresses[:, None] + np.arange(size))
    figure = plots.sector_view({"x": addresses}, size)
    drawn = [colour for _, colour in cells(figure.axes[0]).values()]
    assert drawn.count(plots.HUES[0]) == len(np.unique(touched // 4))
    assert len(drawn) - drawn.count(plots.PALE) == 8 * len(np.unique(touched // 32))


def test_cells_of_memory_name_their_lanes():
    (axes,) = plots.sector_view({"x": [0] * 3 + [4, 4] + [8] + [None] * 26}).axes
    texts = [text for text, _ in cells(axes).values() if text]
    assert texts == ["0\n⋮\n2", "3\n4", "5"]
    (axes,) = plots.bank_phases({"x": 8 * LANES}, 8).axes
    second = {column: text for (row, column), (text, _) in cells(axes).items() if row == 1}
    assert second == {column: str(16 + column // 2) for column in range(32)}


# ---------------------------------------------------------- shuffles and tiles


@pytest.mark.parametrize("masks", [[1], [2, 8], [16, 8, 4, 2, 1], [1, 2, 3]])
def test_butterfly_marks_what_reaches_a_lane(masks):
    figure = plots.butterfly(masks, lane=5)
    (axes,) = figure.axes
    reached = {5 ^ x for x in span(masks)}
    thin, thick = axes.collections[0:-1:2], axes.collections[1:-1:2]
    lanes = {5}
    for mask, all_, marked in reversed(list(zip(masks, thin, thick))):
        edges = {(int(a[0]), int(b[0])) for a, b in all_.get_segments()}
        assert edges == {(lane ^ m, lane) for lane in range(32) for m in (0, mask)}
        lit = {(int(a[0]), int(b[0])) for a, b in marked.get_segments()}
        assert lit == {edge for edge in edges if edge[1] in lanes}
        lanes |= {source for source, _ in lit}
    assert lanes == reached
    assert f"{len(reached)} lanes" in plots.alt_text(figure)


def span(masks):
    sums = {0}
    for mask in masks:
        sums |= {mask ^ other for other in sums}
    return sums


def test_tile_walk_marks_regions():
    regions = {"a": np.s_[0:3, 1:4], "b": np.s_[2:5, 2:6], "c": np.s_[2, 3]}
    (axes,) = plots.tile_walk({"x": ((6, 7), regions)}).axes
    masks = {name: np.zeros((6, 7), dtype=bool) for name in regions}
    for name, region in regions.items():
        masks[name][region] = True
    for place, (text, colour) in cells(axes).items():
        names = [name for name in regions if masks[name][place]]
        assert text == ("\n".join(names) if len(names) < 3 else "×3")
        hues = dict(zip(regions, plots.HUES))
        assert colour == (plots.PALE, hues.get((*names, "")[0]), plots.INK, plots.INK)[len(names)]


# ------------------------------------------------------------ words and style


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_figure_says_what_it_shows(name):
    figure = EXAMPLES[name]()
    words = plots.alt_text(figure)
    assert repr(figure) == words
    assert re.fullmatch(r"[^\n<]{40,}\.", words), words


def test_words_hold_the_numbers():
    words = plots.alt_text(plots.sector_view({"x": 8 * LANES}))
    assert "8 sectors, 128 of 256 bytes" in words
    words = plots.alt_text(plots.bank_phases({"x": 32 * LANES}))
    assert "8 wavefronts, 7 of them excess" in words
    words = plots.alt_text(plots.speed_chart(ROWS))
    assert "float32, 1024 to 4096 elements" in words and "torch.compile 50 to 70" in words
    assert "sliced 90 · 80 · 50" in plots.alt_text(plots.bars(ROWS[:1]))
    words = plots.alt_text(plots.roofline({"k": (2e9, 1e9, 1e-3)}, 4e12, {"fp32": 6e13}))
    assert "k 2 at 2 operations per byte, 25 % of its roof" in words
    peaks = {"fp32": 6e13, "tensor": 9e14}
    words = plots.alt_text(plots.roofline({"k": (1e12, 1e9, 2e-3)}, 4e12, peaks))
    assert "k 500 at 1000 operations per byte, 56 % of its roof" in words
    layout = LinearLayout({"lane": [(0, 1), (0, 0)]}, (1, 2))
    assert "lane 0: dim1 0; lane 1: none" in plots.alt_text(plots.bit_matrix(layout))
    assert "2 for each" in plots.alt_text(plots.owner_grid(layout))


def test_every_form_is_tried():
    forms = {
        name
        for name, member in inspect.getmembers(plots, inspect.isfunction)
        if member.__module__ == plots.__name__ and "A Picture" in (member.__doc__ or "")
    }
    assert {name for name in forms if not name.startswith("_")} <= set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_figures_fit_the_page_and_texts_their_cells(name):
    fits(EXAMPLES[name]())


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("dim", ["dim0", "dim1"])
def test_slices_fit_too(seed, dim):
    fits(plots.slice_view(random_layout(seed), dim))


def fits(figure):
    assert figure.get_figwidth() <= plots.WIDTH + 1e-6
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    page = figure.bbox
    for axes in figure.axes:
        unit = axes.transData.transform([(0, 0), (1, 1)])
        width, height = np.abs(unit[1] - unit[0])
        grid = [p for p in axes.patches if p.get_fill()]
        for text in [*axes.texts, axes.title, axes._left_title]:
            box = text.get_window_extent()
            if not text.get_text():
                continue
            assert box.x0 >= page.x0 - 1 and box.x1 <= page.x1 + 1, text
            assert box.y0 >= page.y0 - 1 and box.y1 <= page.y1 + 1, text
            if grid and text in axes.texts:
                assert box.width <= width and box.height <= height, text
                assert text.get_size() == plots.TEXT


def test_svg_depends_on_nothing_but_content():
    layout = random_layout()
    assert svg(plots.owner_grid(layout)) == svg(plots.owner_grid(layout))


@pytest.mark.parametrize("columns, legible", [(16, True), (32, False)])
def test_a_grid_has_texts_where_they_fit(columns, legible):
    layout = blocked((32, columns), (1, columns // 2), (16, 2), (2, 1), (1, 0))
    (axes,) = plots.owner_grid(layout).axes
    assert bool(axes.texts) == legible
    assert len(cells(axes)) == 32 * columns


def test_three_digits_do_not_fit_in_32_columns():
    strides = {"two digits": ((3, 32), (33, 1)), "three digits": ((4, 32), (32, 1))}
    for title, view in strides.items():
        figure = plots.offset_grids({title: view})
        assert bool(figure.axes[0].texts) == (title == "two digits")
        fits(figure)


# Machado, Oliveira, Fernandes: A Physiologically-based Model for Simulation
# of Color Vision Deficiency, 2009, severity 1.
SIGHTS = {
    "all cones": np.eye(3),
    "protanopia": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "deuteranopia": [
        [0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]
    ],
    "tritanopia": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}  # fmt: skip


def oklab(linear):
    """Ottosson: A perceptual color space for image processing, 2020."""
    cones = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
    axes = [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]
    return np.array(axes) @ np.cbrt(np.clip(np.array(cones) @ linear, 0, None))


@pytest.mark.parametrize("sight", SIGHTS)
def test_hues_differ_for_everybody(sight):
    seen = []
    for colour in plots.HUES:
        rgb = np.array(to_rgb(colour))
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        seen.append(oklab(np.array(SIGHTS[sight]) @ linear))
    for one, other in itertools.combinations(seen, 2):
        assert np.linalg.norm(one - other) > 0.08  # a just noticeable difference is 0.02


# -------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "draw, said",
    [
        (lambda: plots.owner_grid(random_layout(shape=(2, 4, 16))), "dim0, dim1, dim2"),
        (lambda: plots.owner_grid(random_layout(), hue={"thread": (0,)}), "register, lane, warp"),
        (lambda: plots.owner_grid(random_layout(shape=(128, 64))), "8192 cells"),
        (lambda: plots.hardware_view(random_layout(), block=0), "fixed: 'block' is not one of"),
        (lambda: plots.owner_grid(random_layout(), mark={"lanes": 0}), "mark: 'lanes'"),
        (lambda: plots.owner_grid(random_layout(), label=["thread"]), "label: 'thread'"),
        (lambda: plots.slice_view(random_layout(), "dim0", of="thread"), "of: 'thread'"),
        (lambda: plots.slice_view(random_layout(), "dim2"), "dim: 'dim2'"),
        (lambda: plots.sector_view({"x": 4 * LANES}, 3), "size: 3"),
        (lambda: plots.bank_phases({"x": 4 * LANES}, 8), "4 of lane 1"),
        (lambda: plots.butterfly([0]), "masks: "),
        (lambda: plots.tile_walk({"x": ((2, 2, 2), {})}), "shape: (2, 2, 2)"),
        (lambda: plots.roofline({"k": (1, 0, 1)}, 1, {"p": 1}), "points: 'k'"),
    ],
)
def test_a_wrong_argument_is_named(draw, said):
    with pytest.raises(ValueError) as error:
        draw()
    assert said in str(error.value)


def test_no_figure_is_left_open():
    from matplotlib import pyplot

    for draw in EXAMPLES.values():
        assert isinstance(draw(), Figure)
    assert not pyplot.get_fignums()


def test_figures_use_the_fonts_that_matplotlib_ships(tmp_path):
    """Also where the cache of fonts knows only the system's."""
    fonts = font_manager.FontManager.__new__(font_manager.FontManager)
    fonts.__dict__.update(vars(font_manager.fontManager))
    foreign = tmp_path / "DejaVuSans.ttf"
    own = Path(get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
    foreign.write_bytes(own.read_bytes())
    fonts.ttflist = []
    fonts.addfont(foreign)
    with mock.patch.object(font_manager, "fontManager", fonts):
        assert Path(fonts.findfont("DejaVu Sans")) == foreign
        plots.use_style()
        assert Path(fonts.findfont("DejaVu Sans")) == own
        assert len(fonts.ttflist) == len({f.fname for f in fonts.ttflist})
        plots.use_style()
        assert len(fonts.ttflist) == len({f.fname for f in fonts.ttflist})
