"""Naive loop oracles and random trees for the tests of `ikbo_tree.mapping`."""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from ikbo_tree.mapping import build
from ikbo_tree.mapping.structure import Structure


@dataclass
class Naive:
    """A tree as lists: `parents[i]` has the parent row of each row of level `i` (root: unused)."""

    structure: Structure
    parents: list[list[int]]
    root_rows: int

    @property
    def rows(self):
        return [self.root_rows] + [len(p) for p in self.parents[1:]]

    def ancestor(self, level, row, of):
        while level != of:
            row = self.parents[level][row]
            level = self.structure.parent[level]
        return row

    def ancestors(self, level, of):
        return [self.ancestor(level, row, of) for row in range(self.rows[level])]

    def below(self, level, of, row):
        """Rows of `level` whose ancestor is `row`, ascending."""
        return [i for i in range(self.rows[level]) if self.ancestor(level, i, of) == row]

    @property
    def in_order(self):
        return all(p == sorted(p) for p in self.parents[1:])

    def counts(self, level):
        above = self.structure.parent[level]
        return [self.parents[level].count(row) for row in range(self.rows[above])]

    def pack(self, capacity=None):
        return build.pack_parents(
            self.structure, self.parents[1:], self.root_rows, capacity=capacity
        )


def grouped(index, groups):
    """offsets and order of a map, by loops."""
    order, offsets = [], [0]
    for group in range(groups):
        order += [i for i, g in enumerate(index) if g == group]
        offsets.append(len(order))
    return offsets, order


def check_maps(maps, index, rows, capacity, coarse_rows, coarse_capacity):
    """Asserts maps with their dead entries against a naive index."""
    offsets, order = grouped(index, coarse_rows)
    dead = capacity - rows
    assert maps.index.dtype == maps.offsets.dtype == np.int32
    assert maps.index.tolist() == index + [0] * dead
    assert maps.offsets.tolist() == offsets + [rows] * (coarse_capacity - coarse_rows)
    if maps.order is None:
        assert order == list(range(rows))
    else:
        assert maps.order.dtype == np.int32
        assert maps.order.tolist() == order + [0] * dead


def check_packed(packed, naive):
    """Asserts every field of a packed tree against the oracle."""
    structure = naive.structure
    assert packed.structure == structure
    assert packed.rows == tuple(naive.rows)
    assert packed.sorted == naive.in_order
    assert packed.buffer.dtype == np.int32
    assert sum(packed.sizes) == len(packed.buffer)
    fields = packed.fields()
    assert len(fields) == len(packed.sizes)
    assert fields["live"].tolist() == naive.rows
    for fine, chain in enumerate(structure.lineage):
        for coarse in chain:
            maps = build.compose(packed, fine, coarse)
            check_maps(
                maps,
                naive.ancestors(fine, coarse),
                packed.rows[fine],
                packed.capacity[fine],
                packed.rows[coarse],
                packed.capacity[coarse],
            )
            if (fine, coarse) in structure.pair_at:
                pair = f"[{structure.levels[fine]}, {structure.levels[coarse]}]"
                np.testing.assert_array_equal(fields["index" + pair], maps.index)
                np.testing.assert_array_equal(fields["offsets" + pair], maps.offsets)
    if len(structure.levels) == 1:
        root = structure.levels[0]
        live = list(range(packed.rows[0]))
        dead = [0] * (packed.capacity[0] - packed.rows[0])
        assert fields[f"index[{root}, {root}]"].tolist() == live + dead


@st.composite
def structures(draw, most=6, branching=True):
    """Chains, stars and what lies between."""
    n = draw(st.integers(1, most))
    names = tuple(f"level{i}" for i in range(n))
    under = {}
    if branching:
        for i in range(1, n):
            under[names[i]] = names[draw(st.integers(0, i - 1))]
    return Structure.build(names[0], names[1:], under)


@st.composite
def naive_trees(draw, structure=None, most=6, most_rows=7, in_order=None):
    """Random trees: empty levels, childless rows anywhere, sorted or not."""
    if structure is None:
        structure = draw(structures(most))
    root_rows = draw(st.integers(0, most_rows))
    if in_order is None:
        in_order = draw(st.booleans())
    rows, parents = [root_rows], [[]]
    for above in structure.parent[1:]:
        some = st.lists(st.integers(0, rows[above] - 1), max_size=most_rows)
        below = draw(some) if rows[above] else []
        parents.append(sorted(below) if in_order else below)
        rows.append(len(below))
    return Naive(structure, parents, root_rows)


@st.composite
def capacities(draw, rows):
    """None, or at least as many rows a level, with None for some."""
    if draw(st.booleans()):
        return None
    return [n + extra if (extra := draw(st.integers(-1, 3))) >= 0 else None for n in rows]
