"""The operators where PyTorch's machinery meets them: gradients, transforms, modes, devices."""

import concurrent.futures
import importlib
import inspect
import os
import subprocess
import sys
import warnings
from functools import partial

import nbxtensor
from nbxtensor.ops.maximum import maximum_forward_kernel
from nbxtensor.ops.minimum import minimum_forward_kernel
from nbxtensor.ops.mish import mish_forward_kernel
from nbxtensor.runtime import DEVICE

import mpmath
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    BINARY,
    FLOATS,
    OPERATORS,
    REAL,
    ULPS,
    assert_equal,
    assert_like,
    assert_result,
    assert_same,
    assert_slope,
    each_binary,
    each_dtype,
    each_operator,
    needs_gpu,
    needs_memory,
    needs_two_gpus,
    normal,
    operands,
    random,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

OP = {name: getattr(torch.ops.nbx, name).default for name in OPERATORS}
NAN, INF = float("nan"), float("inf")


def clones(*tensors):
    """The same tensors, strides included, as leaves that want a gradient."""
    return [t.detach().requires_grad_() for t in tensors]


# ---------------------------------------------------------------- the library


LAYOUTS = {
    "flat": lambda x: x,
    "turned": lambda x: x.t(),
    "strided": lambda x: x[1:, ::2],
    "expanded": lambda x: x[:, :1].expand(-1, 6),
    "empty": lambda x: x[:0],
}


def pair(layout, dtype, grad=False):
    """Two tensors in a layout, the second broadcast to the first."""
    x = LAYOUTS[layout](normal(6, 6, dtype=dtype, seed=1)).requires_grad_(grad)
    return x, normal(x.shape[1], dtype=dtype, seed=2).requires_grad_(grad)


@each_operator
@pytest.mark.parametrize("layout", ["flat", "strided", "empty"])
def test_opcheck(name, layout):
    torch.library.opcheck(OP[name], operands(name, *pair(layout, torch.float32, grad=True)))


@each_operator
def test_opcheck_of_the_gradient(name):
    x, y = normal(4, 6, seed=1), normal(4, 6, seed=2)
    gradient = getattr(torch.ops.nbx, f"{name}_backward").default
    torch.library.opcheck(gradient, (normal(4, 6, seed=3), *operands(name, x, y)))


@each_operator
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_way_round_the_dispatcher_gives_the_same(name, layout):
    """A plain call takes the short way, torch.ops the long one."""
    tensors = operands(name, *pair(layout, torch.float32))
    assert_same(OPERATORS[name][0](*tensors), OP[name](*tensors))


@each_operator
@pytest.mark.parametrize("layout", LAYOUTS)
@each_dtype((torch.float16, torch.bfloat16, torch.float64))
def test_the_fake_result_is_like_the_real_one(name, layout, dtype):
    tensors = operands(name, *pair(layout, dtype))
    with FakeTensorMode() as mode:
        fake = OPERATORS[name][0](*[mode.from_tensor(t) for t in tensors])
    real = OPERATORS[name][0](*tensors)
    assert type(fake) is not torch.Tensor
    assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (
        real.shape,
        real.stride(),
        real.dtype,
        real.device,
    )


# ---------------------------------------------------------------- results


@each_binary
@pytest.mark.parametrize("layout", LAYOUTS)
@each_dtype(REAL)
def test_layouts(name, layout, dtype):
    ours, theirs = OPERATORS[name]
    x = LAYOUTS[layout](random(6, 6, dtype=dtype, seed=3))
    for y in (x, random(*x.shape, dtype=dtype, seed=4), random(x.shape[1], dtype=dtype, seed=5)):
        assert_same(ours(x, y), theirs(x, y))
        assert_same(ours(y, x), theirs(y, x))


STRIDES = [
    ((2, 3, 4), (1, 8, 2)),
    ((2, 1, 3), (12, 2, 2)),
    ((2, 1, 3), (1, 77, 2)),
    ((1, 1), (7, 9)),
    ((1, 4), (1, 1)),
    ((4, 1), (1, 4)),
    ((1, 2, 1, 3), (1, 3, 1, 1)),
    ((2, 2, 3), (0, 3, 0)),
    ((1, 0, 3), (0, 6, 2)),
    ((3, 0), (1, 3)),
    ((0,), (2,)),
    ((), ()),
]


@each_operator
@pytest.mark.parametrize(("shape", "stride"), STRIDES, ids=str)
def test_strides_of_the_result(name, shape, stride):
    ours, theirs = OPERATORS[name]
    x = torch.empty_strided(shape, stride, device=DEVICE).fill_(0.5)
    y = torch.full(shape, 0.25, device=DEVICE)
    for tensors in {operands(name, x, x), operands(name, x, y), operands(name, y, x)}:
        want = theirs(*tensors)
        assert_like(ours(*tensors), want)
        torch.testing.assert_close(ours(*tensors), want)


@each_operator
@pytest.mark.parametrize("format", [torch.channels_last, torch.contiguous_format], ids=str)
def test_memory_format(name, format):
    x = normal(2, 3, 4, 5, seed=6).to(memory_format=format)
    y = normal(3, 1, 1, seed=7)
    tensors = operands(name, x, y)
    got, want = (f(*tensors) for f in OPERATORS[name])
    assert_result(name, got, want, x)
    assert got.is_contiguous(memory_format=format)


