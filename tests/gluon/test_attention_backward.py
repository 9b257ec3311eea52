"""Gradients of the Hopper attention kernels: values, isolation, batch invariance, pieces."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_device import check, moved
from attention_naive import Call, draw, memory, queries, results, with_grads

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree
from ikbo_tree.kernels.target_attention import gluon_backward, gluon_sm90, triton_backward
from ikbo_tree.testing.poison import canary_rows, poisoned_memory

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0"),
]

FORMS = ("whole", "padded", "packed")
HALF = {"dtype": torch.float16, "widths": (64, 64)}
GRADS = ("dq", "dk0", "dv0")

every_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    monkeypatch.setattr(gluon_sm90, "backward", gluon_backward.backward)


@pytest.fixture
def device():
    return torch.device("cuda")


def two_levels(counts=(3, 0, 5), **options):
    return BroadcastTree.from_counts({"item": list(counts)}, root="user", **options)


def checked(call, device, wanted=None):
    """Results and gradients of the call, each within its budget."""
    call = with_grads(call)
    with poisoned_memory(), canary_rows():
        found = results(moved(call, device), "gluon", wanted)
    return check(call, device, found=found)


def bits(x):
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def same(found, expected, at=slice(None)):
    return all(torch.equal(bits(found[name][at]), bits(expected[name])) for name in GRADS)


SIZES = [
    (16, (2, 2), 128),
    (64, (2, 2), 128),
    (65, (2, 1), 64),
    (33, (4, 2), 96),
    (17, (3, 1), 128),
    (16, (2, 1), 192),
]


@every_dtype
@pytest.mark.parametrize(("n", "heads", "width"), SIZES)
def test_sizes(n, heads, width, dtype, device):
    """Keys of several tiles and of less than one, at two levels; blocks of one row and of all."""
    options = {"heads": heads, "widths": (width, width), "dtype": dtype}
    tree = two_levels((2, 0, 3))
    memories = [
        memory(tree, "user", "padded", keys=300, lengths=[300, 4, 17], **options),
        memory(tree, "item", "packed", keys=3, seed=1, **options),
    ]
    checked(
        Call(tree, "item", queries(tree, "item", n, heads[0], width, dtype=dtype), memories), device
    )


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_lengths_beside_the_borders_of_tiles(form, device):
    lengths = [1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 255, 256, 257, 0]
    tree = two_levels([1] * len(lengths))
    m = memory(tree, "user", form, keys=257, lengths=lengths, **HALF)
    checked(
        Call(tree, "item", queries(tree, "item", 16, width=64, dtype=torch.float16), [m]), device
    )


@pytest.mark.parametrize("n", [16, 19, 21])
def test_rows_beside_the_borders_of_blocks(n, device):
    """Segments of 16 to 136 query rows, at any distance from multiples of 8 and 64."""
    tree = two_levels([1, 2, 3, 4, 5, 6])
    m = memory(tree, "user", "whole", keys=70, **HALF)
    checked(
        Call(tree, "item", queries(tree, "item", n, width=64, dtype=torch.float16), [m]), device
    )


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
    found = checked(Call(tree, "item", q, memories), device)
    assert (found["dq"][tree.rows("item") :] == 0).all()


def test_tiles_are_cut_where_an_ancestor_ends(device):
    """There are more users than vendors, so that a user's tile has rows of several vendors."""
    counts = {"vendor": [3, 0, 0, 0, 0], "item": [2, 1, 3]}
    tree = BroadcastTree.from_counts(counts, root="user")
    memories = [memory(tree, name, "padded", keys=20, **HALF) for name in ("vendor", "user")]
    q = queries(tree, "item", 16, width=64, dtype=torch.float16)
    checked(Call(tree, "item", q, memories), device)


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
    found = checked(Call(tree, "item", q, [m]), device)
    assert (found["dq"].cpu()[np.repeat(np.asarray(lengths) == 0, counts)] == 0).all()
    if form == "padded":
        for name in ("dk0", "dv0"):
            assert (found[name].cpu()[np.asarray(counts) == 0] == 0).all()


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1.0])
def test_any_scale(scale, device):
    tree = two_levels((2, 1))
    m = memory(tree, "user", keys=140, lengths=[140, 130], form="padded", **HALF)
    q = queries(tree, "item", 16, width=64, dtype=torch.float16)
    checked(Call(tree, "item", q, [m], scale), device)


