"""The compiled launch, with the GPU's part played by recorders.

Without a GPU the interpreter computes. What the host does around a compiled
kernel is checked here all the same: which outputs it makes, and what it sends.
"""

import contextlib

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
