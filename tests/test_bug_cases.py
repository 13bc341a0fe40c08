"""Faults that such operators had elsewhere, each as a test that would have caught it.

The address above a test is the public report of the fault, in whatever library it was.
"""

import nbxtensor
from nbxtensor.runtime import DEVICE

import pytest
import torch
from helpers import (
    BINARY,
    OPERATORS,
    assert_equal,
    assert_result,
    assert_same,
    assert_slope,
    assert_ulps,
    each_binary,
    each_operator,
    exact_mish,
    needs_gpu,
    needs_memory,
    normal,
    operands,
    random,
)

NAN, INF = float("nan"), float("inf")
INT64 = torch.iinfo(torch.int64)


def tensor(values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def spread(rows, step):
    """The rows as one tensor, each a step of elements after the one before."""
    rows = torch.stack(rows)
    base = torch.empty((len(rows) - 1) * step + rows[0].numel(), dtype=rows.dtype, device=DEVICE)
    view = base.as_strided(rows.shape, (step, *rows.stride()[1:]))
    return view.copy_(rows)


# https://github.com/triton-lang/triton/issues/1566
@each_binary
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_nan_on_either_side_wins(name, dtype):
    ours, _ = OPERATORS[name]
    other = tensor([1, INF, -INF, NAN, 0], dtype)
    nans = torch.full_like(other, NAN)
    assert ours(nans, other).isnan().all() and ours(other, nans).isnan().all()
    assert ours(other, other.nan_to_num()).isnan().tolist() == [False, False, False, True, False]


# https://github.com/tinygrad/tinygrad/issues/3186
@each_binary
def test_a_tensor_without_dimensions_does_not_widen(name):
    ours, theirs = OPERATORS[name]
    x, wide = tensor([1, 3], torch.float16), tensor(2.3, torch.float64)
    assert_same(ours(x, wide), theirs(x, wide))
    assert ours(x, wide).dtype == torch.float16
    assert_same(ours(x.to(torch.int32), wide), theirs(x.to(torch.int32), wide))


# https://github.com/pytorch/pytorch/issues/51013
@each_binary
def test_a_scalar_on_the_cpu_may_join(name):
    ours, theirs = OPERATORS[name]
    x, scalar = tensor([[1, 5], [-2, 0]]), torch.tensor(0.5)
    assert_same(ours(x, scalar), theirs(x, scalar))
    assert_same(ours(scalar, x), theirs(scalar, x))


# https://github.com/data-apis/array-api/issues/707
@each_binary
def test_zeros_of_either_sign_are_equal(name):
    """Which of +0 and -0 comes out differs by device; that it is 0 does not."""
    ours, theirs = OPERATORS[name]
    x, y = tensor([0.0, -0.0, -0.0, 0.0]), tensor([-0.0, 0.0, -1e-45, 1e-45])
    assert_same(ours(x, y), theirs(x, y))


# https://github.com/pytorch/pytorch/issues/56734
@each_binary
def test_equal_operands_share_the_gradient(name):
    x, y = tensor([[2], [4]]).requires_grad_(), tensor([4, 2, 3]).requires_grad_()
    upstream = tensor([[1, 2, 4], [8, 16, 32]])
    got, want = (torch.autograd.grad(f(x, y), (x, y), upstream) for f in OPERATORS[name])
    for mine, other in zip(got, want):
        assert_equal(mine, other)
    if name == "maximum":
        assert [g.flatten().tolist() for g in got] == [[1.0, 52.0], [5.0, 1.0, 4.0]]


# https://github.com/pytorch/pytorch/issues/112329
@each_operator
def test_autocast_leaves_the_dtype_alone(name):
    x, y = tensor([1, 5]), tensor([3, 1], torch.bfloat16)
    with torch.autocast(DEVICE, torch.bfloat16):
        result = OPERATORS[name][0](*operands(name, x, y))
    assert result.dtype == torch.float32


# https://github.com/pytorch/torchdynamo/pull/860
@each_binary
def test_int64_is_compared_in_int64(name):
    """Neighbours above 2**53 are one number in float64; -2**63 is a value like others."""
    ours, theirs = OPERATORS[name]
    x = tensor([2**53, 2**53 + 1, INT64.min, INT64.max, INT64.min, -(2**40)], torch.int64)
    y = tensor([2**53 + 1, 2**53, INT64.min + 1, INT64.max - 1, INT64.max, -(2**40) - 1], x.dtype)
    assert_same(ours(x, y), theirs(x, y))
    assert ours(x, y).tolist() == list(
        map(max if name == "maximum" else min, x.tolist(), y.tolist())
    )


# https://github.com/OP2/PyOP2/issues/65
@each_binary
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
)
def test_the_ends_of_integer_ranges(name, dtype):
    """No fill value of a partial block shows, and nothing wraps or changes sign."""
    ours, theirs = OPERATORS[name]
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    ends = tensor([low, high, 0, 1], dtype)
    x, y = ends.repeat(333)[:1331], ends.repeat_interleave(333)[:1331]
    assert_same(ours(x, y), theirs(x, y))


