"""The PTX machine: every family of instructions, its counters, its faults, compiled kernels."""

import itertools
import json
import operator
import os
import re
import subprocess
import sys
from fractions import Fraction

from nbxtensor import ptx
from nbxtensor.ptx import Fault, Memory, Program, execute

import mpmath
import numpy as np
import pytest
import torch
from helpers import (
    FLOATS,
    assert_equal,
    assert_like,
    assert_result,
    assert_slope,
    normal,
)

from conftest import ROOT

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
    check_rounding(
        got, [function(decode(x, name), decode(y, name)) for x, y in zip(a, b)], name
    )


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


NAMES = ("-inf", "-1", "-0.0", "0.0", "1", "inf", "nan")


def special(name):
    values = [float(n) for n in NAMES]
    if name == "bf16":
        return (np.array(values, "f4").view("u4") >> 16).astype("u2")
    return np.array(values, f"f{width(name) // 8}").view(f"u{width(name) // 8}")


def canonical(name):
    return (1 << width(name) - 1) - 1


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("code", ["min", "max"])
def test_extrema(code, keep, name):
    if keep and name == "f64":
        pytest.skip("the ISA has none")
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


@pytest.mark.parametrize("to", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("source", ["f32", "f64"])
@pytest.mark.parametrize("rounding", ["rn", "rz"])
def test_narrowing(source, to, rounding):
    if source == to:
        pytest.skip("no conversion")
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
    rounding = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}
    for name, function in rounding.items():
        got = evaluate(
            f"cvt.{name}.{to}.{source} %d, %a0;", x.view(f"u{x.itemsize}"), bits=size
        )
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
    for name, function in {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}.items():
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