@each_binary
@pytest.mark.parametrize("n", [0, 1, 2, 15, 16, 17, 255, 1023, 1025, 4097, 65537, 70001])
@each_dtype((torch.uint8, torch.float32))
def test_sizes_around_a_tile(name, n, dtype):
    ours, theirs = OPERATORS[name]
    x, y = random(n, dtype=dtype, seed=8), random(n, dtype=dtype, seed=9)
    assert_same(ours(x, y), theirs(x, y))
    # One element off: the pointers are not aligned to 16 bytes.
    assert_same(ours(x[1:], y[1:]), theirs(x[1:], y[1:]))
    assert_same(ours(x[::2], y[::2]), theirs(x[::2], y[::2]))


@each_binary
def test_rank_and_promotion(name):
    """A tensor without dimensions gives way to a category's own dtype, as in torch."""
    ours, theirs = OPERATORS[name]
    for first in REAL:
        for second in REAL:
            x, y = random(5, dtype=first, seed=1), random(dtype=second, seed=2)
            assert_same(ours(x, y), theirs(x, y))
            assert_same(ours(y, x), theirs(y, x))
            assert_same(ours(x, y.expand(5)), theirs(x, y.expand(5)))


@each_binary
def test_eight_dimensions(name):
    ours, theirs = OPERATORS[name]
    x = random(2, 3, 2, 1, 2, 2, 3, 2, seed=3).permute(7, 2, 0, 5, 3, 1, 6, 4)
    y = random(2, 1, 3, 1, seed=4)
    assert_same(ours(x, y), theirs(x, y))


@each_operator
def test_arguments_by_keyword(name):
    x, y = normal(5, seed=1), normal(5, seed=2)
    keywords = dict(zip(("input", "other"), operands(name, x, y)))
    assert_result(name, *(f(**keywords) for f in OPERATORS[name]), x)


@needs_gpu
@each_binary
@pytest.mark.parametrize("value", [0.5, NAN, 3])
def test_a_cpu_scalar_joins_cuda_tensors(name, value):
    ours, theirs = OPERATORS[name]
    x, scalar = normal(5, 7, seed=1), torch.tensor(value)
    assert_same(ours(x, scalar), theirs(x, scalar))
    assert_same(ours(scalar, x), theirs(scalar, x))
    leaves = clones(x, scalar.float())
    got = torch.autograd.grad(ours(*leaves).sum(), leaves)
    want = torch.autograd.grad(theirs(*leaves).sum(), leaves)
    for mine, theirs_ in zip(got, want):
        assert_same(mine, theirs_)


@needs_gpu
@each_operator
@pytest.mark.parametrize("layout", ["turned", "strided", "expanded"])
@each_dtype(FLOATS)
def test_no_copy_of_a_strided_input(name, layout, dtype):
    """Nothing of a copy's size is allocated; the allocator rounds up to a MiB."""
    x = {
        "turned": lambda x: x.t(),
        "strided": lambda x: x[1:, ::2],
        "expanded": lambda x: x[:, :1].expand(-1, 4096),
    }[layout](normal(4096, 4096, dtype=dtype))
    tensors = operands(name, x, normal(*x.shape, dtype=dtype, seed=1))
    OPERATORS[name][0](*tensors)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = OPERATORS[name][0](*tensors)
    size = result.numel() * result.element_size()
    assert torch.cuda.max_memory_allocated() - before <= size + 2**20 < 1.5 * size


# ---------------------------------------------------------------- accuracy of mish


def every_value(dtype):
    """All 65536 values of a 16-bit dtype."""
    return torch.arange(1 << 16).to(torch.int16).view(dtype).to(DEVICE)


def every_exponent():
    """512 float32 values for each sign and exponent, 2**18 in all."""
    generator = np.random.default_rng(0)
    mantissa = generator.integers(0, 1 << 23, (512, 512), dtype=np.int64)
    mantissa[:, :3] = 0, 1, (1 << 23) - 1
    bits = (np.arange(512)[:, None] << 23) + mantissa
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32).ravel()).to(DEVICE)


ALL_VALUES = {
    "float16": partial(every_value, torch.float16),
    "bfloat16": partial(every_value, torch.bfloat16),
    "float32": every_exponent,
}


@pytest.mark.parametrize("values", ALL_VALUES)
def test_mish_over_the_whole_range(values):
    x = ALL_VALUES[values]()
    assert_result("mish", nbxtensor.mish(x), F.mish(x), x)


@pytest.mark.parametrize("values", ALL_VALUES)
def test_mish_gradient_over_the_whole_range(values):
    (x,) = clones(ALL_VALUES[values]())
    (got,) = torch.autograd.grad(nbxtensor.mish(x).sum(), x)
    (want,) = torch.autograd.grad(F.mish(x).sum(), x)
    assert_slope(got, x, torch.ones_like(got))
    assert not (got.isnan() & ~want.isnan()).any()
    assert got.nan_to_num().min() > -0.12 and got.nan_to_num().max() < 1.09


def test_mish_in_float64():
    edges = [0.0, 5e-324, 2.3e-308, 1e-300, 1e-17, 0.5, 1.0, 20.0, 44.4, 88.7, 709.7, 1e300]
    points = sorted({*edges, *np.logspace(-12, 3, 180), *np.linspace(0, 700, 80)})
    x = torch.tensor([-p for p in points[::-1] if p < 708] + points, dtype=torch.float64)
    got = nbxtensor.mish(x.to(DEVICE)).tolist()
    assert 450 < len(got) < 600
    with mpmath.workprec(300):
        for point, value in zip(x.tolist(), got):
            e = mpmath.exp(min(point, 1000))
            want = mpmath.mpf(point) * (e * (e + 2) / (e * (e + 2) + 2))
            error = abs(mpmath.mpf(value) - want)
            if abs(want) < torch.finfo(torch.float64).tiny:
                assert error <= torch.finfo(torch.float64).tiny
            else:
                assert error <= ULPS * np.spacing(abs(float(want))), (point, value)


