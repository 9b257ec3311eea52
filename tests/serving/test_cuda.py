"""Captured graphs on a GPU: one copy, one launch, right for every smaller batch."""

import numpy as np
import pytest
import torch
from serving.cases import CAPACITY, SIGNATURE, Toy, oracle, request

from ikbo_tree.demo.traffic import Traffic
from ikbo_tree.serving import GraphRunner, TreeBatcher, TreeBuffers, check, example, load, save
from ikbo_tree.serving.merge import merge

pytestmark = pytest.mark.gpu
WIDE = {"user": 64, "vendor": 256, "item": 1024}


def checked(*requests):
    return [check(x, SIGNATURE) for x in requests]


def test_replays_for_every_smaller_tree():
    runner = GraphRunner(Toy().eval().cuda(), SIGNATURE, [CAPACITY, WIDE], device="cuda")
    for users in (20, 1, 5, 1, 20):
        asked = [request(users * 31 + i, key=i % 3) for i in range(users)]
        run = runner.run(merge(SIGNATURE, checked(*asked)))
        assert run.copied > 0
        expected = np.concatenate([oracle(x) for x in asked])
        np.testing.assert_array_equal(run.scores.numpy(), expected)


def test_no_rows_at_all():
    runner = GraphRunner(Toy().eval().cuda(), SIGNATURE, CAPACITY, device="cuda")
    runner.run(merge(SIGNATURE, checked(request(1, users=2))))
    empty = request(3, items=0)
    assert runner.run(merge(SIGNATURE, checked(empty))).scores.shape == (0,)


def test_a_loaded_program(tmp_path):
    save(Toy().eval().cuda(), SIGNATURE, request(3, users=3), tmp_path / "toy.pt2")
    model, signature = load(tmp_path / "toy.pt2", device="cuda")
    with TreeBatcher(GraphRunner(model, signature, WIDE, device="cuda")) as batcher:
        futures = [batcher.submit(request(seed)) for seed in range(40)]
        for seed, future in enumerate(futures):
            scores = future.result(20).values
            np.testing.assert_array_equal(scores.numpy(), oracle(request(seed)))


def test_alone_and_among_others_the_bits_are_the_same():
    signature = example.signature()
    model = example.scorers()["tree"].cuda()
    capacity = {"user": 32, "vendor": 512, "item": 2048}
    runner = GraphRunner(model, signature, capacity, device="cuda")
    asked = [check(x, signature) for x in example.requests(Traffic(0), 12, 40)]
    together = merge(signature, asked)
    for part, scores in zip(asked, together.split(runner.run(together).scores), strict=True):
        assert torch.equal(runner.run(merge(signature, [part])).scores, scores)


def test_one_pinned_buffer_and_one_copy():
    buffers = TreeBuffers(SIGNATURE, WIDE, device="cuda")
    merged = merge(SIGNATURE, checked(request(1, users=3)))
    tree, inputs = buffers.fill(merged)
    assert buffers._host.is_pinned()
    assert buffers.copy() == buffers.nbytes
    assert tree.device.type == "cuda"
    on_host = merged.tree(buffers._allocated)
    for mine, theirs in zip(tree._fields, on_host._fields, strict=True):
        assert torch.equal(mine.cpu(), theirs)
    for name, x in inputs.items():
        live = merged.rows[SIGNATURE.inputs[name].at]
        assert torch.equal(x[:live].cpu(), merged.parts[0].inputs[name])
        assert not x[live:].any()
