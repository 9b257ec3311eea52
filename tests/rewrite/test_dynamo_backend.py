"""`torch.compile` with the rewrite as its backend: values, sizes, declarations, refusals."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ikbo_tree.rewriting import backend, declared_inputs

LEVELS = {"user_x": "user", "history": "user", "item_x": "item"}
DECLARED = {"levels": LEVELS, "broadcasts": {"item_to_user": ("item", "user")}, "profit": False}
SIZES = [(2, 5), (3, 7), (4, 4), (1, 9), (1, 1), (6, 31)]
TARGET_ATTENTION = torch.ops.ikbo_tree.target_attention.default


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.user, self.query, self.top = nn.Linear(6, 8), nn.Linear(4, 8), nn.Linear(20, 1)

    def forward(self, user_x, history, item_x, item_to_user):
        user = F.relu(self.user(user_x[item_to_user])).view(item_x.shape[0], 2, 4).flatten(1)
        keys = history[item_to_user].unsqueeze(1)
        query = self.query(item_x)[:, None, None]
        found = F.scaled_dot_product_attention(query, keys, keys)[:, 0, 0]
        return self.top(torch.cat([user, item_x, found], 1))


class Recorder:
    """An inner backend that keeps the graphs it gets."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph.forward

    def calls(self, target):
        return [[n for n in graph.graph.nodes if n.target is target] for graph in self.graphs]


def inputs(users, items, dtype=torch.float32):
    generator = torch.Generator().manual_seed(users * 100 + items)
    shapes = {"user_x": (users, 6), "history": (users, 5, 8), "item_x": (items, 4)}
    given = {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}
    return given | {"item_to_user": torch.randint(0, users, (items,), generator=generator)}


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_same_values_on_all_sizes_and_work_moved(dynamic):
    model, inner = Ranker().eval(), Recorder()
    compiled = torch.compile(model, backend=backend(**DECLARED, inner=inner), dynamic=dynamic)
    with torch.no_grad():
        for users, items in SIZES:
            given = inputs(users, items)
            torch.testing.assert_close(compiled(**given), model(**given))
    assert all(len(calls) == 1 for calls in inner.calls(TARGET_ATTENTION))
    # The user's, the query's, and the last one's of the user and of the rest.
    assert all(len(calls) == 4 for calls in inner.calls(torch.ops.aten.linear.default))


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["inductor", "aot_eager"])
def test_other_backends_compile_the_result(inner):
    model = Ranker().eval()
    compiled = torch.compile(model, backend=backend(**DECLARED, inner=inner))
    with torch.no_grad():
        for users, items in SIZES[:3]:
            given = inputs(users, items)
            torch.testing.assert_close(compiled(**given), model(**given))


def test_gradients_reach_parameters_and_inputs():
    model = Ranker().eval()
    compiled = torch.compile(model, backend=backend(**DECLARED, inner="aot_eager"))
    given = inputs(3, 11)
    found, expected = [], []
    for run, kept in ((compiled, found), (model, expected)):
        model.zero_grad()
        given["user_x"] = given["user_x"].detach().requires_grad_()
        run(**given).square().sum().backward()
        kept += [given["user_x"].grad, *(p.grad.clone() for p in model.parameters())]
    torch.testing.assert_close(found, expected)


def test_profit_counts_on_the_sizes_of_the_call():
    model, inner = Ranker().eval(), Recorder()
    own = backend(**{**DECLARED, "profit": True}, inner=inner)
    compiled = torch.compile(model, backend=own, dynamic=False)
    with torch.no_grad():
        for sizes in ((8, 8), (2, 300)):
            torch.testing.assert_close(compiled(**inputs(*sizes)), model(**inputs(*sizes)))
    assert [len(calls) for calls in inner.calls(TARGET_ATTENTION)] == [0, 1]


def test_name_within_a_context():
    model, inner = Ranker().eval(), Recorder()
    given = inputs(2, 9)
    with declared_inputs(**DECLARED, inner=inner), torch.no_grad():
        compiled = torch.compile(model, backend="ikbo")
        torch.testing.assert_close(compiled(**given), model(**given))
    assert [len(calls) for calls in inner.calls(TARGET_ATTENTION)] == [1]
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"compiles only within .*declared_inputs"):
        torch.compile(model, backend="ikbo")(**given)


def test_graphs_without_maps_are_compiled_as_they_are():
    inner = Recorder()
    compiled = torch.compile(lambda x: x.exp(), backend=backend(**DECLARED, inner=inner))
    torch.testing.assert_close(compiled(torch.ones(3)), torch.ones(3).exp())
    assert len(inner.graphs) == 1


def test_counts_of_children():
    def scores(user_x, item_x, counts):
        return user_x.exp().repeat_interleave(counts, 0, output_size=item_x.shape[0]) * item_x

    inner = Recorder()
    own = backend(levels=LEVELS, counts={"counts": ("user", "item")}, inner=inner)
    given = torch.randn(2, 4), torch.randn(5, 4), torch.tensor([2, 3])
    torch.testing.assert_close(torch.compile(scores, backend=own)(*given), scores(*given))


def test_what_rewrite_refuses_is_an_error():
    model = nn.Sequential(nn.Dropout(0.5)).train()

    def scores(user_x, item_to_user):
        return model(user_x[item_to_user])

    compiled = torch.compile(scores, backend=backend(**DECLARED, inner="eager"))
    with pytest.raises(Exception, match="draws random numbers"):
        compiled(torch.ones(2, 3), torch.tensor([0, 1, 1]))


@pytest.mark.slow
def test_importing_the_package_does_not_import_dynamo():
    code = "import sys, ikbo_tree.rewriting; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