@needs_gpu
def test_mish_of_every_float32():
    """2**32 values against float64, in which torch's mish is exact enough."""
    step = 1 << 27
    exponent = 0x7FF << 52
    tiny = torch.finfo(torch.float32).tiny
    eps = torch.finfo(torch.float32).eps
    for start in range(-(1 << 31), 1 << 31, step):
        bits = torch.arange(start, start + step, device=DEVICE, dtype=torch.int64)
        x = bits.to(torch.int32).view(torch.float32)
        got, want = nbxtensor.mish(x).double(), F.mish(x.double())
        assert torch.equal(got.isnan(), want.isnan())
        # Everything is finite but mish(inf) = inf, whose difference is NaN.
        error = (got - want).abs_().nan_to_num_()
        ulp = (want.abs().view(torch.int64) & exponent).view(torch.float64) * eps
        bound = torch.where(want.abs() < tiny, tiny, ULPS * ulp)
        assert bool((error <= bound).logical_or_(want.isnan()).all())
        del bits, x, got, want, error, ulp, bound


def test_mish_at_infinity():
    x = torch.tensor([INF, -INF, NAN, 0.0, -0.0], device=DEVICE)
    for dtype in FLOATS:
        assert_same(nbxtensor.mish(x.to(dtype)), F.mish(x.to(dtype)))


# ---------------------------------------------------------------- gradients


@each_operator
@pytest.mark.parametrize("layout", ["flat", "turned", "strided", "empty"])
def test_gradcheck(name, layout):
    ours, _ = OPERATORS[name]
    tensors = operands(name, *pair(layout, torch.float64, grad=True))
    assert torch.autograd.gradcheck(ours, tensors)
    assert torch.autograd.gradgradcheck(ours, tensors)


@each_operator
@pytest.mark.parametrize("recorded", [False, True])
def test_a_batch_of_gradients(name, recorded):
    """The way of is_grads_batched and of jacobian(vectorize=True)."""
    ours, theirs = OPERATORS[name]
    leaves = clones(*operands(name, normal(4), normal(4, seed=1)))
    basis = torch.eye(4, device=DEVICE)

    def batch(function):
        return torch.autograd.grad(
            function(*leaves), leaves, basis, is_grads_batched=True, create_graph=recorded
        )

    torch.testing.assert_close(batch(ours), batch(theirs))


@each_operator
def test_a_forward_tangent_is_not_lost_in_silence(name):
    ours, theirs = OPERATORS[name]
    x, y, tangent = normal(4), normal(4, seed=1), normal(4, seed=2)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        want = torch.autograd.forward_ad.unpack_dual(theirs(*operands(name, dual, y)))
        got = torch.autograd.forward_ad.unpack_dual(ours(*operands(name, dual, y)))
        assert got.tangent is not None
        torch.testing.assert_close(got.tangent, want.tangent)


@each_operator
def test_a_gradient_that_is_a_symbolic_zero(name):
    ours, theirs = OPERATORS[name]
    tensors = operands(name, normal(4), normal(4, seed=1))
    zero = torch._efficientzerotensor((4,), device=DEVICE)
    for mine, other in zip(gradients(ours, tensors, zero), gradients(theirs, tensors, zero)):
        assert_equal(mine.clone(), other.clone())


def gradients(function, tensors, upstream=None):
    leaves = clones(*tensors)
    result = function(*leaves)
    upstream = torch.ones_like(result) if upstream is None else upstream
    return torch.autograd.grad(result, leaves, upstream)


@each_binary
@each_dtype(FLOATS)
@pytest.mark.parametrize(
    "shapes",
    [((4, 6), (4, 6)), ((4, 1), (6,)), ((4, 6), ()), ((1, 6), (3, 4, 1))],
    ids=str,
)
def test_ties_share_the_gradient(name, dtype, shapes):
    """Half to each of two equal values, summed where a value was broadcast."""
    ours, theirs = OPERATORS[name]
    x, y = (random(*s, dtype=dtype, seed=k, low=0, high=3) for k, s in enumerate(shapes))
    upstream = random(*torch.broadcast_shapes(*shapes), dtype=dtype, seed=3)
    got = gradients(ours, (x, y), upstream)
    for mine, other, tensor in zip(got, gradients(theirs, (x, y), upstream), (x, y)):
        assert_equal(mine, other)
        assert mine.dtype == tensor.dtype and mine.shape == tensor.shape


@each_binary
@each_dtype(FLOATS)
def test_gradients_at_nan_and_infinity(name, dtype):
    ours, theirs = OPERATORS[name]
    special = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0], device=DEVICE, dtype=dtype)
    x, y = special[:, None], special
    upstream = random(6, 6, dtype=dtype, seed=1)
    for mine, other in zip(gradients(ours, (x, y), upstream), gradients(theirs, (x, y), upstream)):
        assert_equal(mine, other)


@each_binary
def test_gradients_keep_each_inputs_dtype(name):
    ours, theirs = OPERATORS[name]
    x, y = random(4, 5, dtype=torch.float16), random(5, dtype=torch.float64, seed=1)
    for mine, other in zip(gradients(ours, (x, y)), gradients(theirs, (x, y))):
        assert_equal(mine, other)


