"""nbxtensor.layout against Triton's own linear layouts, and by brute force."""

import itertools
import json
import math
import pickle
import random

from nbxtensor import audit, ptx
from nbxtensor import layout as nbl
from nbxtensor.layout import LinearLayout, from_triton

import numpy as np
import pytest
import torch
import triton
from triton._C.libtriton import amd, gluon_ir, ir, nvidia
from triton._C.libtriton.linear_layout import LinearLayout as Compiled
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import AMDMFMALayout, AMDWMMALayout
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryLayout

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
TELLS_OF_MEMORY = pytest.mark.skipif(
    VERSION < (3, 7), reason="Triton 3.6 ends the process when asked about memory"
)


def compiled(layout):
    """Triton's object for a layout of ours."""
    bases = [(name, [list(v) for v in vectors]) for name, vectors in layout.bases.items()]
    return Compiled.from_bases(bases, list(layout.outputs), list(layout.shape.values()), False)


def ours(layout):
    """Our object for a layout of Triton's."""
    return LinearLayout(dict(layout.bases), dict(layout.out_dims))


def powers(rng, names, most=3):
    return {name: 1 << rng.randint(0, most) for name in names}


def draw(rng, shape, bits):
    """A layout with random bases."""
    bases = {
        name: [[rng.randrange(size) for size in shape.values()] for _ in range(count)]
        for name, count in bits.items()
    }
    return LinearLayout(bases, shape)


def any_layout(rng):
    shape = powers(rng, ("a", "b", "c")[: rng.randint(1, 3)])
    bits = {name: rng.randint(0, 3) for name in ("register", "lane", "warp")[: rng.randint(1, 3)]}
    return draw(rng, shape, bits)


def permutation(rng):
    """A random layout that has an inverse."""
    while True:
        shape = powers(rng, ("a", "b"), 2)
        total = sum(size.bit_length() - 1 for size in shape.values())
        lanes = rng.randint(0, total)
        layout = draw(rng, shape, {"register": total - lanes, "lane": lanes})
        if layout.is_permutation:
            return layout


# Against libtriton's LinearLayout: 600 random layouts, and 120 permutations.


@pytest.mark.parametrize("seed", range(6))
def test_random_layouts(seed):
    rng = random.Random(seed)
    surjective = 0
    for _ in range(100):
        one, other = any_layout(rng), any_layout(rng)
        asked = compiled(one)
        assert ours(asked) == one
        assert asked.get_in_dim_names() == list(one.inputs)
        assert asked.get_out_dim_names() == list(one.outputs)
        assert asked.is_injective() == one.is_injective
        assert asked.is_surjective() == one.is_surjective
        assert asked.is_invertible() == one.is_permutation
        for _ in range(4):
            index = {name: rng.randrange(size) for name, size in one.sizes.items()}
            place = dict(zip(one.outputs, map(int, one(**index))))
            assert asked.apply(index) == place
        assert ours(asked * compiled(other)) == one * other
        bits = {name: size.bit_length() - 1 for name, size in one.shape.items()}
        after = draw(rng, powers(rng, ("x", "y")), bits)
        assert ours(asked.compose(compiled(after))) == one.compose(after)
        if one.is_surjective:
            surjective += 1
            assert ours(asked.pseudoinvert()) == one.pseudoinvert()
        assert (asked == compiled(other)) == (one == other)
    assert surjective > 20


@pytest.mark.parametrize("seed", range(4))
def test_random_permutations(seed):
    rng = random.Random(seed)
    for _ in range(30):
        one = permutation(rng)
        assert ours(compiled(one).invert()) == one.invert()
        there_and_back = one.compose(one.invert())
        same = np.eye(len(one.matrix))
        assert there_and_back == LinearLayout.from_matrix(same, one.sizes, one.sizes)


@pytest.mark.parametrize("seed", range(3))
def test_matrices(seed):
    """Triton's matrix has our rows, bits of an output lowest first."""
    rng = random.Random(seed)
    for _ in range(60):
        one = any_layout(rng)
        theirs = np.array(compiled(one).get_matrix_view()).reshape(one.matrix.shape)
        assert (theirs == one.matrix).all()
        assert LinearLayout.from_matrix(one.matrix, one.sizes, one.shape) == one


def test_equality_heeds_order_and_sizes():
    one = LinearLayout({"lane": [(1, 0)], "warp": []}, {"a": 2, "b": 1})
    others = [
        LinearLayout({"warp": [], "lane": [(1, 0)]}, {"a": 2, "b": 1}),
        LinearLayout({"lane": [(0, 1)], "warp": []}, {"b": 1, "a": 2}),
        LinearLayout({"lane": [(1, 0)], "warp": []}, {"a": 4, "b": 1}),
    ]
    for other in others:
        assert one != other
        assert compiled(one) != compiled(other)
    assert one != "lane"
    assert one == one.named("one") and hash(one) == hash(one.named("one"))


