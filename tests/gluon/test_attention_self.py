"""The Hopper kernel of self_target_attention: values, gradients, isolation, batch invariance."""

from dataclasses import replace

import pytest
import torch
from attention_device import check, moved
from attention_naive import Call, draw, memory, queries, results, with_grads

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree
from ikbo_tree.testing.poison import canary_rows, poisoned_memory

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0"),
]

ITEMS = [3, 1, 0, 5, 2, 1]
LENGTHS = [300, 1, 129, 0, 64, 193]

causal_or_not = pytest.mark.parametrize("causal", [False, True])
every_form = pytest.mark.parametrize("form", ["whole", "padded", "packed"])


@pytest.fixture
def device():
    return torch.device("cuda")


def make(form="padded", *, items=ITEMS, lengths=LENGTHS, of="user", n=16, heads=(2, 2), width=64,
         causal=False, dtype=torch.float16, capacity=None, scale=None):  # fmt: skip
    """A call whose own queries are NaN where nobody may read, as the keys are."""
    tree = BroadcastTree.from_counts({"item": items}, root="user", capacity=capacity)
    options = {"heads": heads, "widths": (width, width), "dtype": dtype}
    history = memory(tree, of, form, keys=max(lengths), lengths=lengths, **options)
    q = queries(tree, "item", n, heads[0], width, dtype=dtype)
    q_self = draw(*history.k.shape[:-2], heads[0], width, dtype=dtype, seed=60)
    unowned = history.k.isnan().flatten(-2).any(-1)
    q_self[unowned] = torch.nan
    call = with_grads(Call(tree, "item", q, [history], scale=scale, q_self=q_self, causal=causal))
    for name in ("o_self", "lse_self"):
        call.grads[name][unowned] = torch.nan
    return call


def checked(call, device):
    """Results and gradients of the call, each within its budget."""
    with poisoned_memory(), canary_rows():
        found = results(moved(call, device), "gluon")
    return check(call, device, found=found)


def bits(x):
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


@causal_or_not
@every_form
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_forms(form, causal, dtype, device):
    checked(make(form, causal=causal, dtype=dtype, heads=(4, 2)), device)


@causal_or_not
@pytest.mark.parametrize(("n", "width"), [(1, 128), (64, 128), (65, 96), (3, 192), (16, 256)])
def test_sizes(n, width, causal, device):
    checked(make(n=n, width=width, causal=causal), device)


@causal_or_not
@pytest.mark.parametrize("width", [128, 256])
def test_lengths_beside_the_borders_of_blocks_and_tiles(width, causal, device):
    lengths = [1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 0]
    call = make("packed", items=[1] * len(lengths), lengths=lengths, width=width, causal=causal)
    checked(call, device)


@causal_or_not
def test_entries_before_the_first_history(causal, device):
    call = make("packed", causal=causal)

    def later(x):
        return torch.cat([torch.full_like(x[:1], torch.nan).expand(1000, *x.shape[1:]), x])

    (m,) = call.memories
    memories = [replace(m, k=later(m.k), v=later(m.v), offsets=m.offsets + 1000)]
    found = results(moved(replace(call, q_self=later(call.q_self), memories=memories,
                                  grads={}), device), "gluon", [])  # fmt: skip
    expected = results(moved(replace(call, grads={}), device), "gluon", [])
    for name, x in expected.items():
        own = found[name][1000:] if name.endswith("_self") else found[name]
        assert torch.equal(bits(own), bits(x)), name
    assert not found["o_self"][:1000].any()


@causal_or_not
@pytest.mark.parametrize("form", ["padded", "packed"])
def test_what_nobody_owns_is_zero(form, causal, device):
    call = make(form, causal=causal, capacity={"user": 8, "item": 200})
    found = checked(call, device)
    unowned = call.q_self.isnan().flatten(-2).any(-1)
    for name in ("o_self", "lse_self", "dq_self", "dk0", "dv0"):
        assert not found[name].cpu()[unowned].any(), name


@causal_or_not
def test_histories_with_nothing_below_or_of_the_queries_level(causal, device):
    checked(make("whole", items=[0, 0], lengths=[130, 130], causal=causal), device)
    checked(make(of="item", items=[2, 1], lengths=[130, 0, 9], causal=causal), device)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_any_scale(scale, device):
    checked(make(scale=scale, causal=True), device)


@causal_or_not
def test_nan_of_one_history_stays_there(causal, device):
    call = moved(make(causal=causal), device)
    clean = results(call, "gluon")
    for x in (call.memories[0].k, call.memories[0].v, call.q_self):
        x[0] = torch.nan
    spoiled = results(call, "gluon")
    assert spoiled["o_self"][0].isnan().all()
    for name, x in clean.items():
        others = slice(3 if name in ("o", "lse", "dq") else 1, None)
        assert torch.equal(bits(spoiled[name][others]), bits(x[others])), name


@causal_or_not
def test_a_history_has_the_same_bits_in_any_batch(causal, device):
    call = make(causal=causal)
    whole = results(moved(replace(call, grads={}), device), "gluon", [])
    (m,) = call.memories
    first = 0
    for user, count in enumerate(ITEMS):
        rows = slice(first, first + count)
        first += count
        tree = BroadcastTree.from_counts({"item": [count]}, root="user")
        at = slice(user, user + 1)
        one = ikbo.Memory("user", m.k[at], m.v[at], lengths=m.lengths[at])
        alone = Call(tree, "item", call.q[rows], [one], q_self=call.q_self[at], causal=causal)
        for name, x in results(moved(alone, device), "gluon", []).items():
            assert torch.equal(bits(whole[name][at if "_self" in name else rows]), bits(x)), name


def test_a_graph_captured_at_capacity_serves_smaller_trees(device):
    """Rows of a padded history that are no key's are zeros in every replay."""
    call = moved(replace(make(causal=True), grads={}), device)
    call.run("gluon")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call.run("gluon")
    for lengths in (LENGTHS, [0, 5, 300, 128, 1, 0]):
        call.memories[0].lengths.copy_(torch.tensor(lengths))
        for x in (call.memories[0].k, call.memories[0].v, call.q_self):
            x.normal_()
        for x in found.values():
            x.fill_(torch.nan)
        graph.replay()
        for name, x in call.run("gluon").items():
            assert torch.equal(bits(found[name]), bits(x)), name
