"""Captured graphs on a GPU: one copy, one launch, right for every smaller batch."""

import numpy as np
import pytest
import torch
from serving.cases import CAPACITY, SIGNATURE, STAGED, Toy, known, oracle, request, staged

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


def users_who_come_back():
    """Batches of rankers' requests, some users in several of them."""
    model = example.staged()
    asked = [check(x, model.signature) for x in example.requests(Traffic(0), 12, 40)]
    picks = [np.random.default_rng(n).permutation(12)[: 1 + n % 6].tolist() for n in range(16)]
    return model.cuda(), [[asked[i] for i in pick] for pick in picks]


RANKERS = {"user": 32, "vendor": 512, "item": 2048}


def test_bits_do_not_depend_on_what_is_kept():
    """Nor on the other requests of a batch; and users' histories stay where they are."""
    model, batches = users_who_come_back()
    signature = model.signature
    row = signature.coarse[example.TABLE].row_bytes
    plain, few, all_ = (
        GraphRunner(model, signature, RANKERS, device="cuda", cache_bytes=rows * row)
        for rows in (0, 4, 100)
    )
    for batch in batches:
        merged = merge(signature, batch)
        expected = plain.run(merged).scores
        assert torch.equal(few.run(merged).scores, expected)
        assert torch.equal(all_.run(merged).scores, expected)
        for part, scores in zip(batch, merged.split(expected), strict=True):
            alone = merge(signature, [part])
            again = all_.run(alone)
            assert torch.equal(again.scores, scores)
            assert again.lookups[example.TABLE].hits == 1
            assert again.copied == all_._buffers[0].nbytes  # and no chunk


def test_parts_score_as_the_whole_does_on_a_gpu():
    model, batches = users_who_come_back()
    plain = example.signature()
    whole = GraphRunner(example.scorers()["tree"].cuda(), plain, RANKERS, device="cuda")
    parts = GraphRunner(model, model.signature, RANKERS, device="cuda", cache_bytes=1 << 20)
    for batch in batches:
        expected = whole.run(merge(plain, batch)).scores
        got = parts.run(merge(model.signature, batch)).scores
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 3, 100])
def test_integers_with_a_cache(rows):
    runner = GraphRunner(
        staged().cuda(), STAGED, [CAPACITY, WIDE], device="cuda", cache_bytes=rows * 12
    )
    rng = np.random.default_rng(rows)
    for number in range(40):
        keys = rng.permutation(20)[: rng.integers(1, 16)].tolist()
        asked = [known(number * 50 + key, key, number // 9) for key in keys]
        run = runner.run(merge(STAGED, [check(x, STAGED) for x in asked]))
        expected = np.concatenate([oracle(x) for x in asked])
        np.testing.assert_array_equal(run.scores.numpy(), expected)


def test_a_loaded_program_with_parts(tmp_path):
    save(staged().cuda(), STAGED, request(3, users=3), tmp_path / "toy.pt2")
    model, signature = load(tmp_path / "toy.pt2", device="cuda")
    runner = GraphRunner(model, signature, WIDE, device="cuda", cache_bytes=1 << 10)
    with TreeBatcher(runner) as batcher:
        asked = [known(number, number % 5, number // 10) for number in range(30)]
        futures = [batcher.submit(x) for x in asked]
        for x, future in zip(asked, futures, strict=True):
            np.testing.assert_array_equal(future.result(20).values.numpy(), oracle(x))
