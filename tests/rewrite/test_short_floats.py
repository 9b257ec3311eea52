"""Splits of 16-bit models: parts that cancel meet in float32, as inside the unsplit op."""

import copy

import pytest
import torch
from models.sizes import TINY
from models.zoo import ZOO
from torch import nn

import ikbo_tree as ikbo
from ikbo_tree.testing.budget import BudgetError, assert_within_budget

TREE = ikbo.BroadcastTree.from_counts({"vendor": [2, 0, 3], "item": [4, 0, 3, 9, 1]}, root="user")
MAPS = {
    "item_user": TREE.ancestors("item", of="user").long(),
    "item_vendor": TREE.ancestors("item", of="vendor").long(),
}
LEVELS = {"user_x": "user", "vendor_x": "vendor", "item_x": "item"}
BROADCASTS = {"item_user": ("item", "user"), "item_vendor": ("item", "vendor")}
WIDTH, OUT, TOKENS = 24, 10, 3
pytestmark = pytest.mark.slow
DTYPES = [torch.bfloat16, torch.float16]


class Model(nn.Module):
    """`join` of a concatenation of three levels, then `apply`."""

    def __init__(self, apply, dim, items=True):
        super().__init__()
        self.function, self.dim, self.items = apply, dim, items
        torch.manual_seed(0)
        # The same for each level: what cancels in the inputs cancels in the result.
        own = torch.randn(OUT, WIDTH)
        self.weight = nn.Parameter(torch.cat([own] * (3 if items else 2), 1))
        self.bias = nn.Parameter(torch.randn(OUT) * 0.01)

    def forward(self, user_x, vendor_x, item_x, item_user, item_vendor):
        parts = [user_x[item_user], vendor_x[item_vendor]] + [item_x] * self.items
        return self.function(self, torch.cat(parts, self.dim))


MODELS = {
    "linear": (lambda m, x: nn.functional.linear(x, m.weight, m.bias), 1, ()),
    "linear_no_bias": (lambda m, x: nn.functional.linear(x, m.weight), 1, ()),
    "matmul": (lambda m, x: x @ m.weight.t(), 1, ()),
    "addmm": (lambda m, x: torch.addmm(m.bias, x, m.weight.t()), 1, ()),
    "tokens": (lambda m, x: nn.functional.linear(x, m.weight, m.bias), 2, (TOKENS,)),
    "tokens_of_tokens": (lambda m, x: nn.functional.linear(x, m.weight, m.bias), 3, (2, TOKENS)),
    "compression": (lambda m, x: m.weight @ x, 1, (TOKENS, "last")),
    "turned": (lambda m, x: nn.functional.linear(x.mT, m.weight, m.bias), 1, (TOKENS, "last")),
    "sum": (lambda m, x: x.sum(1), 1, ()),
    "mean": (lambda m, x: x.mean(1, keepdim=True), 1, ()),
}


def inputs(tail, dtype, items=True):
    """What the vendor or the item adds to the user's features is a hundredth of them."""
    generator = torch.Generator().manual_seed(1)
    last = tail[-1:] == ("last",)
    between = tail[:-1] if last else tail
    shape = (WIDTH, *between) if last else (*between, WIDTH)

    def draw(rows):
        return torch.randn(rows, *shape, generator=generator)

    user, vendor = draw(3), draw(5) * (1 if items else 0.01)
    vendor_user = TREE.ancestors("vendor", of="user").long()
    if items:
        item = 0.01 * draw(17) - user[MAPS["item_user"]] - vendor[MAPS["item_vendor"]]
    else:
        item, vendor = draw(17), vendor - user[vendor_user]
    found = {"user_x": user, "vendor_x": vendor, "item_x": item}
    return {name: x.to(dtype) for name, x in found.items()} | MAPS


def rewritten(model, given):
    return ikbo.rewrite(
        model, given, levels=LEVELS, broadcasts=BROADCASTS, profit=False, check_seconds=0.1
    )


def evaluated(model, given, dtype):
    wide = {n: x.to(dtype) if x.is_floating_point() else x for n, x in given.items()}
    with torch.no_grad():
        return model.to(dtype)(**wide)


