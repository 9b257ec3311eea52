"""The Hopper attention kernel in graphs, on streams, and without waiting or compiling."""

import pytest
import torch
from triton import knobs

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree
from ikbo_tree.kernels.common.routes import Route

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0"),
]

USERS, ITEMS, KEYS = 8, 200, 300
SMALLER = [[30, 2, 0, 5, 80, 1, 1, 9], [200], [0, 0], []]
"""Items a user; the last tree has no row at all."""


def bits(x):
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def tree_of(items):
    capacity = {"user": USERS, "item": ITEMS}
    return BroadcastTree.from_counts({"item": items}, root="user", capacity=capacity).to("cuda")


def inputs(n=64):
    def make(*shape):
        return torch.randn(*shape, 2, 64, device="cuda", dtype=torch.float16)

    lengths = torch.zeros(USERS, dtype=torch.int32, device="cuda")
    return make(ITEMS, n), make(USERS, KEYS), make(USERS, KEYS), lengths


def attend(q, k, v, lengths, route, live):
    maps = ([None], [route.index], [route.offsets], [None])
    return torch.ops.ikbo_tree.target_attention(
        q, [k], [v], [], [], [lengths], *maps, live, 0.125, "gluon"
    )


@pytest.mark.parametrize("n", [5, 16, 64])
def test_a_graph_captured_at_capacity_serves_smaller_trees(n):
    tree = tree_of([25] * USERS)
    route = tree.route("item", "user")
    held = Route(*(None if part is None else part.clone() for part in route))
    live = tree.live("item").clone()
    tensors = inputs(n)
    attend(*tensors, held, live)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = attend(*tensors, held, live)
    for items in SMALLER:
        tree = tree_of(items)
        smaller = tree.route("item", "user")
        for mine, theirs in zip((*held, live), (*smaller, tree.live("item")), strict=True):
            if mine is not None:
                mine.copy_(theirs)
        for x, level in zip(tensors[:3], ("item", "user", "user"), strict=True):
            x.normal_()
            x[tree.rows(level) :] = torch.nan
        tensors[3].random_(0, KEYS + 1)
        for x in outputs:
            x.fill_(torch.nan)
        graph.replay()
        wanted = attend(*tensors, smaller, tree.live("item"))
        for got, want in zip(outputs, wanted, strict=True):
            assert torch.equal(bits(got), bits(want))
            assert not got.isnan().any()
            assert (got[tree.rows("item") :] == 0).all()


def test_launches_on_several_streams_do_not_share_counters():
    tree = tree_of([25] * USERS)
    route, live = tree.route("item", "user"), tree.live("item")
    tensors = inputs()
    tensors[3].fill_(KEYS)
    wanted = attend(*tensors, route, live)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    found = []
    for i in range(40):
        with torch.cuda.stream(streams[i % 4]):
            found.append(attend(*tensors, route, live))
    torch.cuda.synchronize()
    for results in found:
        for got, want in zip(results, wanted, strict=True):
            assert torch.equal(bits(got), bits(want))


def test_nothing_waits_for_the_device():
    tree = tree_of([5, 0, 9])
    tensors = inputs()
    route, live = tree.route("item", "user"), tree.live("item")
    attend(*tensors, route, live)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(*tensors, route, live)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("n", [3, 64])
def test_row_counts_compile_nothing(n):
    compiled = []
    before = knobs.runtime.jit_cache_hook
    try:
        for i, items in enumerate(([1], [1] * 16, [5, 3, 0], [4] * 16, [0, 1], [900, 700])):
            tree = BroadcastTree.from_counts({"item": items}, root="user").to("cuda")
            k, v = torch.zeros(2, len(items), 70, 2, 64, device="cuda", dtype=torch.float16)
            q = k.new_zeros(sum(items), n, 2, 64)
            ikbo.target_attention(q, {"user": (k, v)}, tree=tree, level="item", impl="gluon")
            if i == 0:
                knobs.runtime.jit_cache_hook = lambda **about: compiled.append(about["repr"])
    finally:
        knobs.runtime.jit_cache_hook = before
    assert compiled == []
