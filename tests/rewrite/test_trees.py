"""Trees that a rewritten model takes: in any order, with tables, instead of maps and counts."""

import inspect

import pytest
import torch
from torch import nn

import ikbo_tree as ikbo
from ikbo_tree import BroadcastTree, TreeError

SORTED = [0, 0, 1, 2, 2, 2, 2]
ANY = [2, 0, 1, 0, 2, 2, 2]
LEVELS = {"user_x": "user", "item_x": "item"}
MAPS = {"item_to_user": ("item", "user")}


def tree_of(parents, capacity=None, users=3):
    return BroadcastTree.from_parents(
        {"item": parents}, root="user", root_rows=users, capacity=capacity
    )


class ByMap(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.user, self.top = nn.Linear(6, 8), nn.Linear(8 + 4, 1)
        self.table = nn.Embedding(11, 6)

    def scores(self, user_x, item_x):
        return self.top(torch.cat([self.user(user_x).relu(), item_x], 1))

    def forward(self, user_x, item_x, item_to_user):
        return self.scores(user_x[item_to_user], item_x)


class ByCounts(ByMap):
    def forward(self, user_x, item_x, counts):
        user = user_x.repeat_interleave(counts, dim=0, output_size=item_x.shape[0])
        return self.scores(user, item_x)


class Flat(ByMap):
    def forward(self, user_x, item_x):
        return self.scores(user_x, item_x)


class ByTree(ByMap):
    def forward(self, user_x, item_x, tree):
        return self.scores(user_x[tree.ancestors("item", of="user")], item_x)


def values(tree):
    users, items = tree.rows("user"), tree.rows("item")
    generator = torch.Generator().manual_seed(users * 100 + items)
    user = torch.randn(users, 6, generator=generator)
    return user, torch.randn(items, 4, generator=generator)


def rewrite(model, inputs, **options):
    options = {"profit": False, "check_seconds": 0.1, **options}
    return ikbo.rewrite(model.eval(), inputs, **options)[0]


@pytest.mark.parametrize("parents", [SORTED, ANY], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("kind", [ByMap, Flat, ByTree])
def test_trees_in_any_order(kind, parents):
    tree, other = tree_of(parents), tree_of([*ANY[::-1], 1, 0] if parents is ANY else [1, 1, 2])
    user, item = values(tree)
    index = tree.ancestors("item", of="user").long()
    if kind is ByMap:
        given = {"levels": LEVELS, "broadcasts": MAPS, "tree": tree}
        fast = rewrite(kind(), (user, item, index), **given)
    elif kind is Flat:
        given = {"levels": dict.fromkeys(LEVELS, "item"), "compact": {"user_x": "user"}}
        fast = rewrite(kind(), (user[index], item), **given, tree=tree)
    else:
        fast = rewrite(kind(), (user, item, tree), levels=LEVELS)
    for t in (tree, other):
        user, item = values(t)
        expected = ByMap()(user, item, t.ancestors("item", of="user"))
        torch.testing.assert_close(fast(user, item, tree=t), expected)


def test_maps_and_counts_leave_the_signature():
    tree = tree_of(SORTED)
    user, item = values(tree)
    counts = tree.offsets("item", of="user").diff().long()
    for kind, last, more in (
        (ByMap, tree.ancestors("item", of="user").long(), {"broadcasts": MAPS}),
        (ByCounts, counts, {"counts": {"counts": ("user", "item")}}),
    ):
        fast = rewrite(kind(), (user, item, last), levels=LEVELS, tree=tree, **more)
        assert list(inspect.signature(fast.forward).parameters) == ["user_x", "item_x", "tree"]
        torch.testing.assert_close(fast(user, item, tree=tree), kind()(user, item, last))
        kept = rewrite(kind(), (user, item, last), levels=LEVELS, **more)
        torch.testing.assert_close(kept(user, item, last), kind()(user, item, last))


@pytest.mark.parametrize("capacity", [None, {"user": 5, "item": 9}])
def test_tables_beside_the_levels(capacity):
    class WithTable(ByMap):
        def forward(self, user_x, item_x, brand_x, tree):
            brand = ikbo.broadcast(brand_x, tree=tree, level="brand", to="item")
            return self.scores(user_x[tree.ancestors("item", of="user")], item_x) + brand

    def whole(parents, brands):
        tree = tree_of(parents, capacity)
        size = 4 if capacity else None
        return tree.with_table("brand", of="item", index=brands, rows=4, capacity=size)

    def padded(x, rows):
        return torch.cat([x, x.new_full((rows - len(x), *x.shape[1:]), torch.nan)])

    tree = whole(SORTED, [0, 3, 3, 1, 1, 2, 0])
    fast = None
    for t in (tree, whole([1, 1, 2], [2, 1, 1])):
        user, item = values(t)
        brand = torch.randn(4, 1)
        given = padded(user, t.capacity("user")), padded(item, t.capacity("item")), brand, t
        fast = fast or rewrite(WithTable(), given, levels=LEVELS)
        found, live = fast(*given), t.rows("item")
        index = t.ancestors("item", of="user")[:live]
        expected = ByMap()(user, item, index) + brand[t.ancestors("item", of="brand")[:live]]
        torch.testing.assert_close(found[:live], expected)
        assert not found[live:].any()


def test_another_kind_of_tree_is_an_error():
    tree = tree_of(SORTED)
    user, item = values(tree)
    index = tree.ancestors("item", of="user").long()
    given = {"levels": LEVELS, "broadcasts": MAPS}
    fast = rewrite(ByMap(), (user, item, index), **given, tree=tree)
    for other in (
        tree_of(ANY),
        tree_of(SORTED, {"item": 7}),
        tree.with_table("b", of="item", index=SORTED),
    ):
        with pytest.raises(TreeError, match="must have the levels, order, capacity and tables"):
            fast(user, item, tree=other)
    padded = rewrite(ByMap(), (user, item, index), **given, tree=tree_of(SORTED, {"item": 9}))
    torch.testing.assert_close(padded(user, item, tree=tree), fast(user, item, tree=tree))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree": tree_of(ANY), "counts": {"last": ("user", "item")}}, "tree must be sorted"),
        ({"compact": {"user_x": "page"}, "tree": tree_of(SORTED)}, "must have the level 'page'"),
    ],
)
def test_declarations_that_do_not_fit_a_tree(options, message):
    class Model(ByMap):
        def forward(self, user_x, item_x, last):
            return self.scores(user_x[last], item_x)

    user, item = values(tree_of(SORTED))
    given = {"levels": LEVELS, "broadcasts": {"last": ("item", "user")}}
    if "counts" in options:
        del given["broadcasts"]
    with pytest.raises(TreeError, match=message):
        rewrite(Model(), (user, item, torch.tensor(SORTED)), **{**given, **options})


def test_a_model_with_a_tree_takes_no_other():
    tree = tree_of(SORTED)
    with pytest.raises(TreeError, match="must not be given to a model that takes one"):
        rewrite(ByTree(), (*values(tree), tree), levels=LEVELS, tree=tree)
