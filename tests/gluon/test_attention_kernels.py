"""The Hopper attention kernel: values, gradients, isolation, batch invariance."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_device import check, moved
from attention_naive import Call, draw, memory, queries, results, with_grads

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree
from ikbo_tree.kernels.target_attention import gluon_sm90
from ikbo_tree.testing.poison import canary_rows, poisoned_memory

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0"),
]

DTYPES = (torch.float16, torch.bfloat16)
FORMS = ("whole", "padded", "packed")
HALF = {"dtype": torch.float16, "widths": (64, 64)}

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture
def device():
    return torch.device("cuda")


def two_levels(counts=(3, 0, 5), **options):
    return BroadcastTree.from_counts({"item": list(counts)}, root="user", **options)


def checked(call, device):
    """Results and gradients of the call, each within its budget."""
    with poisoned_memory(), canary_rows():
        found = results(moved(call, device), "gluon")
    return check(call, device, found=found)


def bits(x):
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


SIZES = [
    (16, (2, 2), 128),
    (64, (2, 2), 128),
    (65, (2, 1), 64),
    (33, (4, 2), 96),
    (17, (2, 1), 192),
    (32, (3, 1), 256),
]


@every_dtype
@pytest.mark.parametrize(("n", "heads", "width"), SIZES)
def test_sizes(n, heads, width, dtype, device):
    """Keys of several blocks and of less than one, at two levels; tiles of one row and of all."""
    options = {"heads": heads, "widths": (width, width), "dtype": dtype}
    tree = two_levels((2, 0, 3))
    memories = [
        memory(tree, "user", "padded", keys=300, lengths=[300, 4, 17], **options),
        memory(tree, "item", "packed", keys=3, seed=1, **options),
    ]
    q = queries(tree, "item", n, heads[0], width, dtype=dtype)
    checked(with_grads(Call(tree, "item", q, memories)), device)


FEW_SIZES = [(1, (2, 2), 128), (3, (4, 2), 64), (15, (2, 1), 96), (2, (2, 2), 256)]


@every_dtype
@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize(("n", "heads", "width"), FEW_SIZES)
def test_few_query_rows_a_row(n, heads, width, form, dtype, device):
    """Segments beside the border between chunks and tiles, on both sides; dead rows."""
    border = 256 // n
    items = [border, border + 1, 1, 0, 2 * border + 1, border]
    live = sum(items)
    options = {"heads": heads, "widths": (width, width), "dtype": dtype}
    tree = two_levels(items, capacity={"user": 7, "item": live + 200})
    lengths = [140, 130, 0, 7, 129, 1]
    memories = [
        memory(tree, "user", form, keys=140, lengths=lengths, **options),
        memory(tree, "user", "padded", keys=9, lengths=[0, 1, 9, 0, 8, 7], seed=1, **options),
    ]
    q = queries(tree, "item", n, heads[0], width, dtype=dtype)
    found = checked(with_grads(Call(tree, "item", q, memories)), device)
    for name in ("o", "lse", "dq"):
        assert (found[name][live:] == 0).all()


def test_long_segments_anywhere_among_short_ones(device):
    """More segments than a warp looks at together."""
    items = [1 + i % 3 for i in range(700)]
    for i in (0, 255, 256, 600, 699):
        items[i] = 257 + i
    tree = two_levels(items)
    m = memory(tree, "user", "padded", keys=5, **HALF)
    q = queries(tree, "item", 1, width=64, dtype=torch.float16)
    checked(Call(tree, "item", q, [m]), device)


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_lengths_beside_the_borders_of_blocks(form, device):
    lengths = [1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 255, 256, 257, 0]
    tree = two_levels([1] * len(lengths))
    m = memory(tree, "user", form, keys=257, lengths=lengths, **HALF)
    q = queries(tree, "item", 16, width=64, dtype=torch.float16)
    checked(with_grads(Call(tree, "item", q, [m])), device)


@every_dtype
@pytest.mark.parametrize("n", [16, 64])
def test_levels_of_one_tree(n, dtype, device):
    """As many memories as a launch takes, in no order; dead rows."""
    counts = {"vendor": [1, 0, 2], "item": [2, 1, 1]}
    spare = {"user": 4, "vendor": 5, "item": 6}
    tree = BroadcastTree.from_counts(counts, root="user", capacity=spare)
    options = {"dtype": dtype, "widths": (64, 64)}
    memories = [
        memory(tree, name, FORMS[i % 3], keys=140 if i % 2 else 3, seed=10 * i, **options)
        for i, name in enumerate(["vendor", "item", "user", "vendor"])
    ]
    q = queries(tree, "item", n, width=64, dtype=dtype)
    found = checked(with_grads(Call(tree, "item", q, memories)), device)
    for name in ("o", "lse", "dq"):
        assert (found[name][tree.rows("item") :] == 0).all()


def test_tiles_are_cut_where_an_ancestor_ends(device):
    """There are more users than vendors, so that a user's tile has rows of several vendors."""
    counts = {"vendor": [3, 0, 0, 0, 0], "item": [2, 1, 3]}
    tree = BroadcastTree.from_counts(counts, root="user")
    memories = [memory(tree, name, "padded", keys=20, **HALF) for name in ("vendor", "user")]
    q = queries(tree, "item", 16, width=64, dtype=torch.float16)
    checked(with_grads(Call(tree, "item", q, memories)), device)


LENGTHS = [
    ([0, 1, 0, 1], [0, 3, 0, 5]),
    ([0, 2, 0], [5, 7, 3]),
    ([2, 1], [0, 0]),
    ([0, 0], [3, 1]),
    ([1, 0, 5, 4, 0], [2, 0, 33, 1, 2]),
]