# Named layouts. Triton 3.9 drops register bits that wrapping made zero; those
# before it keep them.


def check(layout, gluon):
    theirs = from_triton(gluon, list(layout.shape.values()))
    if VERSION >= (3, 9):
        layout, theirs = layout.drop_zero_registers(), theirs.drop_zero_registers()
    assert layout == theirs, (gluon, layout, theirs)


SHAPES = list(itertools.product((1, 4, 16, 64, 256), repeat=2))
CUBES = list(itertools.product((1, 4, 32), repeat=3))
BOXES = [
    ((1, 1), (4, 8), (2, 2)),
    ((2, 4), (16, 2), (4, 1)),
    ((1, 8), (1, 32), (1, 4)),
    ((1, 1), (64, 1), (8, 1)),
]
CUBE_BOX = ((1, 2, 2), (2, 4, 4), (2, 1, 2))
WARPS = [(1, 1), (4, 1), (2, 2), (1, 4), (8, 1)]


def gluon_boxes(box, order):
    return gl.BlockedLayout(*map(list, box), list(order))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("box", BOXES)
def test_blocked_slice_fma(box, order):
    for shape in SHAPES:
        gluon = gluon_boxes(box, order)
        layout = nbl.blocked(shape, *box, order)
        check(layout, gluon)
        for dim in (0, 1):
            check(layout.slice(dim), gl.SliceLayout(dim, gluon))
        for index in (0, 1):
            operand = nbl.fma_operand(shape, index, *box, order)
            check(operand, gl.DotOperandLayout(index, gluon, 0))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_three_dimensions(order):
    gluon = gluon_boxes(CUBE_BOX, order)
    for shape in CUBES:
        layout = nbl.blocked(shape, *CUBE_BOX, order)
        check(layout, gluon)
        for dim in range(3):
            part = gl.SliceLayout(dim, gluon)
            check(layout.slice(dim), part)
            check(layout.slice(dim).slice(1), gl.SliceLayout(1, part))
        for index in (0, 1):
            operand = nbl.fma_operand(shape, index, *CUBE_BOX, order)
            check(operand, gl.DotOperandLayout(index, gluon, 0))


@pytest.mark.parametrize("warps", WARPS)
def test_mma(warps):
    mma = gl.NVMMADistributedLayout([2, 0], list(warps), [16, 8])
    for shape in SHAPES:
        check(nbl.nvidia_mma(shape, 2, warps, (16, 8)), mma)
        for index, width in itertools.product((0, 1), (1, 2, 4, 8)):
            operand = nbl.dot_operand(shape, index, width, warps)
            check(operand, gl.DotOperandLayout(index, mma, width))


def test_mma_in_batches():
    mma = gl.NVMMADistributedLayout([2, 0], [2, 2, 1], [1, 16, 8])
    for shape in CUBES:
        check(nbl.nvidia_mma(shape, 2, (2, 2, 1), (1, 16, 8)), mma)
        for index in (0, 1):
            operand = nbl.dot_operand(shape, index, 2, (2, 2, 1))
            check(operand, gl.DotOperandLayout(index, mma, 2))


@pytest.mark.parametrize("warps", [(4, 1), (4, 2), (8, 1)])
@pytest.mark.parametrize("n", [8, 32, 256])
def test_wgmma(warps, n):
    mma = gl.NVMMADistributedLayout([3, 0], list(warps), [16, n, 16])
    for shape in SHAPES:
        check(nbl.nvidia_mma(shape, 3, warps, (16, n, 16)), mma)
        for width in (1, 2, 4):
            operand = nbl.dot_operand(shape, 0, width, warps, version=3)
            check(operand, gl.DotOperandLayout(0, mma, width))


@TELLS_OF_MEMORY
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_swizzled_shared(order):
    for shape in SHAPES[1:]:  # Gluon has no layout for a single element
        for numbers in itertools.product((1, 2, 8), (1, 2, 4), (1, 2, 8)):
            layout = nbl.swizzled_shared(shape, *numbers, order)
            check(layout, gl.SwizzledSharedLayout(*numbers, list(order)))


@TELLS_OF_MEMORY
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_swizzled_shared_in_three_dimensions(order):
    for shape in CUBES[1:]:
        layout = nbl.swizzled_shared(shape, 2, 1, 4, order)
        check(layout, gl.SwizzledSharedLayout(2, 1, 4, list(order)))


@TELLS_OF_MEMORY
def test_swizzled_shared_in_one_dimension():
    layout = nbl.swizzled_shared((64,), 4, 1, 8, (0,))
    check(layout, gl.SwizzledSharedLayout(4, 1, 8, [0]))


