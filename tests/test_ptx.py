"""The PTX machine: every family of instructions, its counters, its faults, compiled kernels."""

import itertools
import operator
import re
from fractions import Fraction

from nbxtensor import ptx
from nbxtensor.audit import launched
from nbxtensor.ptx import Fault, Memory, Program, execute

import mpmath
import numpy as np
import pytest
import torch
from helpers import (
    LAUNCHES,
    VIEWS,
    assert_equal,
    assert_result,
    assert_slope,
    normal,
)

# -- one instruction at a time ------------------------------------------------


def evaluate(code, *sources, bits=32, kind="b", threads=32):
    """Run lines of PTX on arrays of registers; what is in %d afterwards.

    The sources are unsigned arrays, %a0, %a1 …; %d has so many bits, and a
    predicate %p is there to be used.
    """
    count = len(sources[0])
    padded = [np.resize(np.asarray(s), -(-count // threads) * threads) for s in sources]
    registers = [f".reg .b{8 * s.itemsize} %a{k};" for k, s in enumerate(padded)]
    loads = [
        f"mad.wide.u32 %x, %i, {s.itemsize}, %base{k}; ld.global.b{8 * s.itemsize} %a{k}, [%x];"
        for k, s in enumerate(padded)
    ]
    names = [f"s{k}" for k in range(len(padded))] + ["out"]
    text = f"""
    .visible .entry one({", ".join(f".param .u64 {n}" for n in names)})
    .reqntid {threads}
    {{
        .reg .b32 %i; .reg .b32 %c; .reg .b64 %x; .reg .pred %p; .reg .pred %q;
        .reg .{kind}{bits} %d; .reg .b32 %t<4>; .reg .b16 %h<4>; .reg .b64 %w<4>;
        {" ".join(f".reg .b64 %base{k};" for k in range(len(names)))}
        {" ".join(registers)}
        {" ".join(f"ld.param.u64 %base{k}, [{n}];" for k, n in enumerate(names))}
        mov.u32 %i, %tid.x; mov.u32 %c, %ctaid.x; mad.lo.u32 %i, %c, {threads}, %i;
        {" ".join(loads)}
        {code}
        mad.wide.u32 %x, %i, {bits // 8}, %base{len(padded)};
        st.global.b{bits} [%x], %d;
    }}"""
    memory = Memory()
    for name, array in zip(names, padded):
        memory.add(name, array)
    memory.add("out", np.zeros(len(padded[0]), f"u{bits // 8}"), known=False)
    execute(Program(text), len(padded[0]) // threads, names, memory)
    return memory["out"][:count]


def pairs(values, dtype):
    """All pairs of values, as two arrays."""
    both = np.array(list(itertools.product(values, repeat=2)), dtype=object)
    return [np.array([int(v) for v in column], dtype=dtype) for column in both.T]


def signed(value, bits):
    value &= 2**bits - 1
    return value - 2**bits if value >> bits - 1 else value


def truncated(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def edges(bits):
    top = 2**bits
    return [0, 1, 2, 3, 7, 100, top // 2 - 1, top // 2, top // 2 + 1, top - 7, top - 2, top - 1]


INTEGERS = {
    "add": operator.add,
    "sub": operator.sub,
    "mul.lo": operator.mul,
    "min": min,
    "max": max,
    "div": lambda a, b: truncated(a, b) if b else -1,
    "rem": lambda a, b: a - b * truncated(a, b) if b else a,
}


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("kind", "us")
@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name, kind, bits):
    a, b = pairs(edges(bits), f"u{bits // 8}")
    got = evaluate(f"{name}.{kind}{bits} %d, %a0, %a1;", a, b, bits=bits)
    read = (lambda v: signed(int(v), bits)) if kind == "s" else int
    want = [INTEGERS[name](read(x), read(y)) % 2**bits for x, y in zip(a, b)]
    assert got.tolist() == want


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("kind", "us")
def test_halves_of_products(kind, bits):
    a, b = pairs(edges(bits), f"u{bits // 8}")
    read = (lambda v: signed(int(v), bits)) if kind == "s" else int
    exact = [read(x) * read(y) for x, y in zip(a, b)]
    got = evaluate(f"mul.hi.{kind}{bits} %d, %a0, %a1;", a, b, bits=bits)
    assert got.tolist() == [(p >> bits) % 2**bits for p in exact]
    if bits == 64:
        return
    got = evaluate(f"mul.wide.{kind}{bits} %d, %a0, %a1;", a, b, bits=2 * bits)
    assert got.tolist() == [p % 4**bits for p in exact]
    c = a.astype(f"u{bits // 4}") * 77
    got = evaluate(f"mad.wide.{kind}{bits} %d, %a0, %a1, %a2;", a, b, c, bits=2 * bits)
    assert got.tolist() == [(p + int(z)) % 4**bits for p, z in zip(exact, c)]


def test_saturated_sums():
    a, b = pairs(edges(32), "u4")
    got = evaluate("add.sat.s32 %d, %a0, %a1;", a, b).view("i4")
    sums = [signed(int(x), 32) + signed(int(y), 32) for x, y in zip(a, b)]
    assert got.tolist() == [min(max(s, -(2**31)), 2**31 - 1) for s in sums]


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_one_operand(bits):
    a = np.array(edges(bits), f"u{bits // 8}")
    top = 2**bits
    for code, want in {
        f"neg.s{bits}": lambda v: -v % top,
        f"abs.s{bits}": lambda v: abs(signed(v, bits)) % top,
        f"not.b{bits}": lambda v: top - 1 - v,
    }.items():
        assert evaluate(f"{code} %d, %a0;", a, bits=bits).tolist() == [want(int(v)) for v in a]


@pytest.mark.parametrize("bits", [32, 64])
def test_counting_bits(bits):
    a = np.array([*edges(bits), 0x0F0F00F0], f"u{bits // 8}")
    got = evaluate(f"popc.b{bits} %d, %a0;", a)
    assert got.tolist() == [bin(int(v)).count("1") for v in a]
    got = evaluate(f"clz.b{bits} %d, %a0;", a)
    assert got.tolist() == [bits - int(v).bit_length() for v in a]
    got = evaluate(f"brev.b{bits} %d, %a0;", a, bits=bits)
    assert got.tolist() == [int(f"{int(v):0{bits}b}"[::-1], 2) for v in a]


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_shifts_beyond_the_width(bits):
    amounts = [0, 1, 5, bits - 1, bits, bits + 1, 64, 65, 2**32 - 1]
    cases = list(itertools.product(edges(bits), amounts))
    a = np.array([x for x, _ in cases], f"u{bits // 8}")
    n = np.array([y for _, y in cases], "u4")
    top = 2**bits
    assert evaluate(f"shl.b{bits} %d, %a0, %a1;", a, n, bits=bits).tolist() == [
        (x << min(y, 200)) % top for x, y in cases
    ]
    assert evaluate(f"shr.u{bits} %d, %a0, %a1;", a, n, bits=bits).tolist() == [
        x >> min(y, 200) for x, y in cases
    ]
    assert evaluate(f"shr.s{bits} %d, %a0, %a1;", a, n, bits=bits).tolist() == [
        (signed(x, bits) >> min(y, 200)) % top for x, y in cases
    ]


@pytest.mark.parametrize("side", "lr")
@pytest.mark.parametrize("mode", ["wrap", "clamp"])
def test_funnel_shifts(side, mode):
    low, high = np.array([0x12345678, 0xFFFF0001], "u4"), np.array([0x9ABCDEF0, 7], "u4")
    for n in (0, 1, 4, 31, 32, 33, 63):
        by = n % 32 if mode == "wrap" else min(n, 32)
        got = evaluate(f"shf.{side}.{mode}.b32 %d, %a0, %a1, {n};", low, high)
        both = [int(h) << 32 | int(x) for x, h in zip(low, high)]
        want = [(v << by) >> 32 if side == "l" else v >> by for v in both]
        assert got.tolist() == [v % 2**32 for v in want]


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("kind", "us")
def test_extracted_fields(kind, bits):
    """The loop of the ISA, bit by bit."""
    places = [0, 1, 6, bits - 1, bits, 200, 256 + 3]
    cases = list(itertools.product([0x5A5A5A5A, 2**bits - 2, 9], places, places))
    a, start, length = (np.array(c, t) for c, t in zip(zip(*cases), (f"u{bits // 8}", "u4", "u4")))
    got = evaluate(f"bfe.{kind}{bits} %d, %a0, %a1, %a2;", a, start, length, bits=bits)

    def field(value, start, length):
        start, length, last = start & 255, length & 255, bits - 1
        sign = 0
        if kind == "s" and length:
            sign = value >> min(start + length - 1, last) & 1
        result = sum(sign << k for k in range(bits))
        for k in range(min(length, bits)):
            if start + k <= last:
                result = result & ~(1 << k) | (value >> start + k & 1) << k
        return result

    assert got.tolist() == [field(*case) for case in cases]


@pytest.mark.parametrize("bits", [32, 64])
def test_inserted_fields(bits):
    places = [0, 1, 6, bits - 1, bits, 200]
    cases = list(itertools.product([0x5A5A5A5A, 2**bits - 2], [0, 2**bits - 1, 77], places, places))
    kinds = (f"u{bits // 8}", f"u{bits // 8}", "u4", "u4")
    arrays = [np.array(c, t) for c, t in zip(zip(*cases), kinds)]
    got = evaluate(f"bfi.b{bits} %d, %a0, %a1, %a2, %a3;", *arrays, bits=bits)

    def insert(a, b, start, length):
        for k in range(length):
            if start + k < bits:
                b = b & ~(1 << start + k) | (a >> k & 1) << start + k
        return b

    assert got.tolist() == [insert(*case) for case in cases]


def test_logic():
    a, b = pairs(edges(32), "u4")
    for name, function in {"and": operator.and_, "or": operator.or_, "xor": operator.xor}.items():
        got = evaluate(f"{name}.b32 %d, %a0, %a1;", a, b)
        assert got.tolist() == [function(int(x), int(y)) for x, y in zip(a, b)]
    c = a[::-1]
    for table in (0x80, 0xFE, 0x96, 0xCA, 0x1B):
        got = evaluate(f"lop3.b32 %d, %a0, %a1, %a2, {table};", a, b, c)
        want = [
            sum(
                (table >> (4 * (x >> k & 1) + 2 * (y >> k & 1) + (z >> k & 1)) & 1) << k
                for k in range(32)
            )
            for x, y, z in zip(*(v.tolist() for v in (a, b, c)))
        ]
        assert got.tolist() == want


def test_permuted_bytes():
    a, b = np.array([0x83020100], "u4"), np.array([0x07868504], "u4")
    eight = b"".join(int(v).to_bytes(4, "little") for v in (a[0], b[0]))
    for selector in (0x3210, 0x7654, 0x0123, 0x7770, 0xBA98, 0xF5D6, 0x8008):
        want = bytearray()
        for k in range(4):
            choice = selector >> 4 * k & 15
            byte = eight[choice & 7]
            want.append((255 if byte >> 7 else 0) if choice & 8 else byte)
        got = evaluate(f"prmt.b32 %d, %a0, %a1, {selector:#x};", a, b)
        assert got[0] == int.from_bytes(want, "little"), hex(selector)
    selectors = np.array([0x3210, 0x7654], "u4")
    got = evaluate("prmt.b32 %d, %a0, %a1, %a2;", np.repeat(a, 2), np.repeat(b, 2), selectors)
    assert got.tolist() == [a[0], b[0]]


# -- floats -------------------------------------------------------------------

FORMATS = {"f16": (11, -14, 15), "bf16": (8, -126, 127), "f32": (24, -126, 127)}
FORMATS["f64"] = (53, -1022, 1023)


def width(name):
    return {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}[name]


def decode(bits, name):
    """The number that bits stand for: a Fraction, or a float for inf and NaN."""
    precision, least, most = FORMATS[name]
    bits, size = int(bits), width(name)
    sign = -1 if bits >> size - 1 else 1
    exponent = (bits >> precision - 1) & (1 << size - precision) - 1
    mantissa = bits & (1 << precision - 1) - 1
    if exponent == (1 << size - precision) - 1:
        return float("nan") if mantissa else sign * float("inf")
    if exponent:
        mantissa, exponent = mantissa | 1 << precision - 1, exponent - 1
    return sign * mantissa * Fraction(2) ** (exponent + least - precision + 1)


def encode(value, name, negative_zero=False):
    """Bits of an exact value, rounded to nearest, ties to even."""
    precision, least, most = FORMATS[name]
    size = width(name)
    sign = 1 << size - 1 if value < 0 or (value == 0 and negative_zero) else 0
    value = abs(value)
    if value == 0:
        return sign
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    exponent += (Fraction(2) ** exponent <= value) - 1
    exponent = max(exponent, least)
    scaled = round(value / Fraction(2) ** (exponent - precision + 1))  # ties to even
    bits = scaled + (exponent - least << precision - 1)
    infinity = (1 << size - 1) - (1 << precision - 1)
    return sign | min(bits, infinity)


def float_samples(name, seed=0):
    """Bits: edges of the format, and random numbers of near and far sizes."""
    precision, least, most = FORMATS[name]
    size = width(name)
    infinity = (1 << size - 1) - (1 << precision - 1)
    one = -least + 1 - 1 << precision - 1
    edges = [0, 1, 2, (1 << precision - 1) - 1, 1 << precision - 1, infinity - 1, one]
    edges += [one - 1, one + 1, one + (1 << precision - 2)]
    edges += [e | 1 << size - 1 for e in edges]
    rng = np.random.default_rng(seed)
    anything = rng.integers(0, infinity, 40).tolist()
    near = (one + rng.integers(-(3 << precision - 1), 3 << precision - 1, 80)).tolist()
    more = [v | int(s) << size - 1 for v, s in zip(anything + near, rng.integers(0, 2, 120))]
    return np.array(edges + more, f"u{size // 8}")


def exact_pairs(name):
    a = np.concatenate([float_samples(name, s) for s in range(6)])
    b = np.concatenate([np.roll(float_samples(name, s + 9), 7 * s + 1) for s in range(6)])
    return a, b


def is_finite(*values):
    return all(isinstance(v, Fraction) for v in values)


def check_rounding(got, wanted, name):
    """Bits got against exact values: equal, zeros of either sign."""
    bad = [
        (k, hex(g), value)
        for k, (g, value) in enumerate(zip(got.tolist(), wanted))
        if value is not None and g != encode(value, name) and (value != 0 or decode(g, name) != 0)
    ]
    assert not bad, bad[:3]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("code", ["add", "sub", "mul"])
def test_rounded_once(code, name):
    function = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}[code]
    a, b = exact_pairs(name)
    got = evaluate(f"{code}.{name} %d, %a0, %a1;", a, b, bits=width(name))
    check_rounding(got, [function(decode(x, name), decode(y, name)) for x, y in zip(a, b)], name)


@pytest.mark.parametrize("name", ["f32", "f64"])
def test_divided_and_rooted(name):
    a, b = exact_pairs(name)
    numbers = [(decode(x, name), decode(y, name)) for x, y in zip(a, b)]
    got = evaluate(f"div.rn.{name} %d, %a0, %a1;", a, b, bits=width(name))
    check_rounding(got, [x / y if y else None for x, y in numbers], name)
    got = evaluate(f"rcp.rn.{name} %d, %a1;", a, b, bits=width(name))
    check_rounding(got, [1 / y if y else None for _, y in numbers], name)
    positive = a & a.dtype.type((1 << width(name) - 1) - 1)
    got = evaluate(f"sqrt.rn.{name} %d, %a0;", positive, bits=width(name))
    for bits, root in zip(positive.tolist(), got.tolist()):
        # A root is right if its square is nearest: half a unit to each side.
        value, half = decode(bits, name), Fraction(1, 2)
        low, high = (decode(max(root + d, 0), name) for d in (-1, 1))
        middle = decode(root, name)
        assert ((low + middle) * half) ** 2 <= value <= ((middle + high) * half) ** 2 or not value


@pytest.mark.parametrize("name", FORMATS)
def test_fused(name):
    a, b = exact_pairs(name)
    rng = np.random.default_rng(5)
    c = np.concatenate([float_samples(name, s + 20) for s in range(6)])
    # In half of the cases c nearly cancels the product, which shows double rounding.
    products = evaluate(f"mul.{name} %d, %a0, %a1;", a, b, bits=width(name))
    flip = np.array(1 << width(name) - 1, c.dtype)
    nudge = rng.integers(-2, 3, len(c)).astype(f"i{c.itemsize}").view(c.dtype)
    c = np.where(np.arange(len(c)) % 2, (products ^ flip) + nudge, c)
    got = evaluate(f"fma.rn.{name} %d, %a0, %a1, %a2;", a, b, c, bits=width(name))
    triples = [tuple(decode(v, name) for v in row) for row in zip(a, b, c)]
    wanted = [x * y + z if is_finite(x, y, z) else None for x, y, z in triples]
    assert sum(w is not None for w in wanted) > 600
    check_rounding(got, wanted, name)


def test_fused_ties_of_float32():
    """The square is a tie, and c, far below, decides it."""
    a = np.array([1 + 2.0**-12] * 3, "f4").view("u4")
    c = np.array([2.0**-60, 0, -(2.0**-60)], "f4").view("u4")
    got = evaluate("fma.rn.f32 %d, %a0, %a0, %a1;", a, c).view("f4")
    even = np.float32(1 + 2.0**-11)
    assert got.tolist() == [np.nextafter(even, np.float32(2)), even, even]


def test_fused_ties_of_float64():
    """The product ends in half a unit, and c, far below, decides."""
    a, b = (np.full(3, 1 + 2.0**-k).view("u8") for k in (26, 27))
    c = np.array([2.0**-120, 0, -(2.0**-120)])
    got = evaluate("fma.rn.f64 %d, %a0, %a1, %a2;", a, b, c.view("u8"), bits=64).view("f8")
    even = 1 + 2.0**-26 + 2.0**-27
    assert got.tolist() == [np.nextafter(even, 2), even, even]


def test_fused_far_from_one():
    """Where a step of the fast way would overflow or become subnormal."""
    exponents = (-1060, -800, -420, -380, 0, 380, 420, 800, 1020)
    rng = np.random.default_rng(0)
    a, b = pairs([k + 2000 for k in exponents], "i8")
    a, b = (np.ldexp(1 + rng.random(len(x)), x - 2000) for x in (a, b))
    with np.errstate(all="ignore"):
        c = -a * b * (1 + rng.integers(-3, 4, len(a)) * 2.0**-50)
    a, b, c = (x.view("u8") for x in (a, b, c))
    got = evaluate("fma.rn.f64 %d, %a0, %a1, %a2;", a, b, c, bits=64)
    triples = [tuple(decode(v, "f64") for v in row) for row in zip(a, b, c)]
    wanted = [x * y + z if is_finite(x, y, z) else None for x, y, z in triples]
    check_rounding(got, wanted, "f64")


NAMES = ("-inf", "-1", "-0.0", "0.0", "1", "inf", "nan")


def special(name):
    values = [float(n) for n in NAMES]
    if name == "bf16":
        return (np.array(values, "f4").view("u4") >> 16).astype("u2")
    return np.array(values, f"f{width(name) // 8}").view(f"u{width(name) // 8}")


def canonical(name):
    return (1 << width(name) - 1) - 1


@pytest.mark.parametrize(
    ("name", "keep"), [(n, k) for n in FORMATS for k in (False, True) if (n, k) != ("f64", True)]
)
@pytest.mark.parametrize("code", ["min", "max"])
def test_extrema(code, keep, name):
    bits = special(name)
    a, b = np.repeat(bits, len(bits)), np.tile(bits, len(bits))
    suffix = ".NaN" if keep else ""
    got = evaluate(f"{code}{suffix}.{name} %d, %a0, %a1;", a, b, bits=width(name))
    order = NAMES[:-1] if code == "max" else NAMES[-2::-1]  # −0 below +0
    for one, (x, y) in zip(got, itertools.product(NAMES, repeat=2)):
        if "nan" in (x, y) and (keep or x == y):
            value = decode(one, name)
            assert value != value
            assert name == "f64" or one == canonical(name)
        else:
            numbers = [v for v in (x, y) if v != "nan"]
            want = max(numbers, key=order.index)
            assert one == bits[NAMES.index(want)], (x, y)


@pytest.mark.parametrize("name", FORMATS)
def test_comparisons(name):
    bits = special(name)
    a, b = np.repeat(bits, len(bits)), np.tile(bits, len(bits))
    numbers = [(float(x), float(y)) for x, y in itertools.product(NAMES, repeat=2)]
    for relation in ("eq", "ne", "lt", "le", "gt", "ge"):
        function = getattr(operator, relation)
        for unordered in ("", "u"):
            code = f"setp.{relation}{unordered}.{name} %p, %a0, %a1; selp.b32 %d, 1, 0, %p;"
            want = [
                bool(unordered) if np.isnan([x, y]).any() else function(x, y) for x, y in numbers
            ]
            assert evaluate(code, a, b).astype(bool).tolist() == want, relation + unordered
    for relation, want in (("nan", True), ("num", False)):
        code = f"setp.{relation}.{name} %p, %a0, %a1; selp.b32 %d, 1, 0, %p;"
        got = evaluate(code, a, b).astype(bool)
        assert got.tolist() == [want == bool(np.isnan(pair).any()) for pair in numbers]


def test_integer_comparisons():
    a, b = pairs(edges(32), "u4")
    for relation, function in {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.items():
        code = f"setp.{relation}.u32 %p, %a0, %a1; selp.b32 %d, 1, 0, %p;"
        want = [getattr(operator, function)(int(x), int(y)) for x, y in zip(a, b)]
        assert evaluate(code, a, b).astype(bool).tolist() == want
    code = "setp.lt.s32 %p, %a0, %a1; selp.b32 %d, 1, 0, %p;"
    assert evaluate(code, a, b).astype(bool).tolist() == (a.view("i4") < b.view("i4")).tolist()


def test_combined_predicates():
    a = np.array([1, 2, 3, 4], "u4")
    head = "setp.gt.u32 %q, %a0, 2; "
    for combine, want in {"and": [0, 0, 1, 0], "or": [1, 1, 1, 1], "xor": [1, 1, 0, 1]}.items():
        code = f"{head} setp.lt.{combine}.u32 %p, %a0, 4, %q; selp.b32 %d, 1, 0, %p;"
        assert evaluate(code, a).tolist() == want
    code = f"{head} setp.lt.and.u32 %p, %a0, 4, !%q; selp.b32 %d, 1, 0, %p;"
    assert evaluate(code, a).tolist() == [1, 1, 0, 0]
    code = "setp.lt.u32 %p|%q, %a0, 3; selp.b32 %d, 1, 0, %q;"
    assert evaluate(code, a).tolist() == [0, 0, 1, 1]
    code = f"{head} not.pred %p, %q; or.pred %p, %p, %q; selp.b32 %d, 5, 6, %p;"
    assert evaluate(code, a).tolist() == [5, 5, 5, 5]


def test_subnormals_are_flushed_only_on_request():
    tiny = np.array([2.0**-130, -(2.0**-130), 2.0**-100], "f4").view("u4")
    for code in ("add{}.f32 %d, %a0, 0f00000000;", "mul{}.f32 %d, %a0, 0f3F800000;"):
        assert evaluate(code.format(""), tiny).view("f4").tolist() == tiny.view("f4").tolist()
        got = evaluate(code.format(".ftz"), tiny).view("f4")
        assert got.tolist() == [0, 0, np.float32(2.0**-100)]
    assert np.signbit(evaluate("mul.ftz.f32 %d, %a0, 0f3F800000;", tiny).view("f4")).tolist() == [
        False,
        True,
        False,
    ]
    small = np.array([2.0**-70], "f4").view("u4")
    assert evaluate("mul.ftz.f32 %d, %a0, %a0;", small).tolist() == [0]
    assert evaluate("ex2.approx.ftz.f32 %d, %a0;", np.array([-127], "f4").view("u4")).tolist() == [
        0
    ]


def test_flushing_in_16_bits():
    half = np.array([1, 0x8001, 0x0400], "u2")  # two subnormal numbers, the least normal one
    for code, want in {
        "add.f16 %d, %a0, %a0;": [2, 0x8002, 0x0800],
        "add.ftz.f16 %d, %a0, %a0;": [0, 0x8000, 0x0800],
        "mul.ftz.bf16 %d, %a0, %a0;": [0, 0, 0],
    }.items():
        assert evaluate(code, half, bits=16).tolist() == want
    # A conversion flushes float32, and this is not one.
    got = evaluate("cvt.ftz.f32.f16 %d, %a0;", half[:1]).view("f4")
    assert got.tolist() == [2.0**-24]


def test_saturated_floats():
    a = np.array([-1, 0.25, 7, np.nan, np.inf], "f4").view("u4")
    got = evaluate("add.sat.f32 %d, %a0, 0f00000000;", a).view("f4")
    assert got.tolist() == [0, 0.25, 1, 0, 1]


def test_nan_is_canonical():
    a = np.array([0x7F800001, 0xFFC00000], "u4")
    assert evaluate("add.f32 %d, %a0, %a0;", a).tolist() == [0x7FFFFFFF] * 2


SPECIAL_FUNCTIONS = {
    "ex2.approx": (lambda x: mpmath.mpf(2) ** x, -140, 127),
    "lg2.approx": (lambda x: mpmath.log(x, 2), 1e-30, 1e30),
    "rsqrt.approx": (lambda x: 1 / mpmath.sqrt(x), 1e-30, 1e30),
    "sqrt.approx": (mpmath.sqrt, 1e-30, 1e30),
    "rcp.approx": (lambda x: 1 / x, 1e-30, 1e30),
    "sin.approx": (mpmath.sin, -6, 6),
    "cos.approx": (mpmath.cos, -6, 6),
    "tanh.approx": (mpmath.tanh, -8, 8),
}


@pytest.mark.parametrize("code", SPECIAL_FUNCTIONS)
def test_special_functions(code):
    """Within half an ulp, a little more for a float64 that is nearly a tie."""
    function, low, high = SPECIAL_FUNCTIONS[code]
    rng = np.random.default_rng(3)
    draw = rng.uniform(low, high, 200)
    if low > 0:
        draw = np.exp(rng.uniform(np.log(low), np.log(high), 200))
    x = draw.astype("f4")
    got = evaluate(f"{code}.f32 %d, %a0;", x.view("u4")).view("f4")
    with mpmath.workprec(120):
        for value, result in zip(x.tolist(), got):
            error = abs(mpmath.mpf(float(result)) - function(mpmath.mpf(value)))
            assert error <= 0.5000001 * float(np.spacing(abs(result))), value


@pytest.mark.parametrize(
    ("code", "x", "want"),
    [
        ("ex2.approx", ["-inf", "0.0", "inf", "nan"], ["0.0", "1", "inf", "nan"]),
        ("lg2.approx", ["-1", "0.0", "inf"], ["nan", "-inf", "inf"]),
        ("rcp.approx", ["-inf", "-0.0", "0.0", "inf"], ["-0.0", "-inf", "inf", "0.0"]),
        ("rsqrt.approx", ["-1", "-0.0", "0.0", "inf"], ["nan", "-inf", "inf", "0.0"]),
        ("sqrt.approx", ["-1", "-0.0", "inf"], ["nan", "-0.0", "inf"]),
        ("tanh.approx", ["-inf", "-0.0", "inf"], ["-1", "-0.0", "1"]),
        ("sin.approx", ["inf", "-0.0"], ["nan", "-0.0"]),
        ("abs", ["-inf", "-0.0", "-1"], ["inf", "0.0", "1"]),
        ("neg", ["inf", "0.0", "-1"], ["-inf", "-0.0", "1"]),
    ],
)
def test_corner_cases_of_the_isa(code, x, want):
    x, want = (np.array([float(v) for v in row], "f4") for row in (x, want))
    got = evaluate(f"{code}.f32 %d, %a0;", x.view("u4")).view("f4")
    np.testing.assert_array_equal(got, want)
    assert np.signbit(got[want == 0]).tolist() == np.signbit(want[want == 0]).tolist()


# -- conversions --------------------------------------------------------------

ROUNDINGS = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


@pytest.mark.parametrize(
    ("source", "to"),
    [("f32", "f16"), ("f32", "bf16"), ("f64", "f16"), ("f64", "bf16"), ("f64", "f32")],
)
@pytest.mark.parametrize("rounding", ["rn", "rz"])
def test_narrowing(source, to, rounding):
    a = np.concatenate([float_samples(source, s) for s in range(4)])
    # Ties of the narrower format, and their neighbours.
    ties = float_samples(to, 9).astype(a.dtype)
    drop = FORMATS[source][0] - FORMATS[to][0]
    if to == "bf16" and source == "f32":
        a = np.concatenate([a, *((ties << 16) + np.uint32(0x8000) + d for d in (0, 1, 2**32 - 1))])
    got = evaluate(f"cvt.{rounding}.{to}.{source} %d, %a0;", a, bits=width(to))
    values = [decode(v, source) for v in a]
    if rounding == "rn":
        check_rounding(got, [v if is_finite(v) else None for v in values], to)
        return
    assert drop > 0
    for value, bits in zip(values, got.tolist()):
        if is_finite(value):
            kept = decode(bits, to)
            assert abs(kept) <= abs(value) and kept * value >= 0
            further = decode(bits + 1, to)
            assert not is_finite(further) or abs(further) > abs(value)


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_widening_is_exact(name):
    a = np.arange(2**16, dtype="u4").astype("u2")
    got = evaluate(f"cvt.f32.{name} %d, %a0;", a, threads=1024)
    for bits, wide in zip(a[::37].tolist(), got[::37].tolist()):
        x, y = decode(bits, name), decode(wide, "f32")
        assert x == y or (x != x and y != y)


@pytest.mark.parametrize("to", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("source", ["f32", "f64"])
def test_floats_to_integers(source, to):
    bits, low = int(to[1:]), 0
    high = 2**bits - 1
    if to[0] == "s":
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    values = [0.5, 1.5, 2.5, -0.5, -1.5, -2.7, 2.7, 100.25, -129.0, 3e9, -3e9, 1e19, -1e19]
    values += [float(high), float(low), np.inf, -np.inf, np.nan]
    x = np.array(values, f"f{width(source) // 8}")
    size = max(bits, 16)
    for name, function in ROUNDINGS.items():
        got = evaluate(f"cvt.{name}.{to}.{source} %d, %a0;", x.view(f"u{x.itemsize}"), bits=size)
        for value, result in zip(x, got.tolist()):
            if np.isnan(value):
                lost = 64 in (bits, width(source))
                want = 1 << bits - 1 if lost else 0
                want = signed(want, bits) if to[0] == "s" else want
            elif np.isinf(value):
                want = high if value > 0 else low
            else:
                want = min(max(int(function(value)), low), high)
            assert result == want % 2**size, (name, value)


def test_integers_to_integers():
    a = np.array([0, 1, 127, 128, 255, 256, 32767, 32768, 65535, 2**31, 2**32 - 1], "u4")
    for code, want in {
        "cvt.s16.s8": lambda v: signed(v, 8) % 2**16,
        "cvt.u16.u8": lambda v: v % 256,
        "cvt.s32.s16": lambda v: signed(v, 16) % 2**32,
        "cvt.u16.u32": lambda v: v % 2**16,
        "cvt.s64.s32": lambda v: signed(v, 32) % 2**64,
        "cvt.u64.u32": lambda v: v,
        "cvt.s8.s32": lambda v: signed(v, 8) % 2**16,
        "cvt.sat.u8.s32": lambda v: min(max(signed(v, 32), 0), 255),
        "cvt.sat.s8.s32": lambda v: min(max(signed(v, 32), -128), 127) % 2**16,
        "cvt.sat.s32.u32": lambda v: min(v, 2**31 - 1),
    }.items():
        size = max(int(re.findall(r"\d+", code)[0]), 16)
        got = evaluate(f"{code} %d, %a0;", a, bits=size)
        assert got.tolist() == [want(int(v)) for v in a], code


@pytest.mark.parametrize("source", ["s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("to", ["f16", "f32", "f64"])
def test_integers_to_floats(source, to):
    bits = int(source[1:])
    a = np.array([*edges(bits), 2049, 4097, 16777217, 33554435], f"u{bits // 8}")
    got = evaluate(f"cvt.rn.{to}.{source} %d, %a0;", a, bits=width(to))
    read = (lambda v: signed(int(v), bits)) if source[0] == "s" else int
    check_rounding(got, [Fraction(read(v)) for v in a], to)


def test_packed_conversion_puts_the_first_source_on_top():
    a, b = (np.array([v], "f4").view("u4") for v in (1.5, -2.0))
    got = evaluate("cvt.rn.f16x2.f32 %d, %a0, %a1;", a, b)
    assert got.view("f2").tolist() == [-2.0, 1.5]
    got = evaluate("cvt.rn.bf16x2.f32 %d, %a0, %a1;", a, b)
    assert got[0] == (0x3FC0 << 16 | 0xC000)


def test_rounding_to_integers_stays_a_float():
    x = np.array([1.5, 2.5, -1.5, -0.2, 1e30], "f4")
    for name, function in ROUNDINGS.items():
        got = evaluate(f"cvt.{name}.f32.f32 %d, %a0;", x.view("u4")).view("f4")
        assert got.tolist() == function(x).tolist()


def test_tf32_rounds_ties_away():
    a = np.array([0x3F800FFF, 0x3F801000, 0x3F803000, 0xBF801000], "u4")
    got = evaluate("cvt.rna.tf32.f32 %d, %a0;", a)
    assert [hex(v) for v in got] == ["0x3f800000", "0x3f802000", "0x3f804000", "0xbf802000"]


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_packed_is_twice_the_scalar(name):
    a, b = exact_pairs(name)
    a, b = a[: len(a) // 2 * 2], b[: len(b) // 2 * 2]
    for code in ("add", "mul", "min", "max.NaN"):
        scalar = evaluate(f"{code}.{name} %d, %a0, %a1;", a, b, bits=16)
        packed = evaluate(f"{code}.{name}x2 %d, %a0, %a1;", a.view("u4"), b.view("u4"))
        assert packed.view("u2").tolist() == scalar.tolist()
    got = evaluate(
        f"setp.lt.{name}x2 %p|%q, %a0, %a1; selp.b32 %t0, 1, 0, %p; selp.b32 %t1, 2, 0, %q;"
        "or.b32 %d, %t0, %t1;",
        a.view("u4"),
        b.view("u4"),
    )
    less = evaluate(f"setp.lt.{name} %p, %a0, %a1; selp.b32 %d, 1, 0, %p;", a, b)
    assert got.tolist() == (less[::2] + 2 * less[1::2]).tolist()


def test_moves():
    a = np.array([0x11223344, 0xAABBCCDD], "u4")
    assert evaluate("mov.b32 {%h0, %h1}, %a0; mov.b32 %d, {%h1, %h0};", a).tolist() == [
        0x33441122,
        0xCCDDAABB,
    ]
    got = evaluate("mov.b64 %d, {%a0, 0x7};", a, bits=64)
    assert got.tolist() == [7 << 32 | int(v) for v in a]
    assert evaluate("mov.b64 %w0, {1, %a0}; mov.b64 {_, %d}, %w0;", a).tolist() == a.tolist()
    got = evaluate("mov.f64 %d, 0d3FF8000000000000;", a, bits=64)
    assert got.view("f8").tolist() == [1.5, 1.5]
    assert evaluate("mov.u32 %d, 0x10U; add.u32 %d, %d, 010;", a).tolist() == [24, 24]


def test_special_registers():
    text = """
    .entry who(.param .u64 out) .reqntid 64 {
        .reg .b32 %r<9>; .reg .b64 %rd<3>;
        ld.param.u64 %rd1, [out];
        mov.u32 %r0, %ctaid.x; mov.u32 %r1, %ctaid.y; mov.u32 %r2, %ctaid.z;
        mov.u32 %r3, %nctaid.x; mov.u32 %r4, %tid.x; mov.u32 %r8, %nctaid.y;
        mad.lo.u32 %r5, %r2, %r8, %r1; mad.lo.u32 %r5, %r5, %r3, %r0;
        mad.lo.u32 %r5, %r5, 64, %r4;
        mul.wide.u32 %rd2, %r5, 16; add.s64 %rd1, %rd1, %rd2;
        mov.u32 %r6, %laneid; mov.u32 %r7, %warpid;
        mad.lo.u32 %r0, %r1, 100, %r0; mad.lo.u32 %r0, %r2, 10000, %r0;
        st.global.v4.b32 [%rd1], {%r0, %r4, %r6, %r7};
    }"""
    memory = Memory()
    memory.add("out", np.zeros((2, 3, 5, 64, 4), "u4"), known=False)
    execute(Program(text), (5, 3, 2), ["out"], memory)
    z, y, x, t = np.indices((2, 3, 5, 64))
    want = np.stack([10000 * z + 100 * y + x, t, t % 32, t // 32], -1)
    assert np.array_equal(memory["out"], want)


def test_parameters():
    text = """
    .entry all(.param .u64 out, .param .f32 f, .param .u8 b, .param .s32 i, .param .f64 d)
    .reqntid 32 {
        .reg .b32 %r<4>; .reg .b64 %rd<3>; .reg .b16 %h<2>;
        ld.param.u64 %rd1, [out]; ld.param.f32 %r1, [f]; ld.param.u8 %h1, [b];
        ld.param.s32 %r2, [i]; ld.param.f64 %rd2, [d];
        cvt.u32.u16 %r3, %h1;
        st.global.b32 [%rd1], %r1; st.global.b32 [%rd1+4], %r2;
        st.global.b64 [%rd1+8], %rd2; st.global.b32 [%rd1+16], %r3;
    }"""
    memory = Memory()
    memory.add("out", np.zeros(24, "u1"), known=False)
    execute(Program(text), 1, ["out", 1.5, 200, -3, 0.1], memory)
    raw = memory["out"]
    assert raw[:4].view("f4")[0] == 1.5 and raw[4:8].view("i4")[0] == -3
    assert raw[8:16].view("f8")[0] == 0.1 and raw[16] == 200
    with pytest.raises(ValueError, match="2 given, kernel all has 5 parameters"):
        execute(Program(text), 1, ["out", 1.5], memory)


# -- control flow -------------------------------------------------------------


def test_branches_meet_again():
    """Nested, with a loop of different length in each thread, and an early end."""
    a = np.arange(128, dtype="u4")
    code = """
        mov.u32 %d, 0;
        setp.ge.u32 %p, %a0, 100;
        @%p bra BIG;
        and.b32 %t0, %a0, 7;
    LOOP:
        setp.eq.u32 %p, %t0, 0;
        @%p bra OUT;
        sub.u32 %t0, %t0, 1;
        and.b32 %t1, %t0, 1;
        setp.eq.u32 %q, %t1, 1;
        @%q bra LOOP;
        add.u32 %d, %d, 10;
        bra.uni LOOP;
    BIG:
        @!%p bra NEVER;
        add.u32 %d, %d, 1000;
        bra.uni OUT;
    NEVER:
        trap;
    OUT:
        @%p add.u32 %d, %d, 1;
    """
    evens = [len([k for k in range(int(v) & 7) if k % 2 == 0]) for v in a]
    want = [1001 if v >= 100 else 10 * e + 1 for v, e in zip(a, evens)]
    for threads in (32, 128):
        assert evaluate(code, a, threads=threads).tolist() == want


def test_a_loop_waits_for_its_last_thread():
    text = """.entry k() .reqntid 32 { .reg .pred %p; .reg .b32 %r;
        mov.u32 %r, %tid.x;
    LOOP:
        setp.eq.u32 %p, %r, 0;
        @%p bra DONE;
        sub.u32 %r, %r, 1;
        bra.uni LOOP;
    DONE:
        ret; }"""
    seen = []

    def watch(i, active):
        seen.append((i.opcode, active.sum()))

    counters = execute(Program(text), 1, [], Memory(), watch=watch)
    assert counters["instructions"] == 1 + 31 * 4 + 2 + 1 == len(seen)
    assert seen[0] == ("mov", 32) and seen[-1] == ("ret", 32)
    assert [n for opcode, n in seen if opcode == "sub"] == list(range(31, 0, -1))


def test_programs_in_one_batch_part_and_meet():
    text = """.entry k(.param .u64 out) .reqntid 32 {
        .reg .pred %p; .reg .b32 %r<4>; .reg .b64 %x<3>;
        ld.param.u64 %x0, [out]; mov.u32 %r0, %ctaid.x; mov.u32 %r1, %tid.x;
        mad.lo.u32 %r2, %r0, 32, %r1; mad.wide.u32 %x1, %r2, 4, %x0;
        setp.gt.u32 %p, %r0, 2;
        @%p bra HIGH;
        mov.u32 %r3, 7;
        bra.uni STORE;
    HIGH:
        mov.u32 %r3, 9;
    STORE:
        st.global.b32 [%x1], %r3; }"""
    memory = Memory()
    memory.add("out", np.zeros((300, 32), "u4"), known=False)
    counters = execute(Program(text), 300, ["out"], memory)
    assert (memory["out"] == np.where(np.arange(300) > 2, 9, 7)[:, None]).all()
    assert counters["global_store_requests"] == 300


def test_an_endless_loop_ends():
    text = ".entry k() .reqntid 32 {\nHERE:\n bra.uni HERE;\n}"
    with pytest.raises(Fault, match="still running after 50 steps") as caught:
        execute(Program(text), 1, [], Memory(), limit=50)
    assert caught.value.kind == "deadlock" and str(caught.value.line) == "ptx:3"


def test_trap():
    with pytest.raises(Fault, match="thread 3 of program") as caught:
        evaluate("setp.eq.u32 %p, %a0, 3; @%p trap; mov.u32 %d, 1;", np.arange(32, dtype="u4"))
    assert caught.value.kind == "trap"


# -- exchange between threads -------------------------------------------------


def isa_shuffle(mode, lane, b, clamp):
    """The pseudocode of the ISA: the source lane, and the predicate."""
    segment, bound = clamp >> 8 & 31, clamp & 31
    last, first = lane & segment | bound & ~segment, lane & segment
    j = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": first | b & ~segment}[mode]
    inside = j >= last if mode == "up" else j <= last
    return (j if inside else lane), inside


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("parts", [1, 2, 8])
def test_shuffles(mode, parts):
    a = np.random.default_rng(1).integers(0, 2**32, 64, dtype="u4")
    clamp = (32 - 32 // parts) << 8 | (0 if mode == "up" else 31)
    for b in (0, 1, 5, 16, 31):
        code = f"shfl.sync.{mode}.b32 %t0|%p, %a0, {b}, {clamp}, -1; selp.b32 %t1, 1, 0, %p;"
        sources = [isa_shuffle(mode, lane, b, clamp) for lane in range(32)]
        got = evaluate(f"{code} mov.b32 %d, %t0;", a, threads=64)
        assert got.tolist() == [int(a[w + j]) for w in (0, 32) for j, _ in sources]
        got = evaluate(f"{code} mov.b32 %d, %t1;", a, threads=64)
        assert got.tolist() == 2 * [int(inside) for _, inside in sources]


def test_a_shuffle_by_a_register():
    a = np.arange(32, dtype="u4")
    lanes = np.random.default_rng(2).permutation(32).astype("u4")
    got = evaluate("shfl.sync.idx.b32 %d, %a0, %a1, 31, -1;", a, lanes)
    assert got.tolist() == lanes.tolist()


def test_a_shuffle_waits_for_its_warp():
    """The mask names all; those who arrive first wait for the others."""
    code = """
        setp.lt.u32 %p, %a0, 8;
        @!%p bra THERE;
        add.u32 %a0, %a0, 100;
    THERE:
        shfl.sync.bfly.b32 %d, %a0, 16, 31, -1;
    """
    got = evaluate(code, np.arange(32, dtype="u4"))
    values = [v + 100 if v < 8 else v for v in range(32)]
    assert got.tolist() == [values[k ^ 16] for k in range(32)]


def test_a_shuffle_waits_for_those_who_come_from_below():
    """Lanes 0 … 7 are there first, the others jump back to them."""
    code = """
        setp.lt.u32 %p, %a0, 8;
        @!%p bra BELOW;
    BACK:
        shfl.sync.bfly.b32 %d, %a0, 16, 31, -1;
        bra.uni END;
    BELOW:
        add.u32 %a0, %a0, 100;
        bra.uni BACK;
    END:
    """
    got = evaluate(code, np.arange(32, dtype="u4"))
    values = [v if v < 8 else v + 100 for v in range(32)]
    assert got.tolist() == [values[k ^ 16] for k in range(32)]


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("@%p shfl.sync.bfly.b32 %d, %a0, 1, 31, -1;", "waits for ever"),
        ("@%p ret; shfl.sync.bfly.b32 %d, %a0, 1, 31, -1;", "waits for a thread that has ended"),
        ("shfl.sync.bfly.b32 %d, %a0, 1, 31, 0xffff;", "is not in its own mask"),
        ("@%p shfl.sync.bfly.b32 %d, %a0, 16, 31, 0xff;", "reads lane 16, which takes no part"),
    ],
)
def test_shuffles_that_the_isa_leaves_undefined(code, what):
    with pytest.raises(Fault, match=what):
        evaluate(f"setp.lt.u32 %p, %a0, 8; mov.u32 %d, 0; {code}", np.arange(32, dtype="u4"))


def test_shuffles_are_counted_by_mode_and_mask():
    text = """.entry k() .reqntid 64 { .reg .b32 %r<4>;
        mov.u32 %r0, %tid.x;
        shfl.sync.bfly.b32 %r1, %r0, 8, 31, -1;
        shfl.sync.bfly.b32 %r1, %r0, 8, 31, -1;
        shfl.sync.idx.b32 %r1, %r0, %r0, 31, -1; }"""
    counters = execute(Program(text), 3, [], Memory())
    assert counters.shuffles == {("bfly", 8): 12, ("idx", "register"): 6}
    assert counters["shuffles"] == 18 and counters["instructions"] == 5 * 6


# -- memory and its counters --------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "count"), [(8 * b, c) for b in (1, 2, 4, 8) for c in (1, 2, 4) if b * c <= 16]
)
def test_loads_and_stores(bits, count):
    size, kind = bits * count // 8, max(bits, 16)
    registers = ", ".join(f"%r{k}" for k in range(count))
    vector = f".v{count}" if count > 1 else ""
    listed = f"{{{registers}}}" if count > 1 else registers
    text = f""".entry k(.param .u64 x, .param .u64 out) .reqntid 32
    {{ .reg .b{kind} %r<4>; .reg .b32 %t; .reg .b64 %x<3>;
        .shared .align 16 .b8 tile[1024];
        ld.param.u64 %x0, [x]; ld.param.u64 %x1, [out]; mov.u32 %t, %tid.x;
        mad.wide.u32 %x0, %t, {size}, %x0; mad.wide.u32 %x1, %t, {size}, %x1;
        mul.lo.u32 %t, %t, {size};
        ld.global.nc.L1::evict_last{vector}.b{bits} {listed}, [%x0];
        st.shared{vector}.b{bits} [%t], {listed};
        bar.sync 0;
        ld.volatile.shared{vector}.b{bits} {listed}, [%t+0];
        st.global.cs{vector}.b{bits} [ %x1 + 0 ], {listed};
    }}"""
    memory = Memory()
    raw = np.random.default_rng(0).integers(0, 256, 32 * size, dtype="u1")
    memory.add("x", raw, writable=False)
    memory.add("out", np.zeros_like(raw), known=False)
    counters = execute(Program(text), 1, ["x", "out"], memory)
    assert np.array_equal(memory["out"], raw)
    phases = max(1, size // 4)
    assert counters.total == {
        "barriers": 1,
        "instructions": 12,
        "global_load_requests": 1,
        "global_load_bytes": 32 * size,
        "global_load_sectors": size,
        "global_store_requests": 1,
        "global_store_bytes": 32 * size,
        "global_store_sectors": size,
        "shared_load_requests": 1,
        "shared_load_bytes": 32 * size,
        "shared_load_wavefronts": phases,
        "shared_store_requests": 1,
        "shared_store_bytes": 32 * size,
        "shared_store_wavefronts": phases,
    }


def test_signed_loads_extend_the_sign():
    text = """.entry k(.param .u64 x, .param .u64 out) .reqntid 32
    { .reg .b32 %r<4>; .reg .b64 %x<3>;
        ld.param.u64 %x0, [x]; ld.param.u64 %x1, [out]; mov.u32 %r0, %tid.x;
        cvt.u64.u32 %x2, %r0; add.s64 %x0, %x0, %x2; mad.wide.u32 %x1, %r0, 8, %x1;
        ld.global.s8 %r1, [%x0]; ld.global.u8 %r2, [%x0];
        st.global.v2.b32 [%x1], {%r1, %r2}; }"""
    memory = Memory()
    memory.add("x", np.arange(-16, 16, dtype="i1"))
    memory.add("out", np.zeros((32, 2), "i4"), known=False)
    execute(Program(text), 1, ["x", "out"], memory)
    assert memory["out"].tolist() == [[v, v % 256] for v in range(-16, 16)]


def test_sectors_by_brute_force():
    rng = np.random.default_rng(0)
    for size in (1, 2, 4, 8, 16):
        at = rng.integers(0, 400, (50, 32)) * size
        active = rng.random((50, 32)) < rng.random((50, 1))
        want = [len({a // 32 for a, on in zip(*row) if on}) for row in zip(at, active)]
        assert ptx.sectors(at, active).tolist() == want


@pytest.mark.parametrize(
    ("at", "size", "want"),
    [
        (4 * np.arange(32), 4, 4),  # a coalesced request of 128 bytes
        (8 * np.arange(32), 4, 8),  # every second word
        (16 * np.arange(32), 16, 16),
        (4 + 4 * np.arange(32), 4, 5),  # the same 128 bytes, not aligned to a sector
        (2 * np.arange(32), 2, 2),
        (np.arange(32), 1, 1),
        (0 * np.arange(32), 4, 1),
        (4096 * np.arange(32), 4, 32),
    ],
)
def test_known_sectors(at, size, want):
    assert ptx.sectors(at[None], np.ones((1, 32), bool)).tolist() == [want]


@pytest.mark.parametrize(
    ("at", "size", "excess"),
    [
        (4 * np.arange(32), 4, 0),
        (128 * np.arange(32), 4, 31),  # one bank
        (132 * np.arange(32), 4, 0),  # a padded row
        (8 * np.arange(32), 4, 1),
        (8 * np.arange(32), 8, 0),
        (16 * np.arange(32), 16, 0),
        (32 * np.arange(32), 16, 4),  # eight lanes over 256 bytes, two passes a phase
        (0 * np.arange(32), 16, 0),
    ],
)
def test_known_excess(at, size, excess):
    counters = store_at(at, size, np.ones(32, bool))
    phases = max(1, size // 4)
    assert counters["shared_store_excess"] == excess
    assert counters["shared_store_wavefronts"] == phases + excess
    assert counters["shared_store_requests"] == 1


def store_at(at, size, active):
    """Counters of a store to shared memory by those threads that are active."""
    words = max(size // 4, 1)
    vector, value = (f".v{words}", "{" + ", ".join(words * ["0"]) + "}")
    vector, value = (vector, value) if words > 1 else ("", "0")
    text = f""".entry k(.param .u64 at, .param .u64 on) .reqntid 32
    {{ .shared .align 16 .b8 tile[8192]; .reg .b32 %r<3>; .reg .b64 %x<3>; .reg .pred %p;
        ld.param.u64 %x0, [at]; ld.param.u64 %x1, [on]; mov.u32 %r0, %tid.x;
        mad.wide.u32 %x0, %r0, 4, %x0; mad.wide.u32 %x1, %r0, 4, %x1;
        ld.global.b32 %r1, [%x0]; ld.global.b32 %r2, [%x1];
        setp.ne.u32 %p, %r2, 0;
        @%p st.shared{vector}.b{min(8 * size, 32)} [%r1], {value}; }}"""
    memory = Memory()
    memory.add("at", at.astype("u4"))
    memory.add("on", active.astype("u4"))
    return execute(Program(text), 1, ["at", "on"], memory)


def test_wavefronts_of_part_of_a_warp():
    """Bank by bank, with sets; each phase by itself; the others point anywhere."""
    rng = np.random.default_rng(0)
    for size, _ in itertools.product((4, 8, 16), range(8)):
        active = rng.random(32) < rng.random()
        at = np.where(active, rng.integers(0, 300, 32) * size, 99999)
        lanes = 128 // size
        want = least = 0
        for start in range(0, 32, lanes):
            words = {
                a // 4 + k
                for a, on in zip(at[start : start + lanes], active[start : start + lanes])
                if on
                for k in range(size // 4)
            }
            want += max(sum(w % 32 == bank for w in words) for bank in range(32))
            least += bool(words)
        counters = store_at(at, size, active)
        assert counters["shared_store_wavefronts"] == want
        assert counters["shared_store_excess"] == want - least


def test_nothing_is_counted_for_warps_that_are_switched_off():
    text = """.entry k(.param .u64 x) .reqntid 64 { .reg .b32 %r; .reg .b64 %x; .reg .pred %p;
        ld.param.u64 %x, [x]; mov.u32 %r, %tid.x; setp.lt.u32 %p, %r, 8;
        mad.wide.u32 %x, %r, 4, %x;
        @%p ld.global.b32 %r, [%x]; }"""
    memory = Memory()
    memory.add("x", np.zeros(8, "u4"))
    counters = execute(Program(text), 1, ["x"], memory)
    assert counters["global_load_requests"] == 1 and counters["global_load_sectors"] == 1
    assert counters["global_load_bytes"] == 32 and counters["instructions"] == 12


# -- faults -------------------------------------------------------------------

SHARED_KERNEL = """.entry k(.param .u64 out) .reqntid THREADS
{{ .shared .align 16 .b8 tile[1024];
    .reg .b32 %r<9>; .reg .b64 %x<3>; .reg .pred %p<4>;
    ld.param.u64 %x0, [out];
    mov.u32 %r0, %tid.x; shl.b32 %r1, %r0, 2; xor.b32 %r2, %r1, 4; mov.u32 %r3, %laneid;
    {}
}}"""


def shared(code, threads=64):
    """Run lines on a program with shared memory; the fault, or None."""
    memory = Memory()
    memory.add("out", np.zeros(64, "u4"), known=False)
    text = SHARED_KERNEL.format(code).replace("THREADS", str(threads))
    try:
        execute(Program(text), 2, ["out"], memory)
    except Fault as fault:
        return fault
    return None


RACES = {
    # Own cells, ordered cells, equal values, disjoint bytes: none of these is one.
    "own": ("st.shared.b32 [%r1], %r0; ld.shared.b32 %r4, [%r1];", None),
    "barrier": ("st.shared.b32 [%r1], %r0; bar.sync 0; ld.shared.b32 %r4, [%r2];", None),
    "readers": (
        "st.shared.b32 [%r1], %r0; bar.sync 0; ld.shared.b32 %r4, [0]; ld.shared.b32 %r4, [%r2];",
        None,
    ),
    "equal values": ("mov.u32 %r4, 7; st.shared.b32 [8], %r4; st.shared.b32 [8], %r4;", None),
    "bytes": ("cvt.u16.u32 %h, %r0; st.shared.b8 [%r0], %h;", None),
    "warp barrier": (
        "st.shared.b32 [%r1], %r0; bar.warp.sync -1; ld.shared.b32 %r4, [%r2];"
        "bar.warp.sync -1; st.shared.b32 [%r1], %r4;",
        None,
    ),
    # And these are.
    "write, read": ("st.shared.b32 [%r1], %r0; ld.shared.b32 %r4, [%r2];", "reads byte 4 .*wrote"),
    "read, write": (
        "st.shared.b32 [%r1], %r0; bar.sync 0; ld.shared.b32 %r4, [%r2]; st.shared.b32 [%r1], 1;",
        "writes byte 0 .*read",
    ),
    "many readers": (
        "st.shared.b32 [%r1], %r0; bar.sync 0; ld.shared.b32 %r4, [0];"
        "setp.eq.u32 %p0, %r0, 0; @%p0 st.shared.b32 [0], 9;",
        "writes byte 0 .*other threads read",
    ),
    "write, write": (
        "st.shared.b32 [%r1], %r0; st.shared.b32 [%r2], %r0;",
        "writes byte 4 .*thread 1 wrote",
    ),
    "in one instruction": ("st.shared.b32 [8], %r0;", "write different values to one place"),
    "wider": (
        "st.shared.b32 [%r1], %r0; and.b32 %r4, %r1, 0xf8;"
        "ld.shared.v2.b32 {%r5, %r6}, [%r4];",
        "reads byte 4 ",
    ),
    "after one barrier": (
        "st.shared.b32 [%r1], %r0; bar.sync 0; st.shared.b32 [%r1], 5; ld.shared.b32 %r4, [%r2];",
        "reads byte 4 ",
    ),
    "a shuffle is no barrier": (
        "st.shared.b32 [%r1], %r0; shfl.sync.idx.b32 %r4, %r0, 0, 31, -1;"
        "ld.shared.b32 %r4, [%r2];",
        "reads byte 4 ",
    ),
    "another warp after a warp barrier": (
        "st.shared.b32 [%r1], %r0; bar.warp.sync -1; xor.b32 %r4, %r1, 128;"
        "ld.shared.b32 %r4, [%r4];",
        "reads byte 128 .*thread 32 wrote",
    ),
    "readers of two warps": (
        "st.shared.b32 [%r1], %r0; bar.sync 0; setp.eq.u32 %p0, %r0, 0; setp.eq.u32 %p1, %r0, 32;"
        "@%p0 ld.shared.b32 %r4, [0]; @%p1 ld.shared.b32 %r4, [0]; bar.warp.sync -1;"
        "@%p1 st.shared.b32 [0], 9;",
        "writes byte 0 .*other threads read",
    ),
    "atomic and store": (
        "st.shared.b32 [%r1], 0; atom.shared.add.u32 %r4, [%r2], 1;",
        "updates byte 4 .*thread 1 wrote",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RACES)
def test_races(name):
    code, want = RACES[name]
    fault = shared(code.replace("%h", "%h0").replace("cvt", ".reg .b16 %h0; cvt", 1))
    if want is None:
        assert fault is None, fault
        return
    assert fault is not None and fault.kind == "race"
    assert re.search(want, str(fault), re.S), fault


def test_a_race_names_both_lines():
    fault = shared("st.shared.b32 [%r1], %r0;\n\n ld.shared.b32 %r4, [%r2];")
    here, there = fault.line.number, int(re.search(r"wrote it at ptx:(\d+)", str(fault))[1])
    assert here == there + 2
    assert "st.shared.b32 [%r1], %r0" in str(fault) and "ld.shared.b32 %r4" in str(fault)


@pytest.mark.parametrize(
    ("code", "kind", "what"),
    [
        ("ld.shared.b32 %r4, [%r1];", "uninitialised", "thread 0 .* byte 0 of shared memory"),
        ("st.shared.b32 [%r1+1000], %r0;", "out of bounds", "thread 6 .* byte 1024 of shared"),
        ("st.shared.b32 [%r1+-4], %r0;", "out of bounds", "byte -4 of shared"),
        ("st.shared.b32 [%r1+2], %r0;", "misaligned", "no multiple of 4"),
        ("st.shared.v2.b32 [%r1], {%r0, %r0};", "misaligned", "thread 1 .* no multiple of 8"),
        ("st.global.b32 [%x0+4096], %r0;", "out of bounds", "byte 4096 of 'out' .256 bytes"),
        ("st.global.b32 [%x0+-4], %r0;", "out of bounds", "byte -4 of 'out'"),
        ("mov.b64 %x1, 64; ld.global.b32 %r4, [%x1];", "out of bounds", "where no array is"),
        ("ld.global.b32 %r4, [%x0+12];", "uninitialised", "byte 12 of 'out'"),
        ("st.global.b32 [%x0], %r0;", "race", "thread 0 .* and thread 63 .* different values"),
        ("setp.lt.u32 %p0, %r0, 40; @%p0 bar.sync 0;", "divergence", "without thread 40"),
        ("setp.lt.u32 %p0, %r0, 32; @%p0 bar.sync 0;", "deadlock", "thread 32 does not come"),
        ("setp.lt.u32 %p0, %r0, 32; @%p0 ret; bar.sync 0;", "deadlock", "thread 0 does not come"),
    ],
)
def test_faults(code, kind, what):
    fault = shared(code)
    assert fault is not None and fault.kind == kind
    assert re.search(what, str(fault)), fault
    assert "of program (0, 0, 0)" in str(fault) and str(fault.line) in str(fault)


def test_what_was_written_is_known():
    assert shared("st.global.b32 [%x0+12], 5; ld.global.b32 %r4, [%x0+12];") is None


def test_part_of_what_is_read_is_unknown():
    fault = shared("st.global.b32 [%x0], 5; ld.global.v2.b32 {%r4, %r5}, [%x0];")
    assert fault.kind == "uninitialised"


def test_the_fault_names_the_program():
    text = """.entry k(.param .u64 x) .reqntid 32 { .reg .b32 %r<2>; .reg .b64 %x;
        ld.param.u64 %x, [x]; mov.u32 %r0, %ctaid.y; mad.wide.u32 %x, %r0, 64, %x;
        ld.global.b32 %r1, [%x]; }"""
    memory = Memory()
    memory.add("x", np.zeros(64, "u4"))
    with pytest.raises(Fault, match=r"thread 0 of program \(0, 4, 0\) reads 4 bytes at byte 256"):
        execute(Program(text), (2, 9), ["x"], memory)


def test_named_barriers_for_a_part():
    """Two warps of four meet twice, the others not at all."""
    code = """
        setp.ge.u32 %p0, %r0, 64;
        @%p0 bra END;
        st.shared.b32 [%r1], %r0;
        bar.sync 1, 64;
        xor.b32 %r4, %r1, 128;
        ld.shared.b32 %r5, [%r4];
        mad.wide.u32 %x0, %r0, 4, %x0;
        st.global.b32 [%x0], %r5;
    END:
        ret;
    """
    assert shared(code, threads=128) is None


def test_a_barrier_counts_arrivals_at_different_places():
    """bar.sync names a barrier and not a place in the code."""
    code = """
        setp.ge.u32 %p0, %r0, 32;
        st.shared.b32 [%r1], %r0;
        @%p0 bra SECOND;
        bar.sync 0;
        bra.uni MEET;
    SECOND:
        bar.sync 0;
    MEET:
        xor.b32 %r4, %r1, 128;
        ld.shared.b32 %r5, [%r4];
    """
    assert shared(code) is None


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("addc.u32 %r4, %r0, %r0;", "addc is not supported"),
        ("add.rz.f32 %r4, %r0, %r0;", "add.rz is not supported"),
        ("ld.global.v2.frobnicate.b32 %r4, [%x0];", "ld.frobnicate is not supported"),
        ("mov.u32 %r4, %clock;", "register %clock is not supported"),
        ("ld.param.u32 %r4, [out+4];", "a part of a parameter is not supported"),
        ("bar.arrive 0, 64;", "this form of a barrier is not supported"),
        ("cvt.rn.bf16.s64 %r4, %x0;", "a 64-bit integer as bf16 is not supported"),
        ("rcp.approx.ftz.f64 %x1, %x0;", "the coarse approximation in float64"),
    ],
)
def test_what_is_not_known_is_named(code, what):
    with pytest.raises(NotImplementedError, match=re.escape(what)) as caught:
        shared(code)
    assert code.rstrip(";") in str(caught.value) and str(caught.value).startswith("ptx:")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (".func f() {}", "no .entry"),
        (".entry k() { ret; }", "kernel k has no .reqntid"),
        (".entry k() .reqntid 48 { ret; }", "a multiple of 32"),
        (".entry k() .reqntid 32, 4, 1 { ret; }", "is 32, 4, 1; one dimension"),
    ],
)
def test_texts_that_are_no_kernel(text, what):
    with pytest.raises(ValueError, match=what):
        Program(text)


def test_names_in_memory_are_unique():
    memory = Memory()
    memory.add("x", np.zeros(3))
    with pytest.raises(ValueError, match="an array 'x' already"):
        memory.add("x", np.zeros(3))
    with pytest.raises(KeyError, match="no array 'y' in memory, only x"):
        memory.address("y")
    with pytest.raises(KeyError, match="no array 'y'"):
        memory["y"]


def test_memory_keeps_arrays_of_any_kind():
    memory = Memory()
    arrays = {
        "empty": np.zeros((0, 3)),
        "scalar": np.float16(2.5),
        "turned": np.arange(6).reshape(2, 3).T,
        "bool": np.array([True, False]),
    }
    addresses = [memory.add(name, array) for name, array in arrays.items()]
    assert all(a % 256 == 0 for a in addresses)
    for name, array in arrays.items():
        assert np.array_equal(memory[name], array) and memory[name].dtype == array.dtype


# -- atomics and copies -------------------------------------------------------


@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomics(space):
    text = f""".entry k(.param .u64 out, .param .u64 old) .reqntid 32
    {{ .shared .align 16 .b8 tile[64]; .reg .b32 %r<9>; .reg .b64 %x<4>; .reg .pred %p;
        ld.param.u64 %x0, [out]; ld.param.u64 %x1, [old]; mov.u32 %r0, %tid.x;
        setp.eq.u32 %p, %r0, 0;
        {"st.shared.b32 [0], 10; bar.sync 0;" if space == "shared" else ""}
        atom.{space}.add.u32 %r1, [{"0" if space == "shared" else "%x0"}], %r0;
        mad.wide.u32 %x1, %r0, 4, %x1; st.global.b32 [%x1], %r1;
        {
        "bar.sync 0; ld.shared.b32 %r2, [0]; st.global.b32 [%x0], %r2;" if space == "shared" else ""
    } }}"""
    memory = Memory()
    memory.add("out", np.array([10], "u4"))
    memory.add("old", np.zeros(32, "u4"), known=False)
    counters = execute(Program(text), 1, ["out", "old"], memory)
    assert memory["out"].tolist() == [10 + sum(range(32))]
    assert memory["old"].tolist() == [10 + sum(range(k)) for k in range(32)]
    assert counters[f"{space}_atomic_requests"] == 1


def test_kinds_of_atomics():
    def update(code, start, value):
        text = f""".entry k(.param .u64 out) .reqntid 32 {{ .reg .b32 %r<4>; .reg .b64 %x<3>;
            .reg .pred %p; ld.param.u64 %x0, [out]; mov.u32 %r0, %tid.x;
            setp.eq.u32 %p, %r0, 0; @%p {code} }}"""
        memory = Memory()
        memory.add("out", np.array([start], "u4"))
        execute(Program(text), 1, ["out"], memory)
        assert memory["out"].tolist() == [value], code

    update("atom.global.min.s32 %r1, [%x0], -5;", 3, 2**32 - 5)
    update("atom.global.min.u32 %r1, [%x0], -5;", 3, 3)
    update("atom.global.max.s32 %r1, [%x0], -5;", 3, 3)
    update("red.global.or.b32 [%x0], 12;", 3, 15)
    update("atom.global.exch.b32 %r1, [%x0], 12;", 3, 12)
    update("atom.global.cas.b32 %r1, [%x0], 3, 12;", 3, 12)
    update("atom.global.cas.b32 %r1, [%x0], 4, 12;", 3, 3)
    update("atom.global.inc.u32 %r1, [%x0], 3;", 3, 0)
    update("atom.global.dec.u32 %r1, [%x0], 3;", 0, 3)
    update("atom.global.acq_rel.gpu.add.f32 %r1, [%x0], 0f3F800000;", 0x3F800000, 0x40000000)


COPY_KERNEL = """.entry k(.param .u64 x, .param .u64 out) .reqntid 32
{{ .shared .align 16 .b8 tile[1024]; .reg .b32 %r<9>; .reg .b64 %x<4>; .reg .pred %p;
    ld.param.u64 %x0, [x]; ld.param.u64 %x1, [out]; mov.u32 %r0, %tid.x;
    shl.b32 %r1, %r0, 4; shl.b32 %r3, %r0, 2;
    mad.wide.u32 %x0, %r0, 16, %x0; mad.wide.u32 %x1, %r0, 4, %x1;
    setp.lt.u32 %p, %r0, 20; selp.b32 %r4, 16, 0, %p;
    cp.async.cg.shared.global [%r1], [%x0], 16, %r4;
    cp.async.commit_group;
    cp.async.ca.shared.global [%r3+512], [%x0+4], 4;
    cp.async.commit_group;
    {}
    st.global.b32 [%x1], %r2;
}}"""


def copied(code):
    memory = Memory()
    memory.add("x", np.arange(128, dtype="u4"))
    memory.add("out", np.zeros(32, "u4"), known=False)
    execute(Program(COPY_KERNEL.format(code)), 1, ["x", "out"], memory)
    return memory["out"].tolist()


def test_asynchronous_copies():
    got = copied("cp.async.wait_group 1; ld.shared.b32 %r2, [%r1];")
    assert got == [4 * k if k < 20 else 0 for k in range(32)]  # the others are filled with zeros
    got = copied("cp.async.wait_group 0; ld.shared.b32 %r2, [%r3+512];")
    assert got == [4 * k + 1 for k in range(32)]
    assert copied("cp.async.wait_all; ld.shared.b32 %r2, [%r3+512];") == got


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("ld.shared.b32 %r2, [%r1];", "uninitialised"),
        ("cp.async.wait_group 1; ld.shared.b32 %r2, [%r3+512];", "uninitialised"),
        ("cp.async.wait_all; xor.b32 %r4, %r1, 16; ld.shared.b32 %r2, [%r4];", "race"),
    ],
)
def test_copies_that_nobody_waited_for(code, kind):
    with pytest.raises(Fault) as caught:
        copied(code)
    assert caught.value.kind == kind


# -- tensor cores -------------------------------------------------------------


def fragments(shape, a_order="row", b_order="col", acc="f32", kind="f16"):
    """Functions (lane, register) -> coordinates, from the text of the ISA."""
    if shape == "m8n8k4":

        def high(lane):
            return 4 if lane >= 16 else 0

        a = {
            "row": lambda lane, i: (lane % 4 + high(lane), i),
            "col": lambda lane, i: (i % 4 + high(lane), lane % 4),
        }[a_order]
        b = {
            "row": lambda lane, i: (lane % 4, i + high(lane)),
            "col": lambda lane, i: (i, lane % 4 + high(lane)),
        }[b_order]
        c = {
            "f16": lambda lane, i: (lane % 4 + high(lane), i),
            "f32": lambda lane, i: (
                (lane & 1) + (i & 2) + high(lane),
                (i & 4) + (lane & 2) + (i & 1),
            ),
        }[acc]
        return a, 4, b, 4, c, 8
    group, inside = (lambda lane: lane >> 2), (lambda lane: lane % 4)

    def c(lane, i):
        return group(lane) + (8 if i >= 2 else 0), 2 * inside(lane) + (i & 1)

    if kind == "tf32":
        return (
            lambda lane, i: (group(lane) + 8 * (i & 1), inside(lane) + 4 * (i >> 1)), 4,
            lambda lane, i: (inside(lane) + 4 * i, group(lane)), 2, c, 4,
        )  # fmt: skip
    if shape == "m16n8k8":
        return (
            lambda lane, i: (group(lane) + (8 if i >= 2 else 0), 2 * inside(lane) + (i & 1)), 4,
            lambda lane, i: (2 * inside(lane) + i, group(lane)), 2, c, 4,
        )  # fmt: skip
    return (
        lambda lane, i: (
            group(lane) + (0 if i < 2 or 4 <= i < 6 else 8),
            2 * inside(lane) + (i & 1) + (8 if i >= 4 else 0),
        ), 8,
        lambda lane, i: (2 * inside(lane) + (i & 1) + (8 if i >= 2 else 0), group(lane)), 4,
        c, 4,
    )  # fmt: skip


def deal(matrices, function, count, quads):
    """Registers of each lane: [32, count] numbers."""
    return np.array(
        [
            [matrices[lane >> 2 & 3 if quads else 0][function(lane, i)] for i in range(count)]
            for lane in range(32)
        ]
    )


MMA = [
    ("m8n8k4", f"{a}.{b}", acc, "f16") for a in ("row", "col") for b in ("row", "col")
    for acc in ("f32", "f16")
] + [
    ("m16n8k16", "row.col", "f32", "f16"), ("m16n8k16", "row.col", "f16", "f16"),
    ("m16n8k16", "row.col", "f32", "bf16"), ("m16n8k8", "row.col", "f32", "f16"),
    ("m16n8k8", "row.col", "f32", "bf16"), ("m16n8k8", "row.col", "f32", "tf32"),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "orders", "acc", "kind"), MMA)
def test_mma(shape, orders, acc, kind):
    m, n, k = map(int, re.findall(r"\d+", shape))
    quads = 4 if shape == "m8n8k4" else 1
    rng = np.random.default_rng(0)
    a, b, c = (rng.integers(-8, 9, (quads, *s)) for s in ((m, k), (k, n), (m, n)))
    fa, na, fb, nb, fc, nc = fragments(shape, *orders.split("."), acc, kind)

    def registers(numbers, form):
        if form in ("f32", "tf32"):
            return numbers.astype("f4").view("u4")
        if form == "bf16":
            halves = (numbers.astype("f4").view("u4") >> 16).astype("u2")
        else:
            halves = numbers.astype("f2").view("u2")
        return np.ascontiguousarray(halves).view("u4")

    parts = [
        registers(deal(a, fa, na, quads > 1), kind),
        registers(deal(b, fb, nb, quads > 1), kind),
        registers(deal(c, fc, nc, quads > 1), acc),
    ]
    flat = np.concatenate(parts, axis=1)
    names = [f"%r{j}" for j in range(flat.shape[1])]
    ends = np.cumsum([0] + [p.shape[1] for p in parts])
    ra, rb, rc = (", ".join(names[s:e]) for s, e in itertools.pairwise(ends))
    rd = ", ".join(f"%d{j}" for j in range(parts[2].shape[1]))
    code = f"mma.sync.aligned.{shape}.{orders}.{acc}.{kind}.{kind}.{acc}"
    text = f""".entry k(.param .u64 x, .param .u64 out) .reqntid 32
    {{ .reg .b32 %r<{len(names)}>; .reg .b32 %d<8>; .reg .b32 %t; .reg .b64 %x<4>;
        ld.param.u64 %x0, [x]; ld.param.u64 %x1, [out]; mov.u32 %t, %tid.x;
        mad.wide.u32 %x0, %t, {4 * len(names)}, %x0;
        mad.wide.u32 %x1, %t, {4 * parts[2].shape[1]}, %x1;
        {" ".join(f"ld.global.b32 {n}, [%x0+{4 * j}];" for j, n in enumerate(names))}
        {code} {{{rd}}}, {{{ra}}}, {{{rb}}}, {{{rc}}};
        {" ".join(f"st.global.b32 [%x1+{4 * j}], %d{j};" for j in range(parts[2].shape[1]))} }}"""
    memory = Memory()
    memory.add("x", flat)
    memory.add("out", np.zeros_like(parts[2]), known=False)
    counters = execute(Program(text), 1, ["x", "out"], memory)
    want = registers(deal(np.einsum("qmk,qkn->qmn", a, b) + c, fc, nc, quads > 1), acc)
    assert np.array_equal(memory["out"], want) and counters["mma"] == 1


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_matrices_through_shared_memory(count, trans):
    """ldmatrix reads 8 × 8 halves; stmatrix writes what ldmatrix has read."""
    registers = ", ".join(f"%r{j}" for j in range(count))
    text = f""".entry k(.param .u64 x, .param .u64 out, .param .u64 back) .reqntid 32
    {{ .shared .align 16 .b8 tile[2048]; .reg .b32 %r<9>; .reg .b64 %x<6>; .reg .b64 %q<2>;
        ld.param.u64 %x0, [x]; ld.param.u64 %x1, [out]; ld.param.u64 %x4, [back];
        mov.u32 %r8, %tid.x; shl.b32 %r7, %r8, 4;
        mad.wide.u32 %x0, %r8, 16, %x0; mad.wide.u32 %x1, %r8, 16, %x1;
        mad.wide.u32 %x4, %r8, 16, %x4;
        ld.global.v2.b64 {{%x2, %x3}}, [%x0]; st.shared.v2.b64 [%r7], {{%x2, %x3}};
        bar.sync 0;
        ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{registers}}}, [%r7];
        {" ".join(f"st.global.b32 [%x1+{4 * j}], %r{j};" for j in range(count))}
        stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r7+1024], {{{registers}}};
        bar.sync 0;
        setp.lt.u32 %p, %r8, {8 * count};
        @%p ld.shared.v2.b64 {{%q0, %q1}}, [%r7+1024];
        @%p st.global.v2.b64 [%x4], {{%q0, %q1}}; }}""".replace(
        ".reg .b32 %r<9>;", ".reg .b32 %r<9>; .reg .pred %p;"
    )
    memory = Memory()
    halves = np.arange(256, dtype="u2").reshape(4, 8, 8)
    memory.add("x", halves)
    memory.add("out", np.zeros((32, 8), "u2"), known=False)
    memory.add("back", np.zeros((4, 8, 8), "u2"), known=False)
    counters = execute(Program(text), 1, ["x", "out", "back"], memory)
    for lane, j, half in itertools.product(range(32), range(count), range(2)):
        row, column = lane // 4, 2 * (lane % 4) + half
        place = (column, row) if trans else (row, column)
        assert memory["out"][lane, 2 * j + half] == halves[(j, *place)]
    assert np.array_equal(memory["back"][:count], halves[:count])
    # Each matrix is one phase of 8 lanes; the vector accesses have four, or as many as take part.
    assert counters["shared_load_wavefronts"] == 2 * count
    assert counters["shared_store_wavefronts"] == 4 + count


# -- reading compiled text ----------------------------------------------------

COMPILED = """
.visible .entry k(
    .param .u64 .ptr .global .align 1 k_param_0,
    .param .u32 k_param_1
)
.reqntid 128, 1, 1
{
    .reg .pred  %p<2>;
    .reg .b32   %r<3>;
    .reg .b64   %rd<2>;
    .loc 1 10 0                           // outer.py:10:0
$L__func_begin0:
    ld.param.b64  %rd1, [k_param_0];
    .loc 1 7 3      // inner.py:7:3 @[ middle.py:3:2 @[ outer.py:12:5 ] ]
    // begin inline asm
    { .reg .b32 t; mov.u32 t, 5; mov.u32 %r1, t; }
    .loc 1 8 3      // inner.py:8:3
    @%p1 ld.global.b32 { %r2 }, [ %rd1 + 0 ];
    // end inline asm
    .loc 2 99 1
    ret;
}
    .file 2 "/somewhere/else.py"
"""


def test_lines_of_compiled_code():
    program = Program(COMPILED)
    assert program.threads == 128 and list(program.parameters) == ["k_param_0", "k_param_1"]
    lines = [[str(line) for line in i.lines] for i in program.code]
    inlined = ["inner.py:7", "middle.py:3", "outer.py:12"]
    assert lines == [["outer.py:10"], inlined, inlined, inlined, ["file 2:99"]]
    memory = Memory()
    memory.add("x", np.zeros(1))
    counters = execute(program, 1, ["x", 0], memory)
    assert {str(k): v["instructions"] for k, v in counters.by_line().items()} == {
        "file 2:99": 4, "inner.py:7": 12, "outer.py:10": 4,
    }  # fmt: skip
    assert {str(k): v["instructions"] for k, v in counters.by_line("outer.py").items()} == {
        "outer.py:10": 4, "outer.py:12": 12,
    }  # fmt: skip


# -- compiled kernels ---------------------------------------------------------

# For two dtypes all of them, for the others these.
COMMON = {"sm_80": ("flat", "turned"), "sm_70": ("flat",), "sm_90": ("flat",)}
ORACLES = {
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "mish": torch.nn.functional.mish,
}


def values(dtype, seed, side=128):
    """A matrix of random numbers and of those that are special."""
    x = 3 * normal(side, side, dtype=torch.float64, seed=seed).cpu()
    if dtype == torch.bool:
        return x > 0
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        x = (10 * x).clamp(info.min, info.max).to(dtype)
        x.view(-1)[::11], x.view(-1)[1::11] = info.max, info.min
        return x
    x = x.to(dtype)
    flat, info = x.view(-1), torch.finfo(dtype)
    flat[::7] = (2 * flat[::7]).round() / 2  # ties
    numbers = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, info.tiny / 4, -88.0, 1e4)
    for k, number in enumerate(numbers):
        flat[5 + k :: 101 + 4 * k] = number
    return x


def executed(name, dtype, layout, target):
    """An operator's inputs and results, and the run on the machine."""
    tensors = VIEWS[layout](*(values(dtype, seed) for seed in range(3)))
    tensors = tensors[: LAUNCHES[name][0]]
    (launch,) = launched(getattr(torch.ops.nbx, name), *tensors)
    run = launch.emulate(target)
    return tensors, launch.results, run


def extremum_gradients(name, grad, x, y):
    """torch's formula: to the larger one, half to each if they are equal."""
    if name.startswith("min"):
        left, right = y < x, x < y
    else:
        left, right = x < y, y < x
    half = torch.where(x == y, grad / 2, grad)
    return half.masked_fill(left, 0), half.masked_fill(right, 0)


def compiled_cases():
    for target, common in COMMON.items():
        for name, (_, dtypes) in LAUNCHES.items():
            for dtype in dtypes:
                all_layouts = target == "sm_80" and dtype in (torch.float32, torch.int64)
                for layout in VIEWS if all_layouts else common:
                    yield target, name, dtype, layout


@pytest.mark.parametrize(("target", "name", "dtype", "layout"), list(compiled_cases()), ids=str)
def test_compiled_operators(target, name, dtype, layout):
    """Extrema and their gradients to the bit, mish within its bound."""
    tensors, results, _ = executed(name, dtype, layout, target)
    if name in ORACLES:
        assert_result(name, results[0], ORACLES[name](*tensors), tensors[0])
    elif name == "mish_backward":
        assert_slope(results[0], tensors[1], tensors[0])
    else:
        wanted = extremum_gradients(name, *torch.broadcast_tensors(*tensors))
        for got, want in zip(results, wanted, strict=True):
            assert_equal(got, want)


@pytest.mark.parametrize("name", LAUNCHES)
def test_traffic_of_the_operators(name):
    """A contiguous operator moves each element once, in whole sectors, 16 bytes a thread."""
    tensors, results, run = executed(name, torch.float32, "flat", "sm_80")
    read = sum(t.numel() * t.itemsize for t in tensors)
    written = sum(t.numel() * t.itemsize for t in results)
    assert run["global_load_bytes"] == read == 32 * run["global_load_sectors"]
    assert run["global_store_bytes"] == written == 32 * run["global_store_sectors"]
    assert run["global_load_sectors"] == 16 * run["global_load_requests"]


def test_a_misaligned_view_costs_more_sectors():
    """Rows of 97 elements start anywhere: no more bytes, but more sectors."""
    _, (result,), run = executed("maximum", torch.float32, "tiled", "sm_80")
    assert run["global_load_bytes"] == 8 * result.numel() < 32 * run["global_load_sectors"]