@every_dtype
@pytest.mark.parametrize("width", [64, 128])
def test_rows_that_attend_to_one_key_are_walked_again(width, dtype, device):
    """dS nearly vanishes, so that delta must be better than what a rounded output gives."""
    tree = two_levels((3, 0, 5))
    options = {"dtype": dtype, "widths": (width, width)}
    m = memory(tree, "user", "padded", keys=300, lengths=[300, 4, 257], **options)
    q = queries(tree, "item", 40, width=width, dtype=dtype)
    q[::2] *= 40
    checked(Call(tree, "item", q, [m], 0.1), device)


@pytest.mark.parametrize("wanted", [["q"], ["k0"], ["v0"], ["q", "v0"], ["k0", "v0"]], ids=str)
def test_some_gradients_alone(wanted, device):
    tree = two_levels((2, 0, 3))
    m = memory(tree, "user", "padded", keys=140, **HALF)
    q = queries(tree, "item", 16, width=64, dtype=torch.float16)
    found = checked(Call(tree, "item", q, [m]), device, wanted)
    assert {name for name in found if name.startswith("d")} == {f"d{name}" for name in wanted}


@pytest.mark.parametrize("switch", ["QUERIES_HERE", "KEYS_HERE"])
def test_either_part_by_the_triton_path(monkeypatch, switch, device):
    monkeypatch.setattr(gluon_backward, switch, False)
    tree = two_levels((2, 0, 3))
    m = memory(tree, "user", "packed", keys=140, **HALF)
    q = queries(tree, "item", 33, width=64, dtype=torch.float16)
    checked(Call(tree, "item", q, [m]), device)


@pytest.mark.parametrize("early", [False, True])
def test_when_weights_are_computed_makes_no_difference(monkeypatch, early, device):
    tree = two_levels((2, 0, 3))
    options = {"dtype": torch.float16, "widths": (128, 128)}
    m = memory(tree, "user", "whole", keys=140, **options)
    q = queries(tree, "item", 64, width=128, dtype=torch.float16)
    call = moved(with_grads(Call(tree, "item", q, [m])), device)
    expected = results(call, "gluon")
    monkeypatch.setattr(gluon_backward, "EARLY", early)
    assert same(results(call, "gluon"), expected)


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_pieces_of_long_segments(monkeypatch, form, device):
    """One block takes all pieces of an item, or several share them: the same bits."""
    whole = triton_backward.attention_config
    short = lambda *sizes: replace(whole(*sizes), piece=128, pieces=3)  # noqa: E731
    monkeypatch.setattr(triton_backward, "attention_config", short)
    tree = two_levels((9, 1, 0, 40))
    m = memory(tree, "user", form, keys=200, lengths=[200, 3, 5, 129], **HALF)
    call = Call(tree, "item", queries(tree, "item", 20, width=64, dtype=torch.float16), [m])
    found = []
    for processors in (1, 1000):
        monkeypatch.setattr(gluon_backward, "multiprocessors", lambda device, n=processors: n)
        found.append(checked(call, device))
    assert same(*found)


