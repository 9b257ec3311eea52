"""The flat layer of HSTU, which TreeHSTU is held to, against loops."""

import pytest
import torch
import torch.nn.functional as F

from ikbo_tree.nn import HSTULayer

EVENTS, WIDTH, HEADS = 5, 8, 2


def by_loops(layer, history, candidate):
    """One request whose events are all real."""
    everything = torch.cat([history, candidate.unsqueeze(0)])
    u, v, q, k = F.silu(layer.uvqk(layer.norm(everything))).chunk(4, dim=1)
    rows, size, dim = len(history), layer.length, WIDTH // HEADS
    out = []
    for i in range(rows + 1):
        found = torch.zeros(WIDTH, dtype=history.dtype)
        for j in range(min(i + 1, rows)):
            for head in range(HEADS):
                at = slice(head * dim, (head + 1) * dim)
                score = q[i, at] @ k[j, at] / dim**0.5 + layer.distance_bias[i - j, head]
                found[at] += F.silu(score) * v[j, at] / size
        out.append(everything[i] + layer.out(layer.out_norm(found) * u[i]))
    return torch.stack(out[:rows]) if rows else history, out[rows]


@pytest.mark.parametrize("longest", [EVENTS, 9])
def test_against_loops(longest):
    torch.manual_seed(0)
    layer = HSTULayer(WIDTH, HEADS, longest, dtype=torch.float64)
    torch.nn.init.normal_(layer.distance_bias)
    lengths = torch.tensor([5, 0, 2, 1])
    history = torch.randn(4, EVENTS, WIDTH, dtype=torch.float64)
    candidate = torch.randn(4, WIDTH, dtype=torch.float64)
    moved, found = layer(history, candidate, lengths)
    for row, length in enumerate(lengths.tolist()):
        events, last = by_loops(layer, history[row, :length], candidate[row])
        torch.testing.assert_close(moved[row, :length], events)
        torch.testing.assert_close(found[row], last)
    whole = layer(history, candidate)
    full = layer(history, candidate, torch.full((4,), EVENTS))
    torch.testing.assert_close(whole, full)
