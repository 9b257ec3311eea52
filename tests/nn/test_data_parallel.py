"""Gradients of several processes, each with its shard of the tree, against those of one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ikbo_tree import BroadcastTree, shard
from ikbo_tree.nn import TreeCrossNet, TreeMLP, TreeTargetAttention
from ikbo_tree.testing import assert_within_budget

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "data_parallel.md"
WIDTH, EVENTS = 8, 6
LEVELS = {"user": "user", "history": "user", "brand": "brand", "vendor": "vendor", "item": "item"}
SIZES = {"user": (5,), "history": (EVENTS, WIDTH), "brand": (3,), "vendor": (4,), "item": (WIDTH,)}


def with_brands(vendors, items):
    tree = BroadcastTree.from_counts({"vendor": vendors, "item": items}, root="user")
    index = [row % 2 for row in range(sum(vendors))]
    return tree.with_table("brand", of="vendor", index=index, rows=2)


TREES = {
    "uneven": with_brands([2, 0, 1, 3, 1], [3, 40, 0, 7, 2, 1, 90]),
    "one_request": with_brands([2], [3, 5]),  # the second process has none
    "no_items": with_brands([1, 1], [0, 4]),
}


class Ranker(nn.Module):
    """Levels, a history and a side table."""

    def __init__(self):
        super().__init__()
        self.interest = TreeTargetAttention(WIDTH, 2, level="item")
        self.crossed = TreeCrossNet({"user": 5, "brand": 3, "vendor": 4, "item": WIDTH}, 1)
        self.head = TreeMLP({"user": 5, "item": 5 + 3 + 4 + WIDTH + WIDTH}, [6, 1])

    def forward(self, user, history, brand, vendor, item, tree):
        found = self.interest(item, {"user": history}, tree=tree)
        features = {"user": user, "brand": brand, "vendor": vendor, "item": item}
        wide = torch.cat([self.crossed(features, tree=tree), found], dim=1)
        return self.head({"user": user, "item": wide}, tree=tree).squeeze(1)


def batch(tree):
    """Inputs of the whole tree, and a weight for each score."""
    generator = torch.Generator().manual_seed(1)
    x = {n: torch.randn(tree.rows(LEVELS[n]), *s, generator=generator) for n, s in SIZES.items()}
    return x, torch.randn(tree.rows("item"), generator=generator)


def cut(x, part):
    """The rows that a part of the tree has; side tables whole."""
    return {n: y if LEVELS[n] in part.tables else y[part.origin(LEVELS[n])] for n, y in x.items()}


def model_and_gradients(tree, x, weights, dtype=torch.float32, scale=1.0, wrap=lambda model: model):
    torch.manual_seed(0)
    model = Ranker().to(weights.device, dtype)
    whole = wrap(model)  # DDP lives until the gradients are there
    scores = whole(**{n: y.to(dtype) for n, y in x.items()}, tree=tree)
    ((scores.square() + scores) * weights.to(dtype)).sum().mul(scale).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def work(rank, world, backend, folder):
    """One of the processes: writes its gradients for every tree."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ids = [rank] if backend == "nccl" else None
    for name, tree in TREES.items():
        x, weights = batch(tree)
        part = shard(tree, rank, world)
        own, at = cut(x, part), part.origin("item")
        got = model_and_gradients(
            part.to(device),
            {n: y.to(device) for n, y in own.items()},
            weights[at].to(device),
            scale=world,  # DDP takes the mean over processes, a sum over rows is wanted
            wrap=lambda model: DistributedDataParallel(model, device_ids=ids),
        )
        torch.save({n: g.cpu() for n, g in got.items()}, f"{folder}/{name}_{rank}.pt")
    dist.destroy_process_group()


def expected(tree):
    """By one process: in float64, and in float32 with the requests in several orders."""
    x, weights = batch(tree)
    exact = model_and_gradients(tree, x, weights, torch.float64)
    generator = torch.Generator().manual_seed(2)
    evaluations = [model_and_gradients(tree, x, weights)]
    for _ in range(4):
        turned = tree.select(user=torch.randperm(tree.rows("user"), generator=generator))
        own = cut(x, turned)
        evaluations.append(model_and_gradients(turned, own, weights[turned.origin("item")]))
    return exact, evaluations


def check(backend, folder, world=2):
    torch.multiprocessing.spawn(work, (world, backend, str(folder)), nprocs=world)
    for name, tree in TREES.items():
        exact, evaluations = expected(tree)
        got = [torch.load(folder / f"{name}_{rank}.pt") for rank in range(world)]
        for key, value in got[0].items():
            assert all(torch.equal(value, other[key]) for other in got)
            others = [evaluation[key] for evaluation in evaluations]
            assert_within_budget(value, exact[key], others, name=f"{name}: {key}", rows=False)


@pytest.mark.slow
def test_two_processes_have_the_gradients_of_one(tmp_path):
    check("gloo", tmp_path)


@pytest.mark.gpu
@pytest.mark.slow
def test_two_gpus_have_the_gradients_of_one_process(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    check("nccl", tmp_path)


def test_shards_alone_add_up_to_the_whole():
    """What DDP sums up, without DDP: each shard's gradients, added."""
    for name, tree in TREES.items():
        x, weights = batch(tree)
        exact, evaluations = expected(tree)
        total = dict.fromkeys(exact, 0)
        for rank in range(3):
            part = shard(tree, rank, 3)
            got = model_and_gradients(part, cut(x, part), weights[part.origin("item")])
            total = {key: total[key] + got[key] for key in total}
        for key, value in total.items():
            others = [evaluation[key] for evaluation in evaluations]
            assert_within_budget(value, exact[key], others, name=f"{name}: {key}", rows=False)


@pytest.mark.slow
def test_the_example_prints_the_same_under_torchrun(tmp_path):
    blocks = re.findall(
        r"```python\n(.*?)```(?:\n\n?```text\n(.*?)```)?", EXAMPLE.read_text(), re.S
    )
    script = tmp_path / "train.py"
    script.write_text("\n".join(code for code, _ in blocks))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*launch, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(printed for _, printed in blocks)