@each_operator
def test_a_gradient_is_recorded_only_where_one_is_wanted(name):
    ours, _ = OPERATORS[name]
    x, y = normal(3), normal(3, seed=1)
    assert not ours(*operands(name, x, y)).requires_grad
    x.requires_grad_()
    assert ours(*operands(name, x, y)).requires_grad
    with torch.no_grad():
        assert not ours(*operands(name, x, y)).requires_grad
    parameter = torch.nn.Parameter(x.detach())
    assert ours(*operands(name, parameter, y)).requires_grad
    if name in BINARY:
        assert ours(y, x).requires_grad
        (to_y,) = torch.autograd.grad(ours(x, y.requires_grad_()).sum(), y)
        assert to_y.shape == y.shape
        whole = random(3, dtype=torch.int64)
        assert ours(x, whole).requires_grad


@each_operator
def test_second_derivatives(name):
    ours, theirs = OPERATORS[name]
    tensors = operands(name, normal(7, dtype=torch.float64), normal(7, dtype=torch.float64, seed=1))

    def second(function):
        leaves = clones(*tensors)
        first = torch.autograd.grad((function(*leaves) ** 2).sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum((g**2).sum() for g in first), leaves)

    for mine, other in zip(second(ours), second(theirs)):
        torch.testing.assert_close(mine, other)


# ---------------------------------------------------------------- transforms


@each_operator
def test_func_transforms(name):
    ours, theirs = OPERATORS[name]
    x, y = normal(3, 4, dtype=torch.float64), normal(3, 4, dtype=torch.float64, seed=1)
    tensors = operands(name, x, y)
    places = tuple(range(len(tensors)))

    def both(transform):
        for mine, other in zip(
            torch.utils._pytree.tree_leaves(transform(ours)),
            torch.utils._pytree.tree_leaves(transform(theirs)),
        ):
            torch.testing.assert_close(mine, other)

    def loss(f):
        return lambda *t: (f(*t) ** 2).sum()

    both(lambda f: torch.func.grad(loss(f), places)(*tensors))
    both(lambda f: torch.func.vmap(torch.func.grad(loss(f), places))(*tensors))
    both(lambda f: torch.func.jacrev(f, places)(*tensors))
    both(lambda f: torch.func.vmap(f)(*tensors))
    both(lambda f: torch.func.vmap(f, in_dims=1, out_dims=1)(*tensors))
    both(lambda f: torch.func.vmap(torch.func.vmap(f))(*tensors))
    both(lambda f: torch.func.grad(lambda *t: loss(torch.func.vmap(f))(*t))(*tensors))


@each_binary
def test_vmap_over_one_of_two(name):
    ours, theirs = OPERATORS[name]
    x, row, scalars = normal(3, 4, 5), normal(5, seed=1), normal(4, seed=2)
    for tensors, dims in [
        ((x, row), (0, None)),
        ((row, x), (None, 1)),
        ((x, scalars), (1, 0)),
        ((scalars, x), (0, 1)),
        ((x, x.movedim(0, 2)), (0, 2)),
    ]:
        got, want = (torch.vmap(f, in_dims=dims)(*tensors) for f in (ours, theirs))
        assert_equal(got, want)


@each_operator
def test_per_sample_gradients_of_a_layer(name):
    ours, theirs = OPERATORS[name]
    weight, batch = normal(4, 5, dtype=torch.float64), normal(6, 5, dtype=torch.float64, seed=1)

    def samples(function):
        def loss(weight, sample):
            hidden = weight @ sample
            return function(*operands(name, hidden, hidden.flip(0))).sum()

        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, batch)

    torch.testing.assert_close(samples(ours), samples(theirs))


@each_operator
def test_inference_mode(name):
    ours, theirs = OPERATORS[name]
    outside = normal(4, seed=1)
    with torch.inference_mode():
        x = normal(4)
        for y in (x, outside):
            got, want = (f(*operands(name, x, y)) for f in (ours, theirs))
            assert_result(name, got, want, x)
            assert got.is_inference() and want.is_inference()


@each_operator
def test_autocast(name):
    ours, theirs = OPERATORS[name]
    x = normal(5)
    with torch.autocast(DEVICE, torch.bfloat16):
        for y in (normal(5, seed=1), normal(5, dtype=torch.bfloat16, seed=2)):
            for tensors in (operands(name, x, y), operands(name, y, x)):
                got, want = ours(*tensors), theirs(*tensors)
                assert_result(name, got, want, tensors[0])


@pytest.mark.filterwarnings("ignore:TensorFloat32", "ignore::DeprecationWarning")
@each_operator
@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
def test_compile_with_dynamic_shapes(name, grad):
    """One whole graph serves every shape, and nothing is compiled twice."""
    ours, theirs = OPERATORS[name]
    torch._dynamo.reset()

    def around(function):
        return lambda *tensors: function(*[t * 2 for t in tensors]) + 1

    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(around(ours), fullgraph=True, dynamic=True, backend=backend)

    def check(rows, columns, seed):
        tensors = operands(
            name, normal(rows, columns, seed=seed), normal(columns, rows, seed=seed + 1).t()
        )
        leaves = clones(*tensors) if grad else list(tensors)
        got, want = compiled(*leaves), around(theirs)(*leaves)
        torch.testing.assert_close(got, want)
        if grad:
            mine, other = (torch.autograd.grad(r.square().sum(), leaves) for r in (got, want))
            torch.testing.assert_close(mine, other)

    check(4, 6, 0)
    with torch.compiler.set_stance("fail_on_recompile"):
        check(7, 3, 2)
        check(33, 65, 4)