@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize(("counts", "lengths"), LENGTHS)
def test_empty_segments(counts, lengths, form, device):
    tree = two_levels(counts)
    m = memory(tree, "user", form, keys=max(lengths), lengths=np.asarray(lengths), **HALF)
    q = queries(tree, "item", 16, width=64, dtype=torch.float16)
    found = checked(with_grads(Call(tree, "item", q, [m])), device)
    nothing = np.repeat(np.asarray(lengths) == 0, counts)
    assert (found["o"].cpu()[nothing] == 0).all()
    assert (found["lse"].cpu()[nothing] == -torch.inf).all()


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1.0])
def test_any_scale(scale, device):
    tree = two_levels((2, 1))
    m = memory(tree, "user", keys=140, lengths=[140, 130], form="padded", **HALF)
    q = queries(tree, "item", 16, width=64, dtype=torch.float16)
    checked(with_grads(Call(tree, "item", q, [m], scale)), device)


@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("keys", [20, 140])
def test_nan_stays_in_its_segment(form, keys, device):
    tree = two_levels((2, 3, 1))
    m = memory(tree, "user", form, keys=keys, lengths=[keys, keys, 3], **HALF)
    q = queries(tree, "item", 16, width=64, dtype=torch.float16)
    call = moved(Call(tree, "item", q, [m]), device)
    clean = results(call, "gluon")
    mine = slice(keys, 2 * keys) if form == "padded" else slice(3 + keys, 3 + 2 * keys)
    away = torch.tensor([0, 1, 5], device=device)
    for x in (call.memories[0].k, call.memories[0].v, call.q):
        kept = x.clone()
        if x is call.q:
            x[2:5] = torch.nan
        else:
            (x.flatten(0, 1) if form == "padded" else x)[mine] = torch.nan
        spoiled = results(call, "gluon")
        x.copy_(kept)
        assert spoiled["o"][2:5].isnan().all()
        for name, expected in clean.items():
            assert torch.equal(spoiled[name][away], expected[away]), name


@every_dtype
@pytest.mark.parametrize("n", [1, 16, 64, 65])
def test_a_request_has_the_same_bits_in_any_batch(monkeypatch, n, dtype, device):
    """Alone, and amid others that shift its tiles and blocks; drawn or fixed tiles (contract 4)."""
    options = {"dtype": dtype, "widths": (128, 128)}
    rng = np.random.default_rng(n)
    items = rng.integers(0, 40 if n > 1 else 600, 30)
    items[11] = mine = 9 if n > 1 else 300
    tree = two_levels(items)
    m = memory(tree, "user", "padded", keys=300, lengths=rng.integers(0, 301, 30), **options)
    m.lengths[11] = 300
    m.k[11], m.v[11] = (draw(300, 2, 128, dtype=dtype, seed=s) for s in (1, 2))
    q = queries(tree, "item", n, width=128, dtype=dtype)
    at = slice(int(items[:11].sum()), int(items[:12].sum()))
    one = ikbo.Memory("user", m.k[11:12], m.v[11:12], lengths=m.lengths[11:12])
    alone = results(moved(Call(two_levels([mine]), "item", q[at], [one]), device), "gluon")
    for dynamic in (True, False):
        monkeypatch.setattr(gluon_sm90, "DYNAMIC", dynamic)
        found = results(moved(Call(tree, "item", q, [m]), device), "gluon")
        for name, x in alone.items():
            assert torch.equal(bits(found[name][at]), bits(x)), (name, dynamic)


def test_any_strides(device):
    """Fused projections, transposed heads, widths that are no multiple of 16 bytes apart."""
    tree = two_levels((2, 0, 3))
    kv = draw(3, 140, 2, 2, 64, dtype=torch.float16).to(device)
    q = draw(5, 16, 2, 64, seed=4, dtype=torch.float16).to(device)
    plain = ikbo.Memory("user", kv[:, :, 0].contiguous(), kv[:, :, 1].contiguous())
    call = moved(Call(tree, "item", q, [plain]), device)
    expected = results(call, "gluon")
    views = [
        tuple(kv.unbind(2)),
        tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in kv.unbind(2)),
        tuple(torch.nn.functional.pad(x, (0, 3))[..., :64] for x in kv.unbind(2)),
    ]
    others = [
        q.transpose(1, 2).contiguous().transpose(1, 2),
        torch.cat([q, q], 2)[:, :, :2],
        torch.nn.functional.pad(q, (0, 1))[..., :64],
    ]
    for (k, v), other in zip(views, others, strict=True):
        found = results(replace(call, q=other, memories=[ikbo.Memory("user", k, v)]), "gluon")
        for name, x in found.items():
            assert torch.equal(x, expected[name]), name


def test_what_it_refuses(device):
    tree = two_levels((2,)).to(device)
    k = torch.zeros(1, 3, 1, 128, device=device, dtype=torch.float16)
    q = k.new_zeros(2, 16, 1, 128)
    for changed, reason in (
        ({"q": q[..., :80], "k": k[..., :80]}, "got 80 and 80"),
        ({"q": q.float(), "k": k.float()}, "float32"),
        ({"bias": k.new_zeros(1, 3)}, "no bias"),
    ):
        call = {"q": q, "k": k, "bias": None} | changed
        m = ikbo.Memory("user", call["k"], call["k"], bias=call["bias"])
        with pytest.raises(ikbo.UnsupportedError, match=reason):
            ikbo.target_attention(call["q"], [m], tree=tree, level="item", impl="gluon")
    own = ikbo.Memory("item", k.expand(2, 3, 1, 128), k.expand(2, 3, 1, 128))
    with pytest.raises(ikbo.UnsupportedError, match="one level above the queries'; got 15"):
        ikbo.target_attention(q[:, :15], [own], tree=tree, level="item", impl="gluon")
