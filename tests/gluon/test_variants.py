"""Every variant that benchmarks/ablate_kernels.py times is another launch; inside of it only."""

import ablate_kernels
import pytest
import torch
from ablate_kernels import SHIPPED, VARIANTS, Variant, switched
from offline.compiling import compile_only

from ikbo_tree import BroadcastTree
from ikbo_tree.kernels.common.stages import Stages
from ikbo_tree.kernels.linear_compression import gluon_schedule, gluon_sm90
from ikbo_tree.kernels.target_attention import gluon_backward, triton_backward
from ikbo_tree.kernels.target_attention import gluon_sm90 as attention
from ikbo_tree.kernels.target_attention.memories import Memory

TREE = BroadcastTree.from_counts({"item": [5, 3, 9]}, root="user")
USERS, ITEMS = 3, 17


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.float16)


def compress(partial):
    x = [zeros(rows, K, 256) for rows, K in ((USERS, 1178), (ITEMS, 866))]
    stages = Stages([1], [torch.zeros(ITEMS, dtype=torch.int32)], [], [], [])
    gluon_sm90.forward(x, [zeros(433, 1178), zeros(433, 866)], None, stages, partial)


def attention_inputs():
    route = TREE.route("item", "user")
    extent = torch.zeros(USERS, dtype=torch.int32)
    k, v = (zeros(USERS, 96, 2, 128) for _ in range(2))
    return zeros(ITEMS, 64, 2, 128), Memory(
        k, v, extent=extent, index=route.index, offsets=route.offsets
    )


def attend():
    q, memory = attention_inputs()
    attention.forward(q, [memory], None, 0.1)


def differentiate():
    q, memory = attention_inputs()
    lse = torch.zeros(q.shape[:-1])
    args = (torch.zeros_like(q), None, torch.zeros_like(q), lse, q, [memory], None, 0.1)
    gluon_backward.backward(*args, [True] * 3)


CALLS = {
    "lce": lambda: compress(torch.float16),
    "lce, float32 partials": lambda: compress(torch.float32),
    "attn": attend,
    "attn-bwd": differentiate,
}
CASES = [
    (name, variant)
    for name in CALLS
    for variant in VARIANTS[name.partition(",")[0]]
    if variant.who != SHIPPED
]


@pytest.fixture
def launched(monkeypatch):
    """Runs a call on the CPU and returns what it would launch: grids, whole numbers, constants."""
    seen = []

    def record(kernel, grid, *args, **options):
        counts = [(n, x) for n, x in zip(kernel.arg_names, args, strict=False) if type(x) is int]
        seen.append((kernel.__name__, grid, counts, options))

    for module in (gluon_sm90, attention, gluon_backward, triton_backward):
        monkeypatch.setattr(module, "launch", record)
    monkeypatch.setattr(
        gluon_sm90, "prepare", lambda work, weights: [zeros(433, 1184)[:, :K] for K in (1178, 866)]
    )

    def run(call):
        seen.clear()
        with compile_only():
            call()
        return list(seen)

    return run


@pytest.mark.parametrize(("name", "variant"), CASES, ids=lambda x: getattr(x, "who", x))
def test_a_variant_changes_the_launch(launched, name, variant):
    shipped = launched(CALLS[name])
    assert shipped
    with switched(variant, name.partition(",")[0]):
        changed = launched(CALLS[name])
    assert changed != shipped
    assert launched(CALLS[name]) == shipped, "what was switched off is on again"


def test_no_two_variants_are_the_same(launched):
    for name, call in CALLS.items():
        family, seen = name.partition(",")[0], []
        for variant in VARIANTS[family]:
            with switched(variant, family):
                seen.append(launched(call))
        assert all(a != b for i, a in enumerate(seen) for b in seen[:i])


def test_without_persistence_each_tile_has_a_block(launched):
    (variant,) = (v for v in VARIANTS["attn"] if not v.persistent)
    ((_, grid, counts, _),) = launched(attend)
    assert grid < (dict(counts)["n_items"],)
    with switched(variant, "attn"):
        ((_, grid, counts, _),) = launched(attend)
    assert grid == (dict(counts)["n_items"],)


def test_a_launch_a_level_has_all_levels_and_edges():
    producers = [[], [0], [], [0, 1, 2]]
    apart = ablate_kernels._launch_a_level(producers)
    assert [part.first for part in apart] == [0, 1, 2, 3]
    (whole,) = gluon_schedule.launches(producers)
    for level, part in enumerate(apart):
        assert part.levels == 1
        assert {e.slot for e in part.edges} <= {0}
        mine = [(e.producer, e.turn) for e in whole.edges if e.slot == level]
        assert [(e.producer, e.turn) for e in part.edges] == mine


def test_workloads_have_variants_and_sizes():
    for workload, family in ablate_kernels.WORKLOADS.items():
        assert VARIANTS[family][0] == Variant(SHIPPED)
        base = workload.rpartition("-p")[0] if family == "lce" else workload
        known = ablate_kernels.attention_data.workloads()
        assert base in (ablate_kernels.bench_lce.WORKLOADS if family == "lce" else known)
