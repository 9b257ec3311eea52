"""What only a fresh process shows: laziness, first compiles from several threads, caches."""

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.slow


def fresh(code, tmp_path, **environment):
    """Runs code in a new process, away from the checkout; its output."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_does_not_import_numba(tmp_path):
    code = """
        import sys
        import ikbo_tree.mapping
        from ikbo_tree.mapping import build, columns, compose, keys, layout, packing, plans
        assert "numba" not in sys.modules
        build.counts_from_offsets("offsets", [0, 2])
        packing.from_lengths([1, 2], 3)
        assert "numba" not in sys.modules
    """
    fresh(code, tmp_path)


def test_the_first_small_trees_do_not_wait_for_numba(tmp_path):
    code = """
        import sys
        import numpy as np
        from ikbo_tree.mapping import build, first_trees
        from ikbo_tree.mapping.structure import Structure

        pair = Structure.build("user", ("item",), None)
        for _ in range(first_trees.TREES):
            small = build.pack_counts(pair, [[2, 0, 1]], None)
            assert small.buffer.tolist() == [3, 3, 0, 0, 2, 0, 2, 2, 3]
            assert "numba" not in sys.modules
        if sys.argv[1:] == ["large"]:
            first_trees._made = iter([0])
            build.pack_counts(pair, [np.ones(first_trees.COUNTS + 1, int)], None)
        else:
            assert (build.pack_counts(pair, [[2, 0, 1]], None).buffer == small.buffer).all()
        assert "numba" in sys.modules
    """
    fresh(code, tmp_path)
    fresh(f"import sys\nsys.argv[1:] = ['large']\n{textwrap.dedent(code)}", tmp_path)


EIGHT_THREADS = """
    import gc, random, sys, threading
    import numpy as np
    from ikbo_tree.mapping import build, compose, keys, plans
    from ikbo_tree.mapping.structure import Structure

    structure = Structure.build("user", ("vendor", "item"), None)
    start = threading.Barrier(8)
    failures = []

    def work(seed):
        rng = np.random.default_rng(seed)
        start.wait()
        try:
            for _ in range(20):
                vendors = rng.integers(0, 4, 9)
                items = rng.integers(0, 5, vendors.sum())
                tree = build.pack_counts(structure, [vendors, items], None)
                above = np.repeat(np.arange(len(items)), items)
                assert (tree.maps(2, 1).index == above).all()
                shuffled = rng.permutation(above)
                other = build.pack_parents(
                    structure, [np.repeat(np.arange(9), vendors), shuffled], 9
                )
                assert (other.maps(2, 1).order == np.argsort(shuffled, kind="stable")).all()
                assert compose.concat([tree, other]).rows == (18, *(2 * n for n in tree.rows[1:]))
                assert plans.cut_segments(tree.maps(2, 0).offsets, 4).rows.sum() == len(above)
                found = keys.group_keys({"user": shuffled, "item": shuffled})
                assert found.root_rows == len(np.unique(shuffled))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert gc.isenabled()
    print("done")
"""


def test_eight_threads_build_trees_at_once_first_compile_included(tmp_path):
    cache = tmp_path / "cache"
    assert fresh(EIGHT_THREADS, tmp_path, NUMBA_CACHE_DIR=str(cache)) == "done\n"
    assert list(cache.rglob("*.nbi"))


def test_without_a_folder_for_the_cache(tmp_path):
    code = """
        from ikbo_tree.mapping import build
        from ikbo_tree.mapping.structure import Structure
        tree = build.pack_parents(Structure.build("user", ("item",), None), [[0, 0, 1]], 2)
        print(tree.buffer.tolist())
    """
    found = fresh(code, tmp_path, NUMBA_CACHE_DIR="/dev/null/nowhere")
    assert found == "[2, 3, 0, 0, 1, 0, 2, 3]\n"
