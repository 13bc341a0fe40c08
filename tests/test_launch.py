"""The compiled launch, with the GPU's part played by recorders.

Without a GPU the interpreter computes. What the host does around a compiled
kernel is checked here all the same: which outputs it makes, and what it sends.
"""

import contextlib
from types import SimpleNamespace

from nbxtensor import runtime

import pytest
import torch


class Kernel:
    """Stands for a jitted kernel; remembers how it was launched."""

    def __init__(self):
        self.grids = []

    def warmup(self, *arguments, grid, num_warps):
        self.warmed = arguments

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *arguments, num_warps: None


@pytest.fixture
def sent(monkeypatch):
    """What the launcher was sent; kernels are recorders, and index None is the device."""
    calls = []

    def direct(compiled, grid, inputs, arguments):
        return (lambda *values: calls.append(values)), ("head", grid), ("tail",)

    monkeypatch.setattr(runtime, "INTERPRETED", False)
    monkeypatch.setattr(runtime, "_direct", direct)
    monkeypatch.setattr(runtime, "pointwise_flat", Kernel())
    monkeypatch.setattr(runtime, "pointwise_tiled", Kernel())
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: 77, raising=False)
    return calls


def plan(outputs, *tensors, dtype=torch.float32):
    expanded = torch.broadcast_tensors(*tensors)
    like = {
        "size": expanded[0].shape,
        "stride": runtime._result_strides(tensors, expanded),
        "dtype": dtype,
        "device": tensors[0].device,
    }
    return like, runtime._plan("body", outputs, like, tensors, expanded)


x = torch.randn(4, 6)
LAYOUTS = {
    "same": (x, x.flip(0)),
    "turned": (x, torch.randn(6, 4).t()),
    "both turned": (x.t(), x.t()),
    "first is a row": (x[0], x),
    "first is a column": (x[:, :1], x),
    "first is a scalar": (x[0, 0], x),
    "both spread": (x[:, :1], x[0]),
    "one more dimension": (x[0], x[:1]),
    "gaps": (x[:, ::2], x[:, ::2]),
    "other dtype": (x.int(), x),
    "one": (x,),
    "three": (x[:1], x, x[:, :1]),
}


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_and_addresses(sent, layout, outputs):
    tensors = LAYOUTS[layout]
    like, launch = plan(outputs, *tensors)
    addresses = tuple(t.data_ptr() for t in tensors)
    results = launch(tensors, addresses)
    results = (results,) if outputs == 1 else results
    assert len(results) == outputs
    for result in results:
        assert {
            "size": result.shape,
            "stride": result.stride(),
            "dtype": result.dtype,
            "device": result.device,
        } == like
    (call,) = sent
    made = tuple(r.data_ptr() for r in results)
    assert call[0] == "head" and call[2:] == ((*addresses, *made, "tail"), 77)
    assert len(set(made)) == outputs


def test_a_listener_hears_of_the_launch(sent):
    """Triton makes the launch where a profiler has hooked itself in."""
    _, launch = plan(1, x, x)
    hook = runtime.knobs.runtime.launch_enter_hook
    hook.add(print)
    try:
        launch((x, x), (x.data_ptr(), x.data_ptr()))
    finally:
        hook.remove(print)
    assert not sent and len(runtime.pointwise_flat.grids) == 1


def test_another_current_device(sent, monkeypatch):
    """The launch is made under a guard where the tensors' device is not current."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    _, launch = plan(1, x, x)
    launch((x, x), (x.data_ptr(), x.data_ptr()))
    assert not sent and len(runtime.pointwise_flat.grids) == 1


@pytest.mark.parametrize("layout", ["same", "turned", "first is a row", "other dtype"])
def test_an_operator_sends_the_same_each_time(sent, monkeypatch, layout):
    """Planned, found by its key, and recalled by its guard."""
    monkeypatch.setattr(runtime, "check_device", lambda *_: None)
    operator = runtime.Pointwise(
        "sends(Tensor input, Tensor other) -> Tensor",
        {torch.float32: "body"},
        promote=torch.result_type,
    )
    first, second = LAYOUTS[layout]
    for count in range(1, 4):
        result = operator(first, second)
        want = torch.maximum(first, second)
        assert (result.shape, result.stride()) == (want.shape, want.stride())
        assert len(sent) == count
        addresses = (first.data_ptr(), second.data_ptr(), result.data_ptr())
        assert sent[-1][2:] == ((*addresses, "tail"), 77)
    assert (first.shape, True) in operator.recent
    operator.kernel(first, second)
    assert len(sent) == 4 and len(operator.plans) == 1


def compiled(**scratch):
    """A compiled kernel of two inputs, one output, sizes (1, 7) and a wide stride."""
    signature = {
        "a": "*fp32", "b": "*fp32", "c": "constexpr", "out": "*fp32", "out2": "constexpr",
        "sizes": ("constexpr", "i32"), "steps": ("i64", ("i32", "constexpr")),
        "none": "constexpr", "BODY": "constexpr",
    }  # fmt: skip
    runs = []
    return SimpleNamespace(
        _init_handles=lambda: None,
        function="function",
        packed_metadata="packed",
        src=SimpleNamespace(signature=signature),
        metadata=SimpleNamespace(num_warps=8, shared=64, **scratch),
        run=lambda *values: runs.append(values),
        runs=runs,
    )


ARGUMENTS = ((1, 7), (2**40, (3, 1)), None, "body")
NOTHING = {"global_scratch_size": 0, "profile_scratch_size": 0}


def test_what_the_c_launcher_gets(monkeypatch):
    launcher = SimpleNamespace(_launch_kernel="launch")
    monkeypatch.setattr(torch._C, "_StaticCudaLauncher", launcher, raising=False)
    send, head, tail = runtime._direct(compiled(**NOTHING), 5, 2, ARGUMENTS)
    assert send == "launch"
    assert head == ("function", 5, 1, 1, 8, 64, "OOO" + "ili" + "OO")
    assert tail == (7, 2**40, 3, None, None)
    _, head, tail = runtime._direct(compiled(global_scratch_size=0), 5, 2, ARGUMENTS)
    assert head[-1] == "OOO" + "ili" + "O" and tail == (7, 2**40, 3, None)


@pytest.mark.parametrize("reason", ["no launcher", "scratch"])
def test_tritons_launcher_stands_in(monkeypatch, reason):
    launcher = None if reason == "no launcher" else SimpleNamespace(_launch_kernel="launch")
    monkeypatch.setattr(torch._C, "_StaticCudaLauncher", launcher, raising=False)
    scratch = NOTHING | ({"global_scratch_size": 16} if reason == "scratch" else {})
    kernel = compiled(**scratch)
    send, head, tail = runtime._direct(kernel, 5, 2, ARGUMENTS)
    send(*head, (11, 12, 13, *tail), 77)
    (values,) = kernel.runs
    assert values[:9] == (5, 1, 1, 77, "function", "packed", None, None, None)
    assert values[9:] == (11, 12, None, 13, None, *ARGUMENTS)