class Watching(torch.Tensor):
    """A subclass that records what is called with it."""

    seen = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


@each_operator
def test_a_tensor_subclass_sees_the_operator(name):
    Watching.seen.clear()
    ours, theirs = OPERATORS[name]
    x, y = normal(4).as_subclass(Watching), normal(4, seed=1)
    got, want = (f(*operands(name, x, y)) for f in (ours, theirs))
    assert type(got) is type(want) is Watching
    assert OP[name] in Watching.seen


class Listening(torch.overrides.TorchFunctionMode):
    """A function mode that records what is called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


class Recording(TorchDispatchMode):
    """A dispatch mode that records what is called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


@each_operator
@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
def test_a_dispatch_mode_sees_the_operator(name, grad):
    tensors = [t.requires_grad_(grad) for t in operands(name, normal(4), normal(4, seed=1))]
    with Recording() as mode:
        result = OPERATORS[name][0](*tensors)
    assert mode.seen == [OP[name]]
    if grad:
        with Recording() as mode:
            result.sum().backward()
        assert getattr(torch.ops.nbx, f"{name}_backward").default in mode.seen


@each_operator
def test_a_function_mode_sees_the_operator(name):
    with Listening() as mode:
        OPERATORS[name][0](*operands(name, normal(4), normal(4, seed=1)))
    assert OP[name] in mode.seen


@each_operator
def test_negative_and_conjugate_views(name):
    """A lazy negation is resolved before the kernel reads memory."""
    ours, theirs = OPERATORS[name]
    x = torch.complex(normal(5), normal(5, seed=1)).conj().imag
    assert x.is_neg()
    tensors = operands(name, x, normal(5, seed=2))
    assert_result(name, ours(*tensors), theirs(*tensors), x.resolve_neg())


@each_operator
def test_meta_tensors(name):
    ours, theirs = OPERATORS[name]
    x = torch.empty(4, 6, device="meta").t()
    tensors = operands(name, x, torch.empty(6, 1, device="meta"))
    assert_like(ours(*tensors), theirs(*tensors))


# ---------------------------------------------------------------- CUDA


