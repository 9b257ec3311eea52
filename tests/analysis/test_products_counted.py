"""Operations against torch's own counter: of the flat form written by hand, and of our torch path.

The counter (torch.utils.flop_counter) knows products alone, so ops whose work is elementwise are in
test_hand_counts.py.
"""

import importlib
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree, analysis


def even():
    return BroadcastTree.from_counts({"item": [5] * 4}, root="user")


def deep():
    return BroadcastTree.from_counts({"vendor": [2, 1, 0], "item": [3, 0, 4]}, root="user")


def unsorted():
    maps = {"vendor": [1, 0, 1], "item": [2, 0, 0, 1, 2, 2, 0]}
    return BroadcastTree.from_parents(maps, root="user", root_rows=2)


def tabled():
    return deep().with_table("brand", of="item", index=[1, 0, 1, 1, 0, 1, 1], rows=2)


def roomy():
    counts, capacity = {"item": [2, 3]}, {"user": 4, "item": 9}
    return BroadcastTree.from_counts(counts, root="user", capacity=capacity)


WIDTHS = {"user": 6, "vendor": 3, "brand": 5, "item": 4}
TREES = [even, deep, unsorted, tabled]


def widths_of(tree):
    return {name: WIDTHS[name] for name in (*tree.levels, *tree.tables)}


def _added(out, a, b, out_shape=None, **_):
    return 2 * math.prod(a) * b[-1]


def _attended(q, k, v, *_, out_shape=None, **__):
    return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


aten = torch.ops.aten
# Products that the counter does not know by itself.
MORE = {
    aten.addmm_: _added,
    aten.baddbmm_: _added,
    aten._scaled_dot_product_flash_attention_for_cpu: _attended,
}


def counted(call):
    with FlopCounterMode(display=False, custom_mapping=MORE) as counter:
        call()
    return counter.get_total_flops()


def attention(q, k, v):
    """[rows, heads, queries or keys, dim]; as products, which all versions of torch count."""
    return (q @ k.transpose(2, 3)).softmax(3) @ v


def inside(monkeypatch, name, call):
    """What a kernel module's `forward` does in `call`, run again where a counter can see it."""
    module, found = importlib.import_module(f"ikbo_tree.kernels.{name}"), []
    forward = module.forward

    def noted(*args):
        found.append(args)
        return forward(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module, "forward", noted)
        call()
    (args,) = found
    return counted(lambda: forward(*args))


def copied(tree, x):
    return [x[n][tree.ancestors("item", of=n)] for n in x]


@pytest.mark.parametrize("make", TREES)
def test_linear(make, monkeypatch):
    tree = make()
    widths = widths_of(tree)
    x = {n: torch.randn(tree.rows(n), k) for n, k in widths.items()}
    w = {n: torch.randn(7, k) for n, k in widths.items()}
    found = analysis.linear(tree, widths, 7)
    flat = counted(lambda: F.linear(torch.cat(copied(tree, x), 1), torch.cat([*w.values()], 1)))
    ours = inside(
        monkeypatch, "linear.torch_impl", lambda: ikbo.linear(x, w, tree=tree, impl="torch")
    )
    assert (found.flat.total.flops, found.tree.total.flops) == (flat, ours)
    assert ours < flat


@pytest.mark.parametrize("make", TREES)
def test_linear_compression(make, monkeypatch):
    tree = make()
    widths = widths_of(tree)
    e = {n: torch.randn(tree.rows(n), k, 8) for n, k in widths.items()}
    w = {n: torch.randn(7, k) for n, k in widths.items()}
    found = analysis.linear_compression(tree, widths, 7, 8)
    whole = torch.cat([*w.values()], 1).expand(tree.rows("item"), -1, -1)
    flat = counted(lambda: torch.bmm(whole, torch.cat(copied(tree, e), 1)))
    ours = inside(
        monkeypatch,
        "linear_compression.torch_impl",
        lambda: ikbo.linear_compression(e, w, tree=tree, impl="torch"),
    )
    assert (found.flat.total.flops, found.tree.total.flops) == (flat, ours)


