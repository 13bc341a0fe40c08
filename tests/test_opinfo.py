"""The operators on the samples with which PyTorch tests its own."""

import warnings

from nbxtensor.runtime import DEVICE, INTERPRETED

import pytest
import torch
from helpers import (
    OPERATORS,
    assert_equal,
    assert_result,
    assert_slope,
)

with warnings.catch_warnings():
    # Of what PyTorch's own test modules find missing, nothing is used here.
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

ENTRIES = {
    ("maximum", ""): "maximum",
    ("max", "binary"): "maximum",
    ("minimum", ""): "minimum",
    ("min", "binary"): "minimum",
    ("nn.functional.mish", ""): "mish",
}
INFOS = [info for info in op_db if (info.name, info.variant_test_name) in ENTRIES]
# torch.max of two tensors is torch.maximum, in the database too.
ALIASES = {"max": "maximum", "min": "minimum"}


def named(info, *more):
    return "-".join([info.formatted_name, *(str(m).removeprefix("torch.") for m in more)])


def each(dtypes):
    """Parametrise with (operator's name, database entry, dtype, collection)."""
    return pytest.mark.parametrize(
        ("name", "info", "dtype", "collection"),
        [
            pytest.param(
                ENTRIES[info.name, info.variant_test_name],
                info,
                dtype,
                collection,
                id=named(info, dtype, collection),
            )
            for info in INFOS
            for dtype in sorted(getattr(info, dtypes)(DEVICE), key=str)
            for collection in ("sample_inputs", "reference_inputs")
            # An alias has no reference inputs of its own, and the interpreter is slow.
            if not (INTERPRETED and info.name in ALIASES and collection == "reference_inputs")
        ],
    )


def samples(info, dtype, collection, **options):
    found = list(getattr(info, collection)(DEVICE, dtype, **options))
    assert found
    for sample in found:
        assert not sample.kwargs
    return found


def test_every_entry_is_there():
    assert len(INFOS) == len(ENTRIES)


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_has_the_reference_inputs_of_its_name(alias):
    def layouts(name):
        (info,) = (i for i in INFOS if i.name == name)
        return [
            [(t.shape, t.stride(), t.dtype) for t in (sample.input, *sample.args)]
            for dtype in sorted(info.supported_dtypes(DEVICE), key=str)
            for sample in samples(info, dtype, "reference_inputs")
        ]

    assert layouts(alias) == layouts(ALIASES[alias])


@each("supported_dtypes")
def test_values(name, info, dtype, collection):
    ours, _ = OPERATORS[name]
    for sample in samples(info, dtype, collection):
        # The reference inputs bring strided tensors with them.
        others = [sample.noncontiguous()] if collection == "sample_inputs" else []
        for case in (sample, *others):
            tensors = (case.input, *case.args)
            before = [t.clone() for t in tensors]
            assert_result(name, ours(*tensors), info.op(*tensors), case.input)
            for tensor, copy in zip(tensors, before):
                assert_equal(tensor, copy)


@each("supported_backward_dtypes")
def test_gradients(name, info, dtype, collection):
    ours, _ = OPERATORS[name]
    for sample in samples(info, dtype, collection, requires_grad=True):
        # Some samples are views of which autograd loses track; a detached one is a leaf.
        tensors = [t.detach().requires_grad_(t.requires_grad) for t in (sample.input, *sample.args)]
        wanting = [t for t in tensors if t.requires_grad]
        got, want = ours(*tensors), info.op(*tensors)
        assert got.requires_grad == want.requires_grad == bool(wanting)
        if not wanting:
            continue
        # Whole numbers and their halves: sums over broadcast dimensions are exact.
        upstream = torch.arange(want.numel(), device=DEVICE).remainder(5).sub(2)
        upstream = upstream.to(want.dtype).view(want.shape)
        for mine, theirs, tensor in zip(
            torch.autograd.grad(got, wanting, upstream),
            torch.autograd.grad(want, wanting, upstream),
            wanting,
        ):
            assert mine.dtype == theirs.dtype == tensor.dtype
            if name == "mish":
                assert_slope(mine, tensor, upstream)
            else:
                assert_equal(mine, theirs)


@pytest.mark.parametrize("info", [i for i in INFOS if i.error_inputs_func], ids=named)
def test_errors(info):
    name = ENTRIES[info.name, info.variant_test_name]
    ours, theirs = OPERATORS[name]
    for error in info.error_inputs(DEVICE):
        arguments = (error.sample_input.input, *error.sample_input.args)
        with pytest.raises(error.error_type) as expected:
            theirs(*arguments)
        with pytest.raises(expected.type, match=f"{name}\\(\\): argument"):
            ours(*arguments)
