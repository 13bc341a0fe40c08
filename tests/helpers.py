"""What the operators' tests share: the oracles, and how results are compared."""

import nbxtensor
from nbxtensor.runtime import DEVICE

import numpy as np
import pytest
import torch
import torch.nn.functional as F

REAL = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
FLOATS = REAL[-4:]
# Our operator and the one it must agree with.
OPERATORS = {
    "maximum": (nbxtensor.maximum, torch.maximum),
    "minimum": (nbxtensor.minimum, torch.minimum),
    "mish": (nbxtensor.mish, F.mish),
}
BINARY = ("maximum", "minimum")
# What the package launches: how many inputs, and of which dtypes.
LAUNCHES = {
    "maximum": (2, REAL),
    "minimum": (2, REAL),
    "mish": (1, FLOATS),
    "maximum_backward": (3, FLOATS),
    "minimum_backward": (3, FLOATS),
    "mish_backward": (2, FLOATS),
}
# Views of three 128 × 128 tensors: a flat launch, tiles in both orders, one
# that stands still along a dimension, five dimensions.
VIEWS = {
    "flat": lambda x, y, z: (x, y, z),
    "tiled": lambda x, y, z: (x[:, 1:98], y[:, :97], z[:, 2:99]),
    "turned": lambda x, y, z: (x, y.t().contiguous().t(), z),
    "broadcast": lambda x, y, z: (x, y[:, :1], z[0]),
    "deep": lambda *all: [x.view(4, 32, 4, 4, 8)[::2, 1:, ::3, 1:, 1:] for x in all],
}
ULPS = 4  # of a result
SLOPE_ULPS = 8  # of the larger term of a gradient

needs_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
needs_two_gpus = pytest.mark.skipif(
    DEVICE != "cuda" or torch.cuda.device_count() < 2, reason="needs two CUDA devices"
)
each_binary = pytest.mark.parametrize("name", BINARY)
each_operator = pytest.mark.parametrize("name", OPERATORS)


def each_dtype(dtypes):
    return pytest.mark.parametrize("dtype", dtypes, ids=lambda d: str(d).removeprefix("torch."))


def operands(name, *tensors):
    """As many of the tensors as the operator takes."""
    return tensors[: 2 if name in BINARY else 1]


def random(*shape, dtype=torch.float32, seed=0, low=-9, high=10):
    """Whole numbers, of which many are equal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator).to(DEVICE, dtype)


def normal(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def needs_memory(gigabytes):
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes} GiB of GPU memory, {free:.0f} are free")


def assert_same(got, want):
    """Equal in everything one can ask a tensor for; NaN equals NaN."""
    assert_like(got, want)
    assert_equal(got, want)


def assert_equal(got, want):
    """Of one dtype, device, shape and equal in every value; NaN equals NaN."""
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def assert_like(got, want):
    """Of one type, dtype, device, shape and layout."""

    def description(t):
        return type(t), t.dtype, t.device, t.shape, t.stride()

    assert description(got) == description(want), (description(got), description(want))


def assert_result(name, got, want, x):
    """What the operator gave is what torch gave, mish within ULPS of the truth.

    torch's own mish is no oracle for the digits: in float32 it is some
    thousand ulp off on the far left. It is one for NaN and infinity.
    """
    if name in BINARY:
        assert_same(got, want)
    else:
        assert_like(got, want)
        assert_special(got, want)
        assert_ulps(got, exact_mish(x))


def assert_special(got, want):
    """NaN where torch has NaN, the same infinity where torch has one."""
    assert_equal(got.isnan(), want.isnan())
    unbounded = want.isinf()
    assert_equal(got[unbounded], want[unbounded])
    assert not got[~unbounded].isinf().any()


def extended(tensor):
    """The values with 64 bits of mantissa (113 on some processors)."""
    return tensor.detach().cpu().double().numpy().astype(np.longdouble)


def exact_mish(tensor):
    """x n / (n + 2), n = e (e + 2), e = exp(x): x tanh(log(1 + e))."""
    with np.errstate(all="ignore"):
        x = extended(tensor)
        e = np.exp(np.minimum(x, 100))
        n = e * (e + 2)
        return x * (n / (n + 2))


def exact_mish_slope(tensor):
    """The derivative of mish, and the size of the terms it is the sum of."""
    with np.errstate(all="ignore"):
        x = extended(tensor)
        e = np.exp(np.minimum(x, 100))
        m = e * (e + 2) + 2
        first, second = e * (e + 2) / m, 4 * x * e * (1 + e) / (m * m)
        return first + second, first + abs(second)


def assert_slope(got, x, upstream):
    """upstream times the derivative of mish, NaN where the formula has it."""
    slope, size = exact_mish_slope(x)
    with np.errstate(invalid="ignore"):
        want, size = extended(upstream) * slope, abs(extended(upstream)) * size
    assert_ulps(got, want, SLOPE_ULPS, size)


def spacing(size, dtype):
    """Distance of the dtype's values around a size, that of normal ones at least."""
    info = torch.finfo(dtype)
    exponent = np.frexp(np.maximum(size, info.tiny))[1] - 1
    return np.ldexp(np.longdouble(info.eps), exponent)


def assert_ulps(got, want, limit=ULPS, size=None):
    """Finite results are within limit ulp of the extended reference.

    Below the least normal value anything as small will do. The ulp is that
    of the result, or of size where the result is a difference.
    """
    assert tuple(got.shape) == want.shape
    value, tiny = extended(got), torch.finfo(got.dtype).tiny
    with np.errstate(all="ignore"):
        error = abs(value - want)
        finite = np.isfinite(value) & np.isfinite(want)
        small = finite & (abs(want) < tiny)
        ulps = error / spacing(abs(want) if size is None else size, got.dtype)
    assert (error[small] <= tiny).all()
    ulps = np.where(finite & ~small, ulps, 0)
    if ulps.size:
        k = np.unravel_index(ulps.argmax(), ulps.shape)
        at = ", ".join(str(n) for n in k)
        assert ulps[k] <= limit, f"{ulps[k]:.2f} ulp at [{at}]: {value[k]} for {want[k]}"