def test_the_results_level_may_lie_below_all_inputs(monkeypatch):
    tree = deep()
    x, w = {"user": torch.randn(3, 6)}, {"user": torch.randn(7, 6)}
    found = analysis.linear(tree, {"user": 6}, 7, level="item")
    ours = inside(
        monkeypatch,
        "linear.torch_impl",
        lambda: ikbo.linear(x, w, tree=tree, level="item", impl="torch"),
    )
    assert found.tree.total.flops == ours == 2 * 3 * 6 * 7
    assert found.flat.total.flops == 2 * 7 * 6 * 7


def test_dead_rows_cost_nothing():
    spare, tight = roomy(), BroadcastTree.from_counts({"item": [2, 3]}, root="user")
    for found in (analysis.linear(t, {"user": 6, "item": 4}, 7) for t in (spare, tight)):
        assert found.tree.total.flops == 2 * 7 * (2 * 6 + 5 * 4)
    sizes = {"level": "item", "dim": 8, "heads": 2, "n_seed": 3}
    one, other = (analysis.target_attention(t, {"user": [4, 2]}, **sizes) for t in (spare, tight))
    assert one == other


def heads(*shape):
    return torch.randn(*shape, 2, 8)


def test_target_attention(monkeypatch):
    tree = even()
    k, v, q = heads(4, 9), heads(4, 9), heads(20, 3)
    found = analysis.target_attention(tree, {"user": 9}, level="item", dim=8, heads=2, n_seed=3)
    at = tree.ancestors("item", of="user")
    turned = [x.transpose(1, 2) for x in (q, k[at], v[at])]
    flat = counted(lambda: attention(*turned))
    ours = inside(
        monkeypatch,
        "target_attention.torch_impl",
        lambda: ikbo.target_attention(q, {"user": (k, v)}, tree=tree, level="item", impl="torch"),
    )
    assert found.flat.total.flops == found.tree.total.flops == flat == ours


def test_attention_to_uneven_histories_of_two_levels():
    tree = deep()
    lengths = {"user": [4, 0, 7], "vendor": torch.tensor([2, 5, 1])}
    found = analysis.target_attention(tree, lengths, level="item", dim=8, heads=2, n_seed=3)
    of = {n: tree.ancestors("item", of=n).tolist() for n in lengths}
    met = [sum(int(lengths[n][of[n][i]]) for n in lengths) for i in range(7)]
    flat = 0
    for keys in met:
        q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, keys, 8)
        flat += counted(lambda q=q, k=k: attention(q, k, k))
    assert found.tree.total.flops == found.flat.total.flops == flat


def test_grouped_heads_and_wide_values_change_bytes_and_work():
    tree = even()
    sizes = {"level": "item", "dim": 8, "heads": 4, "n_seed": 3, "kv_heads": 2, "value_dim": 6}
    found = analysis.target_attention(tree, {"user": 9}, **sizes)
    q, k, v = torch.randn(20, 4, 3, 8), torch.randn(20, 4, 9, 8), torch.randn(20, 4, 9, 6)
    flat = counted(lambda: attention(q, k, v))
    assert found.tree.total.flops == flat
    assert found.tree.by_level()["user"].bytes == 4 * (4 * 9 * 2 * (8 + 6)) + 4 * 20


@pytest.mark.parametrize("causal", [False, True])
def test_self_target_attention_adds_the_histories_to_themselves(causal):
    """Once a user on the tree, once an item (5 a user) in the flat form."""
    tree, lengths = even(), [4, 0, 7, 2]
    sizes = {"level": "item", "dim": 8, "heads": 2, "n_seed": 3}
    both = analysis.self_target_attention(tree, lengths, of="user", causal=causal, **sizes)
    target = analysis.target_attention(tree, {"user": lengths}, **sizes)
    users = 0
    for rows in lengths:
        for keys in range(1, rows + 1):  # query i sees i keys, or all
            q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, keys if causal else rows, 8)
            users += counted(lambda q=q, k=k: attention(q, k, k))
    assert both.tree.total.flops == target.tree.total.flops + users
    assert both.flat.total.flops == target.flat.total.flops + 5 * users
    # Queries and results; in the flat form keys and values of the copies once more, and the copies
    # of the queries, each history's read once.
    events = sum(lengths) * 2 * 8 * 4
    assert both.tree.total.bytes == target.tree.total.bytes + 2 * events
    flat = target.flat.total.bytes + 5 * 2 * events + 5 * 2 * events + (1 + 5) * events
    assert both.flat.total.bytes == flat