# https://github.com/flagos-ai/Torch-FL/issues/350
@each_operator
@pytest.mark.parametrize("n", [20, 1000, 1025])
def test_lanes_beyond_the_end_leave_no_trace(name, n):
    """What lies behind the last element is NaN and stays out of the result."""
    ours, theirs = OPERATORS[name]
    guarded = torch.full((3, n + 64), NAN, device=DEVICE)
    guarded[:, :n] = normal(3, n)
    x, y = guarded[0, :n], guarded[1:, :n]
    tensors = operands(name, x, y) if name in BINARY else (y,)
    assert_result(name, ours(*tensors), theirs(*tensors), tensors[0])
    assert guarded[:, n:].isnan().all()


# https://github.com/pytorch/pytorch/issues/83325 and /issues/28380
@each_operator
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)], ids=str)
def test_nothing_to_compute(name, shape):
    ours, theirs = OPERATORS[name]
    x = torch.empty(shape, device=DEVICE)
    for y in (x, torch.ones(1, device=DEVICE), torch.ones((), device=DEVICE)):
        for tensors in (operands(name, x, y), operands(name, y, x)):
            assert_result(name, ours(*tensors), theirs(*tensors), tensors[0])
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(ours(*operands(name, x, x)).sum(), x)
    assert gradient.shape == x.shape


# https://github.com/pytorch/pytorch/issues/1036 and /issues/67239
@each_operator
def test_strides_are_walked_not_assumed(name):
    ours, theirs = OPERATORS[name]
    x = normal(12, 10).t()[::2, 3:]
    image = normal(2, 5, 6, 7, seed=1).to(memory_format=torch.channels_last)
    column = normal(9, 5, seed=2)[:, 3]
    plain = image.contiguous()
    for a, b in ((x, x), (image, plain), (plain, image), (column, column)):
        tensors = operands(name, a, b)
        assert_result(name, ours(*tensors), theirs(*tensors), a)


# https://github.com/flagos-ai/FlagGems/issues/2624
@each_operator
def test_float64_is_computed_in_float64(name):
    ours, theirs = OPERATORS[name]
    x = tensor([1 + 1e-12, 1 - 1e-12, 1e200, -1e-200, 3], torch.float64)
    tensors = operands(name, x, x.flip(0))
    assert_result(name, ours(*tensors), theirs(*tensors), x)


# https://github.com/NVlabs/LongLive/pull/61
@each_operator
def test_a_result_remembers_where_it_came_from(name):
    x, y = normal(3).requires_grad_(), normal(3, seed=1)
    result = OPERATORS[name][0](*operands(name, x, y))
    assert result.grad_fn is not None
    result.sum().backward()
    assert x.grad is not None


# https://github.com/pytorch/pytorch/issues/107011
@each_operator
def test_twenty_runs_give_the_same_bits(name):
    x, y = random(5, 300).requires_grad_(), random(300, seed=1).requires_grad_()

    def run():
        tensors = operands(name, x, y)
        result = OPERATORS[name][0](*tensors)
        return (result, *torch.autograd.grad(result.square().sum(), tensors))

    first = run()
    for _ in range(19):
        assert all(torch.equal(*both) for both in zip(first, run()))