@TELLS_OF_MEMORY
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bits", [8, 16, 32, 64])
@pytest.mark.parametrize("width", [32, 64, 128])
def test_nvmma_shared(width, bits, transposed):
    for rows, columns in itertools.product((8, 64, 256), (8, 32, 128, 512)):
        if columns * bits < width * 8:
            continue
        shape = (columns, rows) if transposed else (rows, columns)
        layout = nbl.nvmma_shared(shape, width, bits, transposed)
        check(layout, gl.NVMMASharedLayout(width, bits, 2, transposed))


def test_clusters():
    box = BOXES[0]
    layout = nbl.blocked((16, 32), *box, (1, 0))
    for bases, ctas in {((1, 0),): {"dim0": 2}, ((0, 1), (1, 0)): {"dim1": 2, "dim0": 2}}.items():
        cluster = layout * nbl.identity("block", ctas)
        check(cluster, gl.BlockedLayout(*map(list, box), [1, 0], [list(b) for b in bases]))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size, k", [(32, 8), (16, 16)])
def test_mfma(size, k, transposed):
    m, n = ("dim1", "dim0") if transposed else ("dim0", "dim1")
    factors = [
        LinearLayout({}, {"dim1": 1, "dim0": 1}),
        nbl.identity("register", {m: 4}),
        nbl.identity("lane", {n: size, m: 64 // size}),
        nbl.identity("register", {m: size * size // 256}),
        nbl.identity("warp", {"dim1": 2, "dim0": 2}),
        nbl.zeros("block", 1),
    ]
    tile = math.prod(factors[1:], start=factors[0])
    mfma = AMDMFMALayout(3, [size, size, k], transposed, [2, 2])
    for shape in [(128, 128), (64, 256)]:
        check(nbl.fit(tile, shape), mfma)


@TELLS_OF_MEMORY
def test_wmma():
    lanes = nbl.identity("lane", {"dim1": 16, "dim0": 2})
    registers = nbl.identity("register", {"dim0": 8})
    empty = LinearLayout(dict.fromkeys(("register", "lane", "warp", "block"), ()), (1, 1))
    check(empty * lanes * registers, AMDWMMALayout(1, False, []))
    check(empty * registers * lanes, AMDWMMALayout(2, False, []))


@TELLS_OF_MEMORY
def test_tensor_memory():
    layout = nbl.identity("row", {"dim0": 128}) * nbl.identity("column", {"dim1": 64})
    check(layout, TensorMemoryLayout([128, 64], 1))


def test_layouts_that_are_written_down():
    bases = [[[0, 1], [1, 1]], [[2, 0]] + [[0, 0]] * 4, [[0, 2]], []]
    layout = LinearLayout(dict(zip(("register", "lane", "warp", "block"), bases)), (4, 4))
    check(layout, gl.DistributedLinearLayout(*bases, [4, 4]))


# What the compiler would not survive raises instead.

MMA = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
BLOCKED = gluon_boxes(BOXES[0], (1, 0))
REFUSED = {
    "auto": (gl.AutoLayout(), [8, 8], "yet to choose"),
    "coalesced": (gl.CoalescedLayout(), [8, 8], "yet to choose"),
    "auto, sliced": (gl.SliceLayout(0, gl.AutoLayout()), [8], "rank|yet to choose"),
    "few dimensions": (BLOCKED, [8], "2 dimensions"),
    "many dimensions": (BLOCKED, [8, 8, 8], "2 dimensions"),
    "slice of few": (gl.SliceLayout(0, BLOCKED), [8, 8], "1 dimensions"),
    "sliced too far": (gl.SliceLayout(3, BLOCKED), [8], "dim=3"),
    "size": (BLOCKED, [8, 12], "dim1 is 12"),
    "box": (gl.BlockedLayout([3, 1], [4, 8], [2, 2], [1, 0]), [8, 8], "power of two"),
    "order": (gl.BlockedLayout([1, 1], [4, 8], [2, 2], [1, 1]), [8, 8], "permutation"),
    "version 1": (gl.NVMMADistributedLayout([1, 0], [4, 1], [16, 8]), [16, 16], "version"),
    "narrow mma": (gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 4]), [16, 16], "from 8"),
    "narrow wgmma": (gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 4, 16]), [16, 16], "from 8"),
    "k_width": (gl.DotOperandLayout(0, MMA, 3), [16, 16], "k_width"),
    "operand": (gl.DotOperandLayout(2, MMA, 2), [16, 16], "opIdx"),
    "other shape": (
        gl.DistributedLinearLayout([[0, 1]], [[1, 0]] * 5, [], [], [4, 4]),
        [8, 8],
        r"it is for \[4, 4\]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    layout, shape, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason):
        from_triton(layout, shape)


def test_not_a_layout():
    with pytest.raises(TypeError, match="layout: 'blocked'"):
        from_triton("blocked", [8, 8])


MEMORY = {
    "padded": (gl.PaddedSharedLayout.with_identity_for([[8, 2]], [8, 8], [1, 0]), [8, 8], "pad"),
    "few dimensions": (gl.SwizzledSharedLayout(1, 1, 1, [1, 0]), [8], "2 dimensions"),
    "one element": (gl.SwizzledSharedLayout(1, 1, 1, [1, 0]), [1, 1], "empty"),
    "other shape": (gl.SharedLinearLayout([[0, 1], [1, 0]]), [4, 4], "it is for"),
    "few rows": (gl.NVMMASharedLayout(128, 16), [4, 64], "8 rows of 128"),
    "short rows": (gl.NVMMASharedLayout(128, 16), [64, 8], "8 rows of 128"),
}


@TELLS_OF_MEMORY
@pytest.mark.parametrize("name", MEMORY)
def test_refused_of_memory(name):
    layout, shape, reason = MEMORY[name]
    with pytest.raises(ValueError, match=reason):
        from_triton(layout, shape)


@pytest.mark.skipif(VERSION < (3, 9), reason="Triton has no partitioned layouts before 3.9")
def test_refused_of_partitions():
    from triton.experimental.gluon.language.amd.cdna5 import PartitionedSharedLayout

    plain = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    with pytest.raises(ValueError, match="not tell where"):
        from_triton(PartitionedSharedLayout(2, 2, 0, plain), [16, 16])


@pytest.mark.skipif(VERSION >= (3, 7), reason="Triton tells from 3.7 on")
def test_memory_before_3_7():
    with pytest.raises(NotImplementedError, match="3.7"):
        from_triton(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]), [8, 8])


