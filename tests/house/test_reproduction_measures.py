"""What the reproduction measures beside time: errors, bits, forms of a whole model; on a CPU."""

import bench_invariance
import bench_numerics
import bench_whole_model
import pytest
import torch
from models.ads import ThreeLevelAds
from models.sizes import TINY
from models.zoo import ZOO

from ikbo_tree import BroadcastTree

SIZES = bench_numerics.Sizes(user=40, item=24, out=17, columns=8, keys=16, heads=2, dim=16)


def even(users, items):
    return BroadcastTree.from_counts({"item": [items] * users}, root="user")


@pytest.mark.parametrize("op", bench_numerics.OPS)
def test_the_exact_form_is_the_flat_one_in_float64(op):
    problem = bench_numerics.Problem(op, even(3, 5), SIZES, torch.float16)
    wide = {name: x.double() for name, x in problem.inputs.items()}
    exact = bench_numerics.both(problem.exact, wide, problem.grad.double())
    flat = bench_numerics.both(problem.flat, wide, problem.grad.double())
    for direction, expected in flat.items():
        torch.testing.assert_close(exact[direction], expected, rtol=1e-10, atol=1e-10)
        assert expected.abs().min() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", bench_numerics.OPS)
def test_errors_are_a_few_roundings(op, dtype):
    lines = bench_numerics.measure(op, even(2, 100), SIZES, dtype, ("torch", "torch-p16", "gluon"))
    rms = {(line["who"], line["direction"]): line["rms"] for line in lines}
    who = {"rounded", "flat", "ikbo-torch"}
    if op != "attn":
        who |= {"decomposed", "ikbo-torch-p16"}
    assert {name for name, _ in rms} == who  # a CPU has no Gluon
    eps = torch.finfo(dtype).eps
    for (name, direction), error in rms.items():
        assert 0.99 * rms["rounded", direction] <= error < 2 * eps, (name, direction)
    assert rms["ikbo-torch", "bwd"] < 1.05 * rms["rounded", "bwd"]
    assert {line["workload"] for line in lines} == {f"num-{op}-r100"}
    assert {line["items"] for line in lines} == {200}


def test_errors_of_known_differences():
    found = bench_numerics.errors(torch.tensor([3.0, -4.5]), torch.tensor([3.0, -4.0]).double())
    scale = 12.5**0.5
    assert found["worst"] == pytest.approx(0.5 / scale, rel=1e-3)
    assert found["rms"] == pytest.approx(0.5 / 2**0.5 / scale, rel=1e-3)


def test_numerics_from_the_command_line(monkeypatch, tmp_path):
    written = []
    monkeypatch.setattr(bench_numerics.records, "write", lambda *args: written.append(args))
    options = "--device cpu --items 20 --ratio 5 20 --op attn --dtype bfloat16 --keys 8"
    monkeypatch.setattr("sys.argv", ["bench_numerics.py", *options.split()])
    bench_numerics.main()
    topic, device, lines = written[-1]
    assert len(written) == 2  # so that a run that is cut short leaves something
    assert topic == "numerics"
    assert device.endswith("1 threads")
    assert {line["workload"] for line in lines} == {"num-attn-r5", "num-attn-r20"}


def test_what_depends_on_the_batch_is_counted():
    inputs = bench_invariance.draw("attn", 10, 2, torch.float32, "cpu")
    rows = inputs["item"][0].numel()

    def alone(x, tree):
        index = tree.ancestors("item", of="user").long()
        return x["item"] + x["user"].index_select(0, index)[:, :64]

    def together(x, tree):
        return alone(x, tree) + float(len(x["user"]) == 5)

    def count(form):
        return bench_invariance.differences(form, inputs, 10, 2, (2, 5), "cpu")

    elements = 2 * rows * (2 + 3)  # the places of a user among 2, and among 5
    assert count(alone) == {"differing": 0, "elements": elements, "worst": 0}
    found = count(together)
    assert found["differing"] == 2 * rows * 3
    assert found["worst"] > 0


def test_forms_of_one_op_agree():
    inputs = bench_invariance.draw("linear", 3, 4, torch.float32, "cpu")
    tree = even(3, 4)
    forms = bench_invariance.forms("linear", "cpu")
    expected = forms["flat"](inputs, tree)
    for who in ("decomposed", "ikbo-torch"):
        torch.testing.assert_close(forms[who](inputs, tree), expected)
    assert set(bench_invariance.forms("attn", "cuda")) >= {"flat-cudnn", "folded-cudnn"}


def test_splits_of_the_ranker_are_the_ranker():
    entry, sizes = ZOO["ads"], TINY["ads"]
    tree = BroadcastTree.from_counts({"vendor": [2, 1], "item": [3, 1, 2]}, root="user")
    model = entry.build(sizes).double()
    assert isinstance(model, ThreeLevelAds)
    own = entry.inputs(sizes, tree, 0, torch.float64)
    expected = model(**own)
    for vendors in (False, True):
        split = bench_whole_model.Split(model, vendors)
        torch.testing.assert_close(split(**own), expected)
    copied = {
        name: own[name][tree.ancestors("item", of=level).long()]
        for name, level in entry.levels.items()
    }
    torch.testing.assert_close(bench_whole_model.SystemBroadcast(model)(**copied), expected)


def test_the_rankers_tree():
    tree = bench_whole_model.tree_of(128)
    assert [tree.rows(level) for level in tree.levels] == [2, 8, 128]