def test_silu_attention_is_counted_as_attention():
    sizes = {"level": "item", "dim": 8, "heads": 2, "n_seed": 3}
    silu = analysis.silu_attention(deep(), {"user": 9}, **sizes)
    softmax = analysis.target_attention(deep(), {"user": 9}, **sizes)
    assert silu.tree.total == softmax.tree.total
    assert silu.flat.total == softmax.flat.total


@pytest.mark.parametrize("make", TREES)
def test_dot_interaction(make):
    tree = make()
    fields = {n: torch.randn(tree.rows(n), k, 8) for n, k in widths_of(tree).items()}
    found = analysis.dot_interaction(tree, widths_of(tree), 8)
    x = torch.cat(copied(tree, fields), 1)
    flat = counted(lambda: torch.bmm(x, x.transpose(1, 2)))
    ours = counted(lambda: ikbo.dot_interaction(fields, tree=tree))
    assert (found.flat.total.flops, found.tree.total.flops) == (flat, ours)


def layers_of(form, k):
    rank, experts = 3, 2
    vector = ikbo.VectorCross(torch.randn(k), torch.randn(k))
    matrix = ikbo.MatrixCross(torch.randn(k, k))
    low = ikbo.LowRankCross(torch.randn(k, rank), torch.randn(rank, k))
    u, v = torch.randn(experts, k, rank), torch.randn(experts, rank, k)
    mixed = ikbo.MixtureCross(u, v, torch.randn(experts, rank, rank), torch.randn(experts, k))
    return {
        "none": [],
        "vectors": [vector, vector],
        "matrices": [matrix, matrix],
        "vectors first": [vector, low, matrix],
        "low rank": [low, low],
        "mixture": [mixed, mixed],
    }[form]


@pytest.mark.parametrize(
    "form", ["none", "vectors", "matrices", "vectors first", "low rank", "mixture"]
)
@pytest.mark.parametrize("make", [even, deep])
def test_cross(make, form, monkeypatch):
    tree = make()
    widths = widths_of(tree)
    x = {n: torch.randn(tree.rows(n), k) for n, k in widths.items()}
    k, rows = sum(widths.values()), tree.rows("item")
    layers = layers_of(form, k)
    found = analysis.cross(tree, widths, layers)
    ours = counted(lambda: ikbo.cross(x, layers, tree=tree, impl="torch"))
    if layers:
        call = lambda: ikbo.cross(x, layers, tree=tree, impl="torch")  # noqa: E731
        ours += inside(monkeypatch, "linear.torch_impl", call)
    # Each time that x0 is met, it is multiplied and added to.
    met = 2 * rows * k * sum("times x0" in step.op for step in found.tree.steps)
    assert found.tree.total.flops == ours + met


@pytest.mark.parametrize("form", ["vectors", "matrices", "low rank", "mixture"])
def test_flat_cross(form):
    """Layer by layer as the op's docstring has it, on a tree of one level, where nothing splits."""
    tree = BroadcastTree.from_counts({"item": [6]}, root="user")
    layers = layers_of(form, 10)
    found = analysis.cross(tree, {"item": 10}, layers)
    x = x0 = torch.randn(6, 10)
    flops = 0
    for layer in layers:
        with FlopCounterMode(display=False) as counter:
            x = x0 * layer.then(F.linear(x, layer.first())) + x
        flops += counter.get_total_flops() + 2 * x.numel()
    assert found.flat.total.flops == flops