# The class.


def test_immutable_and_hashable():
    layout = LinearLayout({"lane": np.array([[1], [2]])}, np.array([4]))
    assert {layout: 1}[LinearLayout({"lane": [(1,), (2,)]}, {"dim0": 4})] == 1
    with pytest.raises(AttributeError):
        layout.shape = {}
    with pytest.raises(TypeError):
        layout.bases["lane"] = ()
    with pytest.raises(ValueError):
        layout.matrix[0, 0] = 0
    copy = pickle.loads(pickle.dumps(layout.named("x")))
    assert copy == layout and copy.name == "x"


def test_what_a_notebook_shows():
    layout = LinearLayout({"lane": [(np.int64(1), 0)], "warp": []}, (2, 1)).named("pair")
    shown = layout._repr_mimebundle_()
    assert shown["text/plain"] == repr(layout)
    assert json.loads(json.dumps(shown["application/vnd.nbxtensor.layout+json"])) == {
        "name": "pair",
        "bases": [["lane", [[1, 0]]], ["warp", []]],
        "shape": [["dim0", 2], ["dim1", 1]],
    }


def test_apply_broadcasts():
    layout = LinearLayout({"register": [(1,), (2,)], "lane": [(4,), (8,)]}, (16,))
    (place,) = layout(register=np.arange(4)[:, None], lane=np.arange(4))
    assert place.tolist() == np.arange(16).reshape(4, 4).T.tolist()
    assert layout.table()[..., 0].tolist() == place.tolist()
    assert layout(lane=np.arange(0))[0].shape == (0,)
    wide = LinearLayout({"lane": [(512,)], "block": []}, (1024,))
    assert wide(lane=np.uint8(1), block=[0, 0])[0].tolist() == [512, 512]
    assert [int(value) for value in layout()] == [0]
    assert layout.table("lane", "register").shape == (4, 4, 1)


def test_layouts_without_bits():
    nothing = LinearLayout({}, {})
    one = LinearLayout({"register": []}, (1, 1))
    assert nothing * one == one == one * nothing
    assert one.is_permutation and one.rank == 0 and one.kernel() == [] and one.image() == []
    assert one.invert().invert() == one
    assert nothing.table().shape == (0,)


