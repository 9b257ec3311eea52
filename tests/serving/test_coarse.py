"""Coarse parts and their cache: the scores of the whole model, with less work."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from serving.cases import (
    CAPACITY,
    SIGNATURE,
    STAGED,
    Held,
    Rest,
    Weighed,
    known,
    oracle,
    request,
    runner,
    staged,
)

from ikbo_tree.demo.traffic import Traffic
from ikbo_tree.serving import (
    GraphRunner,
    Metrics,
    ScoringError,
    Staged,
    TreeBatcher,
    check,
    example,
)
from ikbo_tree.serving.merge import merge

WIDE = {"user": 64, "vendor": 256, "item": 1024}
ROW = 3 * 4
"""Bytes of a kept row of the toy."""


def merged(*asked):
    return merge(STAGED, [check(x, STAGED) for x in asked])


def scorer(rows=100, **options):
    """A runner of the toy with room for so many kept rows, and the part that it runs."""
    model = staged()
    options = {"capacity": WIDE, **options}
    made = runner(model, STAGED, cache_bytes=rows * ROW, **options)
    model.coarse["person"].calls.clear()
    return made, model.coarse["person"]


def assert_right(run, *asked):
    np.testing.assert_array_equal(run.scores.numpy(), np.concatenate([oracle(x) for x in asked]))


def test_the_whole_model_is_the_sum_of_its_parts():
    asked = request(1, users=3)
    given = merge(SIGNATURE, [check(asked, SIGNATURE)])
    with torch.no_grad():
        scores = staged()(tree=given.tree(given.rows), **given.parts[0].inputs)
    np.testing.assert_array_equal(scores.numpy(), oracle(asked))


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 100])
def test_scores_are_right_whatever_is_kept(rows, fixed):
    made, _ = scorer(rows, fixed=fixed)
    rng = np.random.default_rng(rows)
    for number in range(60):
        keys = rng.permutation(8)[: rng.integers(0, 6)].tolist()
        split = int(rng.integers(0, 3))  # some users of one request, others alone
        versions = rng.integers(0, 3, len(keys) + 1).tolist()
        asked = [known(number, keys[:split], versions.pop())] if keys[:split] else []
        asked += [known(number * 10 + k, k, versions.pop()) for k in keys[split:]]
        asked.append(request(number, users=int(rng.integers(1, 3))))
        assert_right(made.run(merged(*asked)), *asked)
        assert made.caches["person"].nbytes <= rows * ROW


def test_what_is_kept_is_not_computed():
    made, part = scorer(chunk_rows=2)
    first = [known(seed, seed, 1) for seed in range(5)]
    run = made.run(merged(*first))
    assert part.calls == [2, 2, 2]
    assert (run.lookups["person"].hits, run.lookups["person"].misses) == (0, 5)
    again = [known(70 + key, key, 1) for key in (3, 1, 4)]
    run = made.run(merged(*again))
    assert_right(run, *again)
    assert part.calls == [2, 2, 2]
    assert run.lookups["person"].hits == 3
    later = [known(90, 3, 2), known(91, 4, 1), known(92, 9, 1)]
    run = made.run(merged(*later))
    assert_right(run, *later)
    assert part.calls == [2, 2, 2, 2]
    assert (run.lookups["person"].hits, run.lookups["person"].misses) == (1, 2)
    assert set(run.stages) == {"coarse", "copy", "launch"}


def test_the_version_decides():
    """As documented: with key and version of an earlier row comes its result."""
    made, _ = scorer()
    told, other = known(1, 7, 1), known(2, 7, 1)
    lie = replace(other, inputs={**other.inputs, "user_x": told.inputs["user_x"] + 1})
    made.run(merged(told))
    assert_right(made.run(merged(lie)), other)
    assert made.caches["person"].invalidate(7)
    assert_right(made.run(merged(lie)), lie)
    made.caches["person"].clear()
    assert_right(made.run(merged(other)), other)


def test_one_batch_keeps_rows_apart_that_differ():
    made, _ = scorer()
    told = known(1, 7, 1)
    other = known(2, 7, 1)
    lie = replace(other, inputs={**other.inputs, "user_x": told.inputs["user_x"] + 1})
    assert_right(made.run(merged(told, lie)), told, lie)
    assert_right(made.run(merged(known(3, 7, 1))), known(3, 7, 1))


def test_rows_without_version_are_computed_every_time():
    made, part = scorer()
    asked = replace(known(1, 7, 1), versions={})
    for _ in range(2):
        assert_right(made.run(merged(asked)), asked)
    assert len(part.calls) == 2
    assert len(made.caches["person"]) == 0


def test_dead_rows_are_zero():
    """What a larger batch left behind is not seen (contract 9)."""
    seen = {}

    class Looking(Rest):
        def forward(self, tree, user_y, vendor_x, item_x, word):
            seen["user_y"] = user_y.clone()
            return super().forward(tree, user_y, vendor_x, item_x, word)

    model = Staged(Looking(), {"person": Weighed()}, STAGED).eval()
    made = GraphRunner(model, STAGED, WIDE, fixed=True, cache_bytes=1000)

    def positive(key):
        asked = known(key, key, 1)
        asked.inputs["user_x"][:] = key + 1.0
        return asked

    made.run(merged(*(positive(key) for key in range(20))))
    made.run(merged(positive(30)))  # in a chunk with somebody of before
    made.run(merged(positive(3)))
    assert len(seen["user_y"]) == WIDE["user"]
    assert seen["user_y"][0].tolist() == [4, 8, 12]
    assert not seen["user_y"][1:].any()


def test_a_full_batch_of_which_nothing_is_kept():
    made, _ = scorer(0, capacity=CAPACITY, chunk_rows=3)
    asked = request(7, users=CAPACITY["user"], vendors=3, items=2)
    assert_right(made.run(merged(asked)), asked)


class Moody(Weighed):
    """Fails on one feature, after it has given rubbish to whoever asks."""

    def forward(self, user_x):
        found = super().forward(user_x)
        if (user_x == 7777).any():
            raise RuntimeError("a kernel failed")
        return found


def test_a_part_that_fails_leaves_nothing_behind():
    model = Staged(Rest(), {"person": Moody()}, STAGED).eval()
    made = GraphRunner(model, STAGED, CAPACITY, cache_bytes=1000, chunk_rows=2)
    bad = known(1, 7, 1)
    bad.inputs["user_x"][:] = 7777
    good = [known(seed, seed, 1) for seed in range(2)]
    held = Held(made)
    held.go.set()
    with TreeBatcher(held, max_delay_s=0.05) as batcher:
        futures = [batcher.submit(x) for x in (*good, bad)]
        with pytest.raises(ScoringError, match="a kernel failed"):
            futures[2].result(10)
        for x, future in zip(good, futures, strict=False):
            np.testing.assert_array_equal(future.result(10).values.numpy(), oracle(x))
        assert 7 not in made.caches["person"]
        right = known(5, 7, 1)
        np.testing.assert_array_equal(batcher.score(right, 10).values.numpy(), oracle(right))


@pytest.mark.parametrize(
    "gives",
    [
        lambda x: {"user_y": x[:1]},
        lambda x: {"user_y": x.double()},
        lambda x: {"user_z": x},
        lambda x: {},
    ],
)
def test_a_part_that_gives_something_else(gives):
    class Other(torch.nn.Module):
        def forward(self, user_x):
            return gives(user_x)

    with pytest.raises(ScoringError, match="'person'"):
        runner(Staged(Rest(), {"person": Other()}, STAGED), STAGED)


def rankers():
    """A ranker with matrix products in its coarse part, and requests of users that come back."""
    model = example.staged()
    asked = example.requests(Traffic(0), 12, 20)
    batches = [[asked[i] for i in np.random.default_rng(n).permutation(12)[:5]] for n in range(12)]
    checked = [merge(model.signature, [check(x, model.signature) for x in b]) for b in batches]
    return model, checked


CAPACITY_OF_RANKERS = {"user": 16, "vendor": 256, "item": 512}


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("chunk_rows", [2, 3, 8])
def test_bits_do_not_depend_on_the_cache(chunk_rows, fixed):
    model, batches = rankers()
    row = model.signature.coarse[example.TABLE].row_bytes
    runs = {}
    for rows in (0, 4, 100):
        made = GraphRunner(
            model,
            model.signature,
            CAPACITY_OF_RANKERS,
            cache_bytes=rows * row,
            chunk_rows=chunk_rows,
            fixed=fixed,
        )
        runs[rows] = [made.run(batch) for batch in batches]
    hits = {rows: sum(run.lookups[example.TABLE].hits for run in x) for rows, x in runs.items()}
    assert hits[0] == 0 < hits[4] < hits[100] == 5 * 12 - 12
    for plain, *kept in zip(*runs.values(), strict=True):
        assert all(torch.equal(plain.scores, other.scores) for other in kept)


def test_parts_score_as_the_whole_does():
    """Within the budget: a projection of fewer rows rounds otherwise."""
    from ikbo_tree.testing.budget import assert_within_budget

    model, batches = rankers()
    whole, double = example.scorers()["tree"], example.scorers()["tree"].double()
    made = GraphRunner(model, model.signature, CAPACITY_OF_RANKERS, cache_bytes=1 << 20)
    for batch in batches:
        tree, inputs = batch.tree(batch.rows), {}
        for name, given in model.signature.inputs.items():
            inputs[name] = torch.empty((batch.rows[given.at], *given.shape), dtype=given.dtype)
            batch.write(name, inputs[name])
        with torch.no_grad():
            single = whole(tree=tree, **inputs)
            wide = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
            expected = double(tree=tree, **wide)
        assert_within_budget(made.run(batch).scores, expected, single, rows=False)


def test_many_threads_while_versions_change():
    """Features follow from key and version, so a result of another version would show."""
    made, part = scorer(6)
    version, stop = [0], threading.Event()

    def disturb():
        while not stop.wait(0.001):
            version[0] += 1
            made.caches["person"].invalidate(version[0] % 9)
            if version[0] % 50 == 0:
                made.caches["person"].clear()

    def one(number):
        asked = known(number, number % 9, version[0] // 8)
        return batcher.score(asked, 20).values.tolist() == oracle(asked).tolist()

    other = threading.Thread(target=disturb)
    other.start()
    try:
        with TreeBatcher(made, max_delay_s=0.001) as batcher, ThreadPoolExecutor(8) as pool:
            assert all(pool.map(one, range(400)))
    finally:
        stop.set()
        other.join()
    assert part.calls
    assert made.caches["person"].nbytes <= 6 * ROW


def test_runs_from_several_threads_take_turns():
    made, _ = scorer(4)
    end = time.monotonic() + 1.0

    def one(number):
        while time.monotonic() < end:
            asked = [known(number, key, number % 2) for key in range(6)]
            assert_right(made.run(merged(*asked)), *asked)
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one, range(4)))


def test_parts_of_a_large_request_share_what_is_kept():
    made, part = scorer(capacity=CAPACITY)
    big = known(5, 7, 1, vendors=8, items=40)
    assert len(oracle(big)) > 2 * CAPACITY["item"]
    with TreeBatcher(made) as batcher:
        np.testing.assert_array_equal(batcher.score(big, 10).values.numpy(), oracle(big))
    assert len(part.calls) == 1


def test_metrics_count_rows():
    class Seen(Metrics):
        facts = None

        def batch(self, facts):
            self.facts = facts

    seen = Seen()
    made, _ = scorer()
    with TreeBatcher(made, metrics=seen) as batcher:
        for hits in (0, 1):
            batcher.score(known(1, 7, 1), 10)
            assert seen.facts.lookups["person"].hits == hits


def test_prometheus_counts_rows():
    parser = pytest.importorskip("prometheus_client.parser")
    from ikbo_tree.serving import PrometheusMetrics

    metrics = PrometheusMetrics({"replica": "a"})
    made, _ = scorer(1)
    with TreeBatcher(made, metrics=metrics) as batcher:
        for asked in (known(1, 7, 1), known(2, 7, 1), known(3, 8, 1), request(1)):
            batcher.score(asked, 10)
    found = {
        (sample.name, sample.labels.get("outcome")): sample.value
        for family in parser.text_string_to_metric_families(metrics.text()[0].decode())
        for sample in family.samples
        if "coarse" in sample.name and not sample.name.endswith("_created")
    }
    assert found == {
        ("ikbo_tree_coarse_rows_total", "hit"): 1,
        ("ikbo_tree_coarse_rows_total", "miss"): 2,
        ("ikbo_tree_coarse_rows_total", "unversioned"): 1,
        ("ikbo_tree_coarse_evictions_total", None): 1,
    }