@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("keys", [20, 140])
def test_nan_stays_in_its_segment(form, keys, device):
    tree = two_levels((2, 3, 1))
    m = memory(tree, "user", form, keys=keys, lengths=[keys, keys, 3], **HALF)
    q = queries(tree, "item", 17, width=64, dtype=torch.float16)
    call = moved(with_grads(Call(tree, "item", q, [m])), device)
    clean = results(call, "gluon")
    starts = torch.tensor([0, keys, 2 * keys, 2 * keys + 3]) + (3 if form == "packed" else 0)
    for x in (call.memories[0].k, call.memories[0].v, call.q, call.grads["o"]):
        kept = x.clone()
        if x.shape[0] == call.q.shape[0] and x.dim() == 4 and x.shape[1] == 17:
            x[2:5] = torch.nan
        else:
            (x.flatten(0, 1) if form == "padded" else x)[starts[1] : starts[2]] = torch.nan
        spoiled = results(call, "gluon")
        x.copy_(kept)
        assert spoiled["dq"][2:5].isnan().all()
        assert torch.equal(spoiled["dq"][[0, 1, 5]], clean["dq"][[0, 1, 5]])
        for name in ("dk0", "dv0"):
            theirs, mine = (
                y.flatten(0, 1) if form == "padded" else y for y in (spoiled[name], clean[name])
            )
            for a, b in ((starts[0], starts[1]), (starts[2], starts[3])):
                assert torch.equal(theirs[a:b], mine[a:b]), name


@every_dtype
@pytest.mark.parametrize("n", [16, 64, 65])
def test_a_request_has_the_same_bits_in_any_batch(n, dtype, device):
    """Alone, and amid others that shift its tiles and blocks (contract 4)."""
    options = {"dtype": dtype, "widths": (128, 128)}
    rng = np.random.default_rng(n)
    items = rng.integers(0, 40, 30)
    items[11] = mine = 9
    tree = two_levels(items)
    m = memory(tree, "user", "padded", keys=300, lengths=rng.integers(0, 301, 30), **options)
    m.lengths[11] = 300
    m.k[11], m.v[11] = (draw(300, 2, 128, dtype=dtype, seed=s) for s in (1, 2))
    call = with_grads(Call(tree, "item", queries(tree, "item", n, width=128, dtype=dtype), [m]))
    at = slice(int(items[:11].sum()), int(items[:12].sum()))
    one = ikbo.Memory("user", m.k[11:12], m.v[11:12], lengths=m.lengths[11:12])
    alone = Call(two_levels([mine]), "item", call.q[at], [one])
    alone.grads = {name: x[at] for name, x in call.grads.items()}
    expected = results(moved(alone, device), "gluon")
    found = results(moved(call, device), "gluon")
    assert torch.equal(bits(found["dq"][at]), bits(expected["dq"]))
    for name in ("dk0", "dv0"):
        assert torch.equal(bits(found[name][11]), bits(expected[name][0])), name


def test_any_strides(device):
    """Fused projections, transposed heads, gradients that are slices or one number."""
    tree = two_levels((2, 0, 3))
    kv = draw(3, 140, 2, 2, 64, dtype=torch.float16).to(device)
    q = draw(5, 16, 2, 64, seed=4, dtype=torch.float16).to(device)
    plain = ikbo.Memory("user", kv[:, :, 0].contiguous(), kv[:, :, 1].contiguous())
    call = moved(with_grads(Call(tree, "item", q, [plain])), device)
    expected = results(call, "gluon")
    do = call.grads["o"]
    views = [
        tuple(kv.unbind(2)),
        tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in kv.unbind(2)),
        tuple(torch.nn.functional.pad(x, (0, 3))[..., :64] for x in kv.unbind(2)),
    ]
    others = [
        (q.transpose(1, 2).contiguous().transpose(1, 2), torch.cat([do, do], 2)[:, :, 2:]),
        (torch.cat([q, q], 2)[:, :, :2], torch.cat([do, do], 1)[:, :16]),
        (torch.nn.functional.pad(q, (0, 1))[..., :64], do.mT.contiguous().mT),
    ]
    for (k, v), (other, grad) in zip(views, others, strict=True):
        grads = call.grads | {"o": grad}
        changed = replace(call, q=other, memories=[ikbo.Memory("user", k, v)], grads=grads)
        assert same(results(changed, "gluon"), expected)
    ones = call.grads | {"o": torch.ones_like(do)}
    repeated = call.grads | {"o": do.new_ones(()).expand(do.shape)}
    assert same(
        results(replace(call, grads=repeated), "gluon"), results(replace(call, grads=ones), "gluon")
    )