@needs_gpu
@each_operator
def test_cuda_graph(name):
    ours, theirs = OPERATORS[name]
    x, y = normal(1000, 37), normal(37, seed=1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ours(*operands(name, ours(*operands(name, x, y)).t(), x.t()))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = ours(*operands(name, x, y))
        chained = ours(*operands(name, result.t(), x.t()))
    for seed in (2, 3):
        x.copy_(normal(1000, 37, seed=seed))
        graph.replay()
        torch.cuda.synchronize()
        assert_result(name, result, theirs(*operands(name, x, y)), x)
        want = theirs(*operands(name, result.t(), x.t()))
        assert_result(name, chained, want, result.t())


@needs_gpu
@each_binary
def test_cuda_graph_with_a_cpu_scalar(name):
    ours, theirs = OPERATORS[name]
    x, scalar = normal(1000), torch.tensor(0.25)
    ours(x, scalar)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = ours(x, scalar)
    x.copy_(normal(1000, seed=1))
    graph.replay()
    assert_same(result, theirs(x, scalar))


@needs_two_gpus
@each_operator
def test_another_device_than_the_current_one(name):
    ours, theirs = OPERATORS[name]
    for layout in LAYOUTS.values():
        x, y = (layout(normal(6, 6, seed=k)).to("cuda:1") for k in (0, 1))
        with torch.cuda.device(0):
            got = ours(*operands(name, x, y))
            assert torch.cuda.current_device() == 0
        assert got.device == torch.device("cuda:1")
        assert_result(name, got, theirs(*operands(name, x, y)), x)


def same_in_parts(name, got, *tensors):
    """Compare with torch a part at a time, along the first dimension."""
    tensors = torch.broadcast_tensors(*tensors)
    rows = max(1, (1 << 28) // max(1, got[0].numel()))
    for start in range(0, len(got), rows):
        part = slice(start, start + rows)
        want = OPERATORS[name][1](*[t[part] for t in tensors])
        if name == "mish":
            torch.testing.assert_close(got[part], want)
        else:
            assert torch.equal(got[part], want)


def big(*shape, dtype):
    """Numbers that differ from one 256 MiB to the next and within each."""
    x = torch.empty(shape, dtype=dtype, device=DEVICE)
    return x.random_(0, 200) if not dtype.is_floating_point else x.uniform_(-3, 3)


@needs_gpu
@each_operator
def test_more_elements_than_int32_counts(name):
    needs_memory(24)
    dtype = torch.bfloat16 if name == "mish" else torch.uint8
    n = 2**31 + 4099
    x, y = big(n, dtype=dtype), big(n, dtype=dtype)
    tensors = operands(name, x, y)
    same_in_parts(name, OPERATORS[name][0](*tensors), *tensors)


@needs_gpu
@each_operator
@pytest.mark.parametrize("layout", ["turned", "sliced", "broadcast", "small result"])
def test_offsets_beyond_int32(name, layout):
    needs_memory(40)
    dtype = torch.bfloat16 if name == "mish" else torch.uint8
    x = big(46_400, 46_400, dtype=dtype)
    assert x.numel() > 2**31
    y = big(46_400, dtype=dtype)
    if layout == "turned":
        tensors = operands(name, x.t(), y)
    elif layout == "sliced":
        tensors = operands(name, x[:, 1:-1], y[2:])
    elif layout == "broadcast":
        tensors = operands(name, y[:, None].expand(-1, 46_400), x)
    else:
        tensors = operands(name, x[::23_199, 7:], x[::23_199, :-7])
    same_in_parts(name, OPERATORS[name][0](*tensors), *tensors)


# ---------------------------------------------------------------- published kernels


KERNELS = {
    "maximum": (
        maximum_forward_kernel,
        ["x_ptr", "y_ptr", "output_ptr", "n_elements", "BLOCK_SIZE"],
    ),
    "minimum": (
        minimum_forward_kernel,
        ["x_ptr", "y_ptr", "output_ptr", "n_elements", "BLOCK_SIZE"],
    ),
    "mish": (mish_forward_kernel, ["input_ptr", "output_ptr", "n_elements", "BLOCK_SIZE"]),
}


@each_operator
def test_signature_of_the_published_kernel(name):
    kernel, arguments = KERNELS[name]
    assert list(inspect.signature(kernel.fn).parameters) == arguments


@pytest.mark.parametrize(
    ("name", "dtype"), [(n, d) for n in OPERATORS for d in (REAL if n in BINARY else FLOATS)]
)
@pytest.mark.parametrize("keywords", [False, True], ids=["position", "keyword"])
def test_launch_of_the_published_kernel(name, dtype, keywords):
    kernel, arguments = KERNELS[name]
    n, block = 1000, 256
    source = random(2, n + 24, dtype=dtype, seed=1)
    if dtype.is_floating_point:
        source /= 4
        source[0, ::7] = source[1, ::11] = NAN
        source[0, ::13], source[1, ::17] = INF, -INF
    x, y = source
    output = torch.full_like(x, 1)
    values = [*operands(name, x, y), output, n, block]
    with np.errstate(all="ignore"):
        if keywords:
            kernel[(4,)](**dict(zip(arguments, values)))
        else:
            kernel[(4,)](*values)
    want = OPERATORS[name][1](*operands(name, x, y))
    assert (output[n:] == 1).all()
    assert_result(name, output[:n], want[:n], x[:n])


@needs_gpu
@each_operator
def test_launch_of_the_published_kernel_beyond_int32(name):
    needs_memory(24)
    dtype = torch.bfloat16 if name == "mish" else torch.uint8
    n = 2**31 + 4099
    tensors = operands(name, big(n, dtype=dtype), big(n, dtype=dtype))
    output = torch.empty_like(tensors[0])
    KERNELS[name][0][(-(-n // 4096),)](*tensors, output, n, 4096)
    same_in_parts(name, output, *tensors)


# ---------------------------------------------------------------- bad input


def flat(dtype=torch.float32):
    return torch.ones(3, dtype=dtype, device=DEVICE)


def quantised():
    return torch.quantize_per_tensor(flat(), 0.1, 0, torch.quint8)


def nested():
    return torch.nested.nested_tensor([flat(), flat()[:2]])


# What is wrong, and what the message must say.
BAD_ONE = {
    "int": (lambda: 2, "argument 'input' .position 1. must be Tensor, not int"),
    "none": (lambda: None, "argument 'input' .position 1. must be Tensor, not NoneType"),
    "list": (lambda: [1.0], "argument 'input' .position 1. must be Tensor, not list"),
    "array": (lambda: np.ones(3), "argument 'input' .position 1. must be Tensor"),
    "sparse": (lambda: flat().to_sparse(), "argument 'input' must be a dense.*sparse_coo"),
    "csr": (
        lambda: flat().expand(2, 3).to_sparse_csr(),
        "argument 'input' must be a dense.*sparse_csr",
    ),
    "nested": (nested, "argument 'input' must be a dense.*nested"),
    "quantised": (quantised, "quint8|quantised"),
    "complex": (lambda: flat(torch.complex64), "complex64.*supported are.*float32"),
    "unsigned": (lambda: flat(torch.uint16), "uint16.*supported are.*float32"),
    "float8": (lambda: flat(torch.float8_e5m2), "float8_e5m2.*supported are.*float32"),
}
BAD_TWO = {
    "second int": (lambda: (flat(), 2), "argument 'other' .position 2. must be Tensor, not int"),
    "second sparse": (lambda: (flat(), flat().to_sparse()), "argument 'other' must be a dense"),
    "second complex": (lambda: (flat(), flat(torch.complex64)), "complex64.*supported are"),
    "second quantised": (lambda: (flat(), quantised()), "maximum|minimum"),
    "shapes": (lambda: (flat(), flat()[:2]), r"'input' \(3,\), 'other' \(2,\) do not broadcast"),
    "devices": (
        lambda: (flat(), flat().to("meta")),
        f"one device.*'input' on {DEVICE}.*'other' on meta",
    ),
    "scalar elsewhere": (
        lambda: (flat(), flat().sum().to("meta")),
        f"one device.*'input' on {DEVICE}.*'other' on meta",
    ),
}
BAD = [
    pytest.param(name, make, says, id=f"{name}-{what}")
    for name in OPERATORS
    for what, (make, says) in {
        **{
            what: (lambda make=make, name=name: operands(name, *2 * [make()]), says)
            for what, (make, says) in BAD_ONE.items()
        },
        **(BAD_TWO if name in BINARY else {}),
    }.items()
    if (name, what) != ("mish", "unsigned")
] + [
    pytest.param("mish", lambda d=d: (flat(d),), f"{d}.*supported are", id=f"mish-{d}")
    for d in (torch.bool, torch.int32, torch.uint16)
]


@pytest.mark.parametrize(("name", "make", "says"), BAD)
def test_bad_input(name, make, says):
    """The exception is of torch's type, and says what is wrong with what."""
    ours, theirs = OPERATORS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about kinds of tensors
        tensors = make()
    with pytest.raises(Exception) as expected:
        theirs(*tensors)
    with pytest.raises(expected.type, match=says) as raised:
        ours(*tensors)
    assert str(raised.value).startswith(f"{name}(): ")


@each_operator
def test_wrong_number_of_arguments(name):
    for count in (0, 1, 2, 3):
        if count == len(operands(name, 0, 0)):
            continue
        with pytest.raises(TypeError):
            OPERATORS[name][0](*count * [flat()])


@needs_gpu
@each_operator
def test_a_cpu_tensor_where_kernels_are_compiled(name):
    with pytest.raises(NotImplementedError, match="'input' is on the CPU.*TRITON_INTERPRET=1"):
        OPERATORS[name][0](*operands(name, torch.ones(3), torch.ones(3)))


@needs_gpu
@each_binary
def test_a_cpu_tensor_beside_a_cuda_tensor(name):
    for tensors in ((flat(), torch.ones(3)), (torch.ones(3), flat())):
        with pytest.raises(RuntimeError, match="one device"):
            OPERATORS[name][0](*tensors)


# ---------------------------------------------------------------- imports


def python(code, **environ):
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, **environ},
        text=True,
        capture_output=True,
        timeout=120,
    )


NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
USE = """
import nbxtensor, torch
from nbxtensor.runtime import DEVICE, INTERPRETED
assert INTERPRETED and DEVICE == "cpu"
print(nbxtensor.maximum(torch.tensor([1, 5]), torch.tensor([3, 4])).tolist())
"""


def test_triton_first_without_a_gpu_is_an_error_with_advice():
    done = python("import triton\nimport nbxtensor", **NO_GPU)
    assert done.returncode == 1
    assert "ImportError: nbxtensor must be imported before triton" in done.stderr
    assert "TRITON_INTERPRET=1" in done.stderr


def test_importing_nbxtensor_is_enough_without_a_gpu():
    done = python(USE + "\nimport triton.language", **NO_GPU)
    assert (done.returncode, done.stdout) == (0, "[3, 5]\n"), done.stderr


def test_the_interpreter_can_be_asked_for_on_any_machine():
    done = python("import triton\n" + USE, TRITON_INTERPRET="1")
    assert (done.returncode, done.stdout) == (0, "[3, 5]\n"), done.stderr


@needs_gpu
def test_with_a_gpu_the_order_of_imports_does_not_matter():
    code = "import triton, nbxtensor\nfrom nbxtensor.runtime import DEVICE\nprint(DEVICE)"
    done = python(code)
    assert (done.returncode, done.stdout) == (0, "cuda\n"), done.stderr


# ---------------------------------------------------------------- corners


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00001, 0xFFC00000])
def test_every_nan_stays_one(bits):
    """Integer arithmetic on a NaN's bits must not make a number of it."""
    x = torch.tensor([bits], dtype=torch.int64).to(torch.int32).view(torch.float32).to(DEVICE)
    y = x.double().requires_grad_()
    x.requires_grad_()
    for value in (x, y):
        result = nbxtensor.mish(value)
        (slope,) = torch.autograd.grad(result, value)
        assert result.isnan().all() and slope.isnan().all()


@each_binary
@pytest.mark.parametrize("create_graph", [False, True])
def test_an_infinite_gradient_goes_to_one_side(name, create_graph):
    x, y = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 1.0, 3.0])
    grad = torch.full((3,), float("inf")).to(DEVICE)
    found = []
    for function in OPERATORS[name]:
        pair = [t.to(DEVICE).requires_grad_() for t in (x, y)]
        out = function(*pair)
        found.append(torch.autograd.grad(out, pair, grad, create_graph=create_graph))
    for got, want in zip(*found):
        assert_equal(got.detach(), want.detach())