# https://github.com/pytorch/pytorch/pull/94887
@each_operator
def test_a_second_shape_under_compile(name):
    ours, theirs = OPERATORS[name]
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager", dynamic=True, fullgraph=True)
    for shape in ((2, 5), (3, 8), (7, 1), (1, 9)):
        x, y = normal(*shape), normal(shape[1], seed=1)
        tensors = operands(name, x, y)
        assert_result(name, compiled(*tensors), theirs(*tensors), x)


# https://github.com/pytorch/pytorch/pull/43037
def test_mish_of_large_numbers():
    x = tensor([20, 44, 45, 88, 89, 1e4, 1e38, INF, NAN])
    got = nbxtensor.mish(x)
    assert_ulps(got, exact_mish(x))
    assert got[-2] == INF and got[-1].isnan()
    half = tensor([11, 12, 44, 88, 300, 6e4, INF], torch.float16)
    assert_equal(nbxtensor.mish(half), half)


# https://github.com/AlexeyAB/darknet/issues/5452
def test_mish_on_the_far_left():
    x = torch.linspace(-80, -2, 1121, device=DEVICE)
    got = nbxtensor.mish(x)
    assert (got < 0).all()
    assert_ulps(got, exact_mish(x))


# https://github.com/PaddlePaddle/Paddle/pull/24565
def test_gradient_of_mish_at_large_numbers():
    x = tensor([-1e38, -1000, -100, -30, -1, 0, 1, 30, 44, 45, 89, 100, 1000, 1e38])
    x.requires_grad_()
    (slope,) = torch.autograd.grad(nbxtensor.mish(x).sum(), x)
    assert_slope(slope, x, torch.ones_like(x))
    assert slope[:3].abs().max() < 1e-40
    assert slope[-7:].tolist() == [1.0] * 7


# https://github.com/pytorch/pytorch/pull/178547
@needs_gpu
@each_operator
def test_the_current_stream_is_the_stream(name):
    ours, theirs = OPERATORS[name]
    x, y = normal(4096), normal(4096, seed=1)
    ours(*operands(name, x, y))
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late.copy_(x)
        got = ours(*operands(name, late, y))
    stream.synchronize()
    assert_result(name, got, theirs(*operands(name, x, y)), x)


# https://github.com/pytorch/pytorch/issues/68418 and /issues/32863
@needs_gpu
@each_operator
@pytest.mark.parametrize("shape", [(5,), (4, 6), (1,)], ids=str)
def test_rows_far_apart(name, shape):
    """Few elements, and offsets beyond 2**31."""
    needs_memory(16)
    ours, theirs = OPERATORS[name]
    dtype = torch.float16 if name == "mish" else torch.uint8
    x, y = (
        spread([random(*shape, dtype=dtype, seed=s + k, low=0) for s in range(4)], 1_100_000_000)
        for k in (0, 10)
    )
    near = [t.contiguous() for t in operands(name, x, y)]
    got, want = ours(*operands(name, x, y)), theirs(*near)
    assert_result(name, got, want, near[0])


# https://github.com/pytorch/pytorch/issues/15837
@needs_gpu
@each_operator
def test_more_than_int32_of_one_element(name):
    """A stride of 0 in a dimension, and 2**31 + 128 results."""
    needs_memory(12)
    ours, _ = OPERATORS[name]
    dtype = torch.float16 if name == "mish" else torch.uint8
    x = tensor([[1], [3]], dtype).expand(2, 2**30 + 64)
    y = tensor([[2], [1]], dtype).expand(2, 2**30 + 64)
    result = ours(*operands(name, x, y))
    want = OPERATORS[name][1](*operands(name, x[:, :1], y[:, :1]))
    for part in result.split(1 << 28, dim=1):
        if name == "mish":
            assert bool((part == part[:, :1]).all())
            torch.testing.assert_close(part[:, :1], want)
        else:
            assert bool((part == want).all())