BAD = {
    "size": (lambda: LinearLayout({}, (3,)), "shape: dim0 is 3"),
    "float": (lambda: LinearLayout({}, (2.0,)), "shape: dim0 is 2.0"),
    "zero": (lambda: LinearLayout({}, {"a": 0}), "shape: a is 0"),
    "ragged": (lambda: LinearLayout({"lane": [(1, 0), (1,)]}, (2, 2)), "must have 2 entries"),
    "large": (lambda: LinearLayout({"lane": [(2, 0)]}, (2, 2)), "from 0 to 1 for dim0"),
    "negative": (lambda: LinearLayout({"lane": [(0, -1)]}, (2, 2)), "from 0 to 1 for dim1"),
    "half": (lambda: LinearLayout({"lane": [(0.5,)]}, (2,)), "an integer"),
    "matrix": (lambda: LinearLayout.from_matrix(np.eye(2), {"a": 2}, (4,)), r"must be \(2, 1\)"),
    "input": (lambda: TWO(warp=0), "'warp' is not one of lane"),
    "index": (lambda: TWO(lane=2), "lane must be integers from 0 to 1"),
    "fraction": (lambda: TWO(lane=0.5), "lane must be integers"),
    "indices": (lambda: TWO(lane=[0, -1]), "lane must be integers from 0 to 1"),
    "table": (lambda: TWO.table("warp"), "'warp' is not one of lane"),
    "compose": (lambda: TWO.compose(TWO), "must be dim0 2"),
    "invert": (lambda: NONE.invert(), "only a permutation"),
    "pseudoinvert": (lambda: NONE.pseudoinvert(), "no index"),
    "slice": (lambda: TWO.slice("dim1"), "'dim1' is not one of dim0"),
    "slice number": (lambda: TWO.slice(-1), "-1 is not one of dim0"),
    "restrict": (lambda: TWO.restrict({"warp": 1}), "inputs: 'warp' is not one of lane"),
    "enlarge": (lambda: TWO.restrict(outputs={"dim0": 4}), "up to 2, not 4"),
    "transpose": (lambda: TWO.transpose("dim1"), "must be dim0"),
    "solve": (lambda: nbl.solve(np.zeros((1, 1)), np.ones((1, 1))), "right"),
    "order": (lambda: nbl.blocked((4, 4), (1, 1), (4, 8), (1, 1), (1, 1)), "order: "),
    "box": (lambda: nbl.blocked((4, 4), (1, 3), (4, 8), (1, 1), (1, 0)), "size_per_thread: "),
    "rank": (lambda: nbl.blocked((4, 4), (1, 1), (4,), (1, 1), (1, 0)), "threads_per_warp: "),
    "version": (lambda: nbl.nvidia_mma((16, 8), 1, (1, 1), (16, 8)), "version: 1"),
    "instruction": (lambda: nbl.nvidia_mma((16, 8), 2, (1, 1), (16, 4)), "instr_shape: "),
    "k_width": (lambda: nbl.dot_operand((16, 8), 0, 3, (1, 1)), "k_width: 3"),
    "operand": (lambda: nbl.dot_operand((16, 8), 1, 2, (1, 1), 3), "operand_index: 1"),
    "fma": (lambda: nbl.fma_operand((4, 4), 2, *BOXES[0], (1, 0)), "operand_index: 2"),
    "vec": (lambda: nbl.swizzled_shared((4, 4), 3, 1, 1, (1, 0)), "vec: 3"),
    "width": (lambda: nbl.nvmma_shared((8, 64), 16, 16), "swizzle_byte_width: 16"),
    "rows": (lambda: nbl.nvmma_shared((512, 64), 128, 16), "shape: "),
    "bytes": (lambda: nbl.wavefronts(np.zeros(32, int), 12), "size: 12"),
    "lanes": (lambda: nbl.wavefronts(np.zeros(16, int), 4), "addresses: "),
    "aligned": (lambda: nbl.wavefronts(np.arange(32), 4), "addresses: "),
    "conversion": (lambda: nbl.conversion(TWO, NONE), "target: "),
    "missing": (lambda: nbl.conversion(NONE, TWO * nbl.identity("lane", {"dim0": 2})), "source: "),
}
TWO = LinearLayout({"lane": [(1,)]}, (2,))
NONE = LinearLayout({"lane": [(0,), (1,)]}, (4,))


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    call, said = BAD[name]
    with pytest.raises(ValueError, match=said):
        call()


# Elimination, by trying all vectors.


@pytest.mark.parametrize("seed", range(3))
def test_elimination(seed):
    rng = np.random.default_rng(seed)
    for _ in range(60):
        m, n = rng.integers(0, 6, 2)
        matrix = rng.integers(0, 2, (m, n)).astype(np.uint8)
        vectors = np.array(list(itertools.product((0, 1), repeat=n)), np.uint8).T
        reached = {tuple(column) for column in (matrix @ vectors % 2).T.tolist()}
        assert len(reached) == 2 ** nbl.rank(matrix)
        null = nbl.kernel(matrix)
        assert null.shape == (n, n - nbl.rank(matrix)) and nbl.rank(null) == null.shape[1]
        assert not (matrix @ null % 2).any()
        for right in itertools.product((0, 1), repeat=m):
            wanted = np.array(right, np.uint8).reshape(m, 1)
            if right in reached:
                assert (matrix @ nbl.solve(matrix, wanted) % 2 == wanted).all()
            else:
                with pytest.raises(ValueError):
                    nbl.solve(matrix, wanted)