@pytest.mark.parametrize("items", [True, False], ids=["items", "no_items"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", MODELS)
def test_error_is_within_the_unsplit_op_s_budget(name, dtype, items):
    apply, dim, tail = MODELS[name]
    model = Model(apply, dim, items).eval().to(dtype)
    given = inputs(tail, dtype, items)
    fast, report = rewritten(model, given)
    products = [step for step in report.steps if "transpose" not in step.op]
    assert sum(step.action == "split" for step in products) == 1
    with torch.no_grad():
        found = fast(**given)
    exact, float32 = (evaluated(model, given, d) for d in (torch.float64, torch.float32))
    absolute = {n: x.abs() if x.is_floating_point() else x for n, x in given.items()}
    for parameter in model.parameters():
        parameter.data.abs_()
    terms = evaluated(model, absolute, torch.float64)
    assert found.dtype == dtype
    assert_within_budget(found, exact, float32, terms=terms)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bfloat16", "float16"])
def test_the_budget_notices_partial_results_of_16_bits(dtype):
    model = Model(None, 1).to(dtype)
    given = inputs((), dtype)
    weights = model.weight.detach().split(WIDTH, 1)
    parts = [x for n, x in given.items() if n.endswith("_x")]
    user, vendor, item = (x @ w.t() for x, w in zip(parts, weights, strict=True))
    found = user[MAPS["item_user"]] + vendor[MAPS["item_vendor"]] + item
    wide = [x.double() for x in parts]
    index = [MAPS["item_user"], MAPS["item_vendor"], slice(None)]
    products = [
        (x @ w.double().t(), (x.abs() @ w.double().abs().t()))
        for x, w in zip(wide, weights, strict=True)
    ]
    exact, terms = (sum(p[i][at] for p, at in zip(products, index, strict=True)) for i in range(2))
    with pytest.raises(BudgetError):
        assert_within_budget(found, exact, exact.float(), terms=terms)


def test_products_no_op_takes_are_not_split():
    """A batch of matrices for weights: kept on gathered operands rather than rounded twice."""

    class Batched(nn.Module):
        def forward(self, user_x, item_x, item_user):
            x = torch.cat([user_x[item_user], item_x], 2)
            return torch.bmm(x, item_x.repeat(1, 2, 1).mT.contiguous().mT)

    user, item = torch.randn(3, 4, 4).bfloat16(), torch.randn(17, 4, 4).bfloat16()
    given = {"user_x": user, "item_x": item, "item_user": MAPS["item_user"]}
    fast, report = ikbo.rewrite(
        Batched().eval(),
        given,
        levels={"user_x": "user", "item_x": "item"},
        broadcasts={"item_user": ("item", "user")},
        profit=False,
    )
    assert report.count("split") == 0
    assert torch.equal(fast(**given), Batched()(**given))


@pytest.mark.parametrize("dtype", DTYPES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", sorted(ZOO))
def test_whole_models_err_no_more_than_before(name, dtype):
    """In root mean square over many users: those of one user's items share their errors."""
    entry, sizes = ZOO[name], TINY[name]
    deep = "vendor" in {*entry.levels.values(), *entry.compact.values()}
    counts = {"vendor": [3] * 64, "item": [2] * 192} if deep else {"item": [4] * 64}
    tree = ikbo.BroadcastTree.from_counts(counts, root="user")
    model = entry.build(sizes).to(dtype)
    flat = entry.inputs(sizes, tree, 0, dtype)
    fast, _ = ikbo.rewrite(
        model,
        flat,
        levels=entry.levels,
        broadcasts=entry.broadcasts,
        counts=entry.counts,
        compact=entry.compact,
        tree=tree if entry.compact else None,
        profit=False,
        check_seconds=0.1,
    )
    wide = copy.deepcopy(model)
    squares = [0.0, 0.0]
    for seed in range(3):
        own = flat = entry.inputs(sizes, tree, seed, dtype)
        if entry.compact:
            own = {**entry.compact_inputs(sizes, tree, seed, dtype), "tree": tree}
        exact = evaluated(wide, flat, torch.float64)
        with torch.no_grad():
            for i, found in enumerate((fast(**own), model(**flat))):
                squares[i] += (found.double() - exact).square().mean().item()
    assert squares[0] <= 1.1**2 * squares[1], squares