def test_vmap_promotes_what_the_function_sees():
    x, half = normal(3, 4), normal(3, dtype=torch.float16)
    pairs = {
        (0, 0): (x, half),
        (0, None): (normal(4, dtype=torch.float64), x[0]),
        (None, 0): (x[0], normal(4, dtype=torch.float64)),
    }
    for dims, tensors in pairs.items():
        mine, theirs = (torch.vmap(f, dims)(*tensors) for f in OPERATORS["maximum"])
        assert_equal(mine, theirs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_functionalize_and_trace():
    x = normal(5)
    want = nbxtensor.mish(x)
    assert torch.equal(torch.func.functionalize(nbxtensor.mish)(x), want)
    traced = torch.jit.trace(nbxtensor.mish, x)
    assert "nbx::mish" in str(traced.graph) and torch.equal(traced(x), want)


def test_threads():
    """The interpreter serves one thread at a time; a GPU serves them all."""
    x = normal(2000)
    want = nbxtensor.mish(x)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: nbxtensor.mish(x), range(40)))
    assert all(torch.equal(result, want) for result in results)


@pytest.mark.parametrize("side", [2, 3, 4, 8])
def test_batches_of_small_matrices(side):
    x = normal(300, side, side)
    assert_equal(nbxtensor.maximum(x, x.mT), torch.maximum(x, x.mT))


def test_a_backward_operator_has_no_gradient_of_its_own():
    x = normal(3).requires_grad_()
    backward = importlib.import_module("nbxtensor.ops.mish")._mish_backward
    with pytest.raises(NotImplementedError, match="mish_backward has no gradient"):
        backward(x.detach(), x).sum().backward()