# Conversions.


def nearest(source, target):
    """How many inputs, from the register on, a conversion must change."""
    places, wanted = source.table(), target.table()
    for near in range(1, len(source.inputs) + 1):
        if source.table().shape[near:] != target.table().shape[near:]:
            continue
        found = True
        for index in np.ndindex(wanted.shape[:-1]):
            held = places[(..., *index[near:], slice(None))].reshape(-1, places.shape[-1])
            found &= (held == wanted[index]).all(1).any()
        if found:
            return near
    return None


def test_conversions_stay_near():
    rng = random.Random(0)
    levels = set()
    for _ in range(200):
        shape = {"dim0": 4, "dim1": 4}
        bits = {"register": rng.randint(2, 3), "lane": 2, "warp": 1}
        source = draw(rng, shape, bits)
        keep = rng.choice([("lane", "warp"), ("warp",), ()])
        target = draw(rng, shape, bits)
        target = LinearLayout(
            {n: source.bases[n] if n in keep else target.bases[n] for n in source.bases}, shape
        )
        near = nearest(source, target)
        if near is None:
            with pytest.raises(ValueError, match="source"):
                nbl.conversion(source, target)
            continue
        moved = nbl.conversion(source, target)
        assert moved.compose(source) == target
        outermost = nbl.crosses(moved)
        level = 1 if outermost is None else source.inputs.index(outermost) + 1
        assert level <= near and (near == 1 or level == near)
        levels.add(near)
    assert levels == {1, 2, 3}


STUB = """module attributes {"ttg.num-ctas" = 1 : i32, "ttg.num-warps" = 4 : i32,
  ttg.target = "cuda:80", "ttg.threads-per-warp" = 32 : i32} {
  tt.func public @stub() { tt.return }
}"""


@pytest.fixture
def compiler(tmp_path):
    """A builder that stands in a module, for questions that need one."""
    context = ir.context()
    for dialects in ir, nvidia, amd:
        dialects.load_dialects(context)
    (tmp_path / "stub.ttgir").write_text(STUB)
    module = ir.parse_mlir_module(str(tmp_path / "stub.ttgir"), context)
    blocks = []
    module.walk(lambda op: blocks.append(op.get_block()))
    builder = gluon_ir.GluonOpBuilder(context)
    builder.set_insertion_point_to_start(blocks[0])
    yield builder  # its module lives as long as this frame


def test_conversions_that_the_compiler_calls_trivial(compiler):
    shape = [32, 32]
    layouts = [
        gluon_boxes(box, order) for box in BOXES[:3] for order in ((0, 1), (1, 0))
    ] + [MMA, gl.DotOperandLayout(0, MMA, 2)]
    half, value = compiler.get_half_ty(), compiler.get_fp16(0.0)
    trivial = 0
    for source, target in itertools.product(layouts, repeat=2):
        types = [
            compiler.get_distributed_ty(half, shape, one._to_ir(compiler))
            for one in (source, target)
        ]
        splat = compiler.create_splat(types[0], value)
        theirs = compiler.is_convert_layout_trivial(types[1], splat)
        moved = nbl.conversion(from_triton(source, shape), from_triton(target, shape))
        assert theirs == (nbl.crosses(moved) in (None, "register")), (source, target)
        trivial += theirs
    assert 8 <= trivial < len(layouts) ** 2


# Banks.


