"""What a launch is recognised by says all that Triton compiles for."""

import itertools

import pytest
import torch
import triton
from offline.compiling import compile_only
from triton.tools.tensor_descriptor import TensorDescriptor

from ikbo_tree.kernels.common.triton_launch import _facts, _loose, described


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["p"])
def kernel(x, n, p):
    pass


LONG = torch.zeros(64, dtype=torch.float16)
NUMBERS = [0, 1, 2, 15, 16, 17, 80, -1, -16, 2**31 - 1, 2**31, 2**31 + 16, 2**40, -(2**31) - 1]
TENSORS = [LONG, LONG[1:], LONG[8:], LONG.float(), LONG.float()[1:], LONG.int()]
BOX = LONG.view(4, 16)
DESCRIPTORS = [
    TensorDescriptor(BOX, [4, 16], [16, 1], [2, 16]),
    TensorDescriptor(BOX, [4, 16], [16, 1], [4, 16]),
    TensorDescriptor(BOX, [2, 16], [32, 1], [2, 16]),
    TensorDescriptor(BOX.bfloat16(), [4, 16], [16, 1], [2, 16]),
]
TUPLES = [(1, 2), (1, 16), (16, 1), (None, 1), (LONG, 1), (LONG[1:], 1), ((1,), 2), ((2,), 1)]
VALUES = [*NUMBERS, *TENSORS, *DESCRIPTORS, *TUPLES, None, 0.5, 1.0]


@pytest.fixture
def specialised():
    """What Triton compiles for, given the arguments of `kernel`."""
    with compile_only():
        yield lambda x, n, p: kernel.device_caches[-3][4](x, n, p, debug=False)[1]


def test_equal_facts_are_equal_to_triton(specialised):
    for a, b in itertools.combinations(VALUES, 2):
        if _facts(a) == _facts(b) and hash(_facts(a)) == hash(_facts(b)):
            assert specialised(a, 0, LONG) == specialised(b, 0, LONG), (a, b)


def test_loose_facts_are_enough_where_triton_is_told_so(specialised):
    for a, b in itertools.combinations([*NUMBERS, 0.5], 2):
        if _loose(a) == _loose(b):
            assert specialised(0, a, LONG) == specialised(0, b, LONG), (a, b)
    for a, b in itertools.combinations(TENSORS, 2):
        if _loose(a) == _loose(b):
            assert specialised(0, 0, a) == specialised(0, 0, b), (a, b)


def test_what_differs_to_triton_is_told_apart(specialised):
    """The other way round, for what calls differ in: nothing is compiled twice for nothing."""
    same = [(3, 5), (16, 80), (LONG, LONG[8:]), (DESCRIPTORS[0], DESCRIPTORS[2]), (2.0, 0.5)]
    for a, b in same:
        assert _facts(a) == _facts(b)
        assert specialised(a, 0, LONG) == specialised(b, 0, LONG)


def test_descriptors_without_checks_are_like_others():
    plain = TensorDescriptor(BOX, [4, 16], [16, 1], [2, 16])
    assert vars(described(BOX, [4, 16], [16, 1], [2, 16])) == vars(plain)