def test_second_derivatives_of_functions():
    """Reverse over reverse, forward over reverse, reverse over forward."""
    x, f = normal(3, dtype=torch.float64), torch.func
    for outer, inner in ((f.jacrev, f.jacrev), (f.jacfwd, f.jacrev), (f.jacrev, f.jacfwd)):
        found = [outer(inner(lambda t, g=g: g(t).sum()))(x) for g in OPERATORS["mish"]]
        torch.testing.assert_close(*found)


@each_operator
def test_forward_mode(name):
    x, y = normal(4, 3, dtype=torch.float64), normal(3, dtype=torch.float64, seed=1)
    torch.autograd.gradcheck(
        OPERATORS[name][0],
        [t.requires_grad_() for t in operands(name, x, y)],
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=True,
    )


@each_binary
def test_a_tangent_is_promoted_and_shared(name):
    """Ties, broadcasting, and a double scalar that joins half precision."""
    x = random(4, 3, dtype=torch.float16, low=-2, high=3)
    y = torch.tensor(1.0, dtype=torch.float64, device=DEVICE)
    found = []
    for function in OPERATORS[name]:
        with torch.autograd.forward_ad.dual_level():
            duals = [torch.autograd.forward_ad.make_dual(t, 2 * t + 1) for t in (x, y)]
            found.append(torch.autograd.forward_ad.unpack_dual(function(*duals)))
    assert_equal(found[0].primal, found[1].primal)
    assert_equal(found[0].tangent, found[1].tangent)


# ---------------------------------------------------------------- what is remembered


@pytest.fixture(params=OPERATORS)
def primed(request):
    """An operator that has seen plain tensors of this shape already."""
    name = request.param
    tensors = operands(name, normal(4, 4), normal(4, 4, seed=1))
    for _ in range(2):
        OPERATORS[name][0](*tensors)
    return name, tensors


def test_a_primed_operator_is_right(primed):
    name, (x, *rest) = primed
    for first in (x, x.t(), x.double(), x.bfloat16(), x.t().contiguous().t(), -x, x[:, :1], x[0]):
        tensors = (first, *rest)
        ours, theirs = OPERATORS[name]
        for _ in range(2):
            assert_result(name, ours(*tensors), theirs(*tensors), tensors[0])


def test_a_primed_operator_sees_another_address(primed):
    name, (x, *rest) = primed
    memory = normal(17, seed=3)
    tensors = (memory[1:].view(4, 4), *rest)
    ours, theirs = OPERATORS[name]
    assert_result(name, ours(*tensors), theirs(*tensors), tensors[0])


def test_a_primed_operator_records_gradients(primed):
    name, (x, *rest) = primed
    ours = OPERATORS[name][0]
    leaf = x.clone().requires_grad_()
    with torch.no_grad():
        assert not ours(leaf, *rest).requires_grad
    assert ours(leaf, *rest).requires_grad
    assert ours(torch.nn.Parameter(x), *rest).requires_grad
    assert not ours(leaf.detach(), *rest).requires_grad


def test_a_primed_operator_notices_modes(primed):
    name, tensors = primed
    ours = OPERATORS[name][0]
    for listener in (Recording, Listening):
        with listener() as mode:
            ours(*tensors)
        assert OP[name] in mode.seen
    Watching.seen.clear()
    assert type(ours(tensors[0].as_subclass(Watching), *tensors[1:])) is Watching
    assert OP[name] in Watching.seen


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_primed_operator_notices_transforms(primed):
    name, (x, *rest) = primed
    ours, theirs = (lambda t, f=f: f(t, *rest) for f in OPERATORS[name])
    stack = torch.stack([x, 2 * x, -x])
    torch.testing.assert_close(torch.vmap(ours)(stack), torch.vmap(theirs)(stack))
    slopes = [torch.func.grad(lambda t, f=f: f(t).sum())(x) for f in (ours, theirs)]
    torch.testing.assert_close(*slopes)
    tangents = [torch.func.jvp(f, (x,), (x,))[1] for f in (ours, theirs)]
    torch.testing.assert_close(*tangents)
    assert f"nbx::{name}" in str(torch.jit.trace(ours, x).graph)
    with torch.inference_mode():
        assert ours(x).is_inference()


def test_a_primed_operator_notices_what_is_no_plain_tensor(primed):
    name, (x, *rest) = primed
    ours, theirs = OPERATORS[name]
    for odd in (torch._neg_view(x), torch._efficientzerotensor(x.shape, device=DEVICE)):
        assert_equal(ours(odd, *rest), ours(odd.clone(), *rest))
    assert ours(x.to("meta"), *[t.to("meta") for t in rest]).is_meta
    with pytest.raises(NotImplementedError):
        ours(x.to_sparse(), *rest)
    with pytest.raises(TypeError):
        ours([1.0], *rest)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in (x, *rest)]
        assert ours(*fake).shape == theirs(*fake).shape


@each_operator
def test_a_tensor_outlives_its_transform(name):
    """torch.func leaves a wrapper around nothing, which torch unwraps."""
    ours, theirs = OPERATORS[name]
    kept = []
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(normal(3))
    leaf, twin = clones(normal(3, seed=1), normal(3, seed=1))
    for call, x in ((ours, leaf), (theirs, twin)):
        call(*operands(name, x, kept[0]) if name in BINARY else (kept[0] * x,)).sum().backward()
    torch.testing.assert_close(leaf.grad, twin.grad)
    torch.testing.assert_close(ours(*operands(name, *2 * kept)), theirs(*operands(name, *2 * kept)))