def count_slowly(addresses, size, active):
    """Wavefronts and phases of one request, lane by lane."""
    waves = phases = 0
    lanes = min(32, 128 // size)
    for first in range(0, 32, lanes):
        words = {}
        for lane in range(first, first + lanes):
            for byte in range(0, size, 4) if active[lane] else ():
                word = (addresses[lane] + byte) // 4
                words.setdefault(word % 32, set()).add(word)
        waves += max(map(len, words.values()), default=0)
        phases += bool(words)
    return waves, phases


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_wavefronts(size):
    rng = np.random.default_rng(size)
    addresses = size * rng.integers(0, [[8], [64], [512], [4096]] * 10, (40, 32))
    active = rng.random((40, 32)) < rng.choice([0, 0.2, 0.8, 1], (40, 1))
    found = np.stack(nbl.wavefronts(addresses, size, active), -1)
    slow = [count_slowly(row, size, mask) for row, mask in zip(addresses, active)]
    assert found.tolist() == [list(row) for row in slow]
    everyone = nbl.wavefronts(addresses.reshape(4, 10, 32), size)
    all_active = nbl.wavefronts(addresses, size, np.ones((40, 32), bool))
    assert np.array(everyone).reshape(2, 40).tolist() == np.array(all_active).tolist()


def test_bank():
    assert nbl.bank([0, 3, 4, 124, 128, 132]).tolist() == [0, 0, 1, 31, 0, 1]


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_excess(compiler, bits):
    """Against counting, and against Triton where a lane moves a word or more.

    Triton does not see what a swizzle does inside of words.
    """
    shape = (64, 64)
    registers = [
        ((1, 1), (1, 32), (4, 1), (1, 0)),
        ((1, 1), (32, 1), (1, 4), (0, 1)),
        ((1, 2), (8, 4), (4, 1), (1, 0)),
        ((1, 4), (16, 2), (4, 1), (1, 0)),
        ((1, 8), (8, 4), (4, 1), (1, 0)),
        ((2, 1), (4, 8), (2, 2), (0, 1)),
    ]
    numbers = itertools.product((1, 4), (1, 2), (1, 4, 8))
    memories = itertools.product(numbers, [(1, 0), (0, 1)])
    seen = []
    for (*box, order), (swizzle, memory_order) in itertools.product(registers, memories):
        offsets = nbl.access(
            nbl.blocked(shape, *box, order), nbl.swizzled_shared(shape, *swizzle, memory_order)
        )
        ours = nbl.excess(offsets, bits // 8)
        assert nbl.conflict_free(offsets, bits // 8) == (ours == 0)
        size = nbl.vector_width(offsets, bits // 8) * bits // 8
        places = offsets.table("register", "warp", "lane")[:: size * 8 // bits, ..., 0]
        waves, phases = nbl.wavefronts(places * (bits // 8), size)
        assert (waves == (ours + 1) * phases).all()
        if size >= 4:
            gluon = gluon_boxes(box, order), gl.SwizzledSharedLayout(*swizzle, list(memory_order))
            asked = [one._to_ir(compiler) for one in gluon]
            assert compiler.get_shared_bank_conflicts(*asked, list(shape), bits) == ours
            seen.append(ours)
    assert len(set(seen)) >= 2 and len(seen) >= 16


# Addresses of compiled kernels. They are all there is to compare with in
# Triton 3.6, and for padded layouts in any version.


@gluon.jit
def whole_room(
    x_ptr,
    y_ptr,
    M: gl.constexpr,
    N: gl.constexpr,
    ROOM: gl.constexpr,
    TILE: gl.constexpr,
    SHARED: gl.constexpr,
    FLAT: gl.constexpr,
    PLAIN: gl.constexpr,
    PUBLIC: gl.constexpr,
):
    """Put a tile into shared memory, and copy that memory as it is."""
    rows = gl.arange(0, M, gl.SliceLayout(1, TILE))[:, None]
    columns = gl.arange(0, N, gl.SliceLayout(0, TILE))[None, :]
    x = gl.load(x_ptr + rows * N + columns)
    nothing = gl.full([ROOM], -1, gl.int32, FLAT)
    room = gl.allocate_shared_memory(gl.int32, [ROOM], PLAIN, nothing)
    if PUBLIC:
        room.reinterpret(gl.int32, [M, N], SHARED).store(x)
    else:
        room._reinterpret(gl.int32, [M, N], SHARED).store(x)
    gl.store(y_ptr + gl.arange(0, ROOM, FLAT), room.load(FLAT))


@gluon.jit
def through_padded(
    x_ptr, M: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr, PADDED: gl.constexpr
):
    """Put a tile into padded memory."""
    rows = gl.arange(0, M, gl.SliceLayout(1, ROWS))[:, None]
    columns = gl.arange(0, N, gl.SliceLayout(0, ROWS))[None, :]
    x = gl.load(x_ptr + rows * N + columns)
    tile = gl.allocate_shared_memory(gl.int32, [M, N], PADDED, x)
    gl.store(x_ptr + rows * N + columns, tile.load(ROWS))


PAIRS = [[[32, 4]], [[8, 2]], [[8, 1], [32, 4]]]
SCALAR = ((1, 1), (4, 8), (4, 1))


ORDERS = [(1, 0), (0, 1)]


def memory_after(shape, shared):
    """What memory holds after a tile of 0, 1, 2, … was put there."""
    m, n = shape
    x = torch.arange(m * n, dtype=torch.int32)
    y = torch.zeros(2 * m * n, dtype=torch.int32)
    audit.emulate(
        whole_room,
        1,
        x,
        y,
        M=m,
        N=n,
        ROOM=2 * m * n,
        TILE=gluon_boxes(SCALAR, (1, 0)),
        SHARED=shared,
        FLAT=gl.BlockedLayout([1], [32], [4], [0]),
        PLAIN=gl.SwizzledSharedLayout(1, 1, 1, [0]),
        PUBLIC=VERSION >= (3, 9),
    )
    return y.tolist()


def predicted(layout, pairs=()):
    """The same, from a layout of ours."""
    m, n = layout.shape.values()
    row, column = layout(offset=np.arange(m * n))
    memory = np.full(2 * m * n, -1)
    memory[nbl.pad(np.arange(m * n), pairs)] = row * n + column
    return memory.tolist()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("numbers", [(1, 1, 1), (4, 2, 4), (1, 1, 16), (2, 4, 8)])
def test_swizzled_addresses(numbers, order):
    shared = gl.SwizzledSharedLayout(*numbers, list(order))
    layout = nbl.swizzled_shared((16, 32), *numbers, order)
    assert memory_after((16, 32), shared) == predicted(layout)


@pytest.mark.parametrize("width", [32, 64, 128])
def test_nvmma_addresses(width):
    shared = gl.NVMMASharedLayout(width, 32, 2)
    layout = nbl.nvmma_shared((16, 32), width, 32)
    assert memory_after((16, 32), shared) == predicted(layout)


@pytest.mark.skipif(VERSION >= (3, 9), reason="Triton 3.9 does not read padded memory as plain")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("pairs", PAIRS)
def test_padded_addresses(pairs, order):
    padded = gl.PaddedSharedLayout.with_identity_for(pairs, [16, 32], list(order))
    layout = nbl.padded_shared((16, 32), order)
    assert memory_after((16, 32), padded) == predicted(layout, pairs)


@pytest.mark.parametrize("lanes, warps", [((1, 32), (4, 1)), ((32, 1), (1, 4)), ((4, 8), (4, 1))])
@pytest.mark.parametrize("pairs", PAIRS)
def test_padded_wavefronts(pairs, lanes, warps):
    box = ((1, 1), lanes, warps)
    padded = gl.PaddedSharedLayout.with_identity_for(pairs, [32, 32], [1, 0])
    x = torch.arange(1024, dtype=torch.int32)
    run = audit.emulate(
        through_padded, 1, x, M=32, N=32, ROWS=gluon_boxes(box, (1, 0)), PADDED=padded
    )
    offsets = nbl.access(nbl.blocked((32, 32), *box, (1, 0)), nbl.padded_shared((32, 32), (1, 0)))
    places = nbl.pad(offsets.table("register", "warp", "lane")[..., 0], pairs)
    waves, _ = nbl.wavefronts(4 * places, 4)
    assert x.tolist() == list(range(1024))
    assert run["shared_store_wavefronts"] == run["shared_load_wavefronts"] == waves.sum()


def test_small_padding_misaligns_vectors():
    """What the page warns of: Triton does not look at the padding."""
    padded = gl.PaddedSharedLayout.with_identity_for([[8, 1]], [32, 32], [1, 0])
    x = torch.zeros(1024, dtype=torch.int32)
    rows = gluon_boxes(((1, 4), (4, 8), (4, 1)), (1, 0))
    with pytest.raises(ptx.Fault, match="misaligned\n.* 16 bytes at byte 36 "):
        audit.emulate(through_padded, 1, x, M=32, N=32, ROWS=rows, PADDED=padded)


# The solutions of the page's exercises.


def test_exercise_1():
    plain = LinearLayout(
        {"register": [(0, 1)], "lane": [(0, 2), (0, 4), (1, 0), (2, 0), (4, 0)]}, (8, 8)
    )
    turned = plain.transpose("dim1", "dim0")
    turned = LinearLayout(turned.bases, (8, 8))
    lane = np.arange(32)
    row, column = plain(lane=lane, register=[[0], [1]])
    assert (row == lane // 4).all() and (column[1] == column[0] + 1).all()
    row, column = turned(lane=lane, register=[[0], [1]])
    assert (column == lane // 4).all() and (row[1] == row[0] + 1).all()
    moved = nbl.conversion(plain, turned)
    assert nbl.crosses(moved) == "lane"
    assert moved.bases["register"] == ((0, 4),)


def test_exercise_2():
    rows = nbl.nvidia_mma((16, 8), 2, (1, 1), (16, 8)).slice(1)
    assert rows.inputs == ("register", "lane", "warp", "block")
    assert rows.kernel() == [(0, 1, 0, 0), (0, 2, 0, 0)]


@pytest.mark.parametrize("columns, numbers", [(64, (8, 1, 8)), (32, (8, 2, 4))])
def test_exercise_3(columns, numbers):
    registers = nbl.blocked((8, columns), (1, 8), (8, 4), (1, 1), (0, 1))
    for swizzle, expected in {(1, 1, 1): 7 if columns == 64 else 3, numbers: 0}.items():
        memory = nbl.swizzled_shared((8, columns), *swizzle, (1, 0))
        offsets = nbl.access(registers, memory)
        assert nbl.vector_width(offsets, 2) == 8
        assert nbl.excess(offsets, 2) == expected
