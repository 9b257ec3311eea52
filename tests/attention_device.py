"""Calls of the attention ops on the device under test, held to their budgets."""

from dataclasses import replace

import numpy as np
import torch
from attention_naive import expected, results

from ikbo_tree.testing.budget import assert_within_budget


def moved(call, device):
    """The same call on a device."""

    def there(x):
        return None if x is None else x.to(device)

    memories = [
        replace(
            m,
            **{name: there(getattr(m, name)) for name in ("k", "v", "bias", "mask")},
            lengths=there(m.lengths),
            offsets=there(m.offsets),
        )
        for m in call.memories
    ]
    grads = {name: there(x) for name, x in call.grads.items()}
    return replace(
        call,
        tree=call.tree.to(device),
        q=there(call.q),
        q_self=there(call.q_self),
        memories=memories,
        grads=grads,
    )


def check(call, device, wanted=None, found=None):
    """Results and gradients on the device against their budgets.

    Beside float32 evaluations, 16-bit kernels are compared with one whose weights P and dS are
    rounded once to 16 bits, since matrix instructions take no others.
    """
    if found is None:
        found = results(moved(call, device), "triton", wanted)
    exact, sizes = expected(call)
    near, _ = expected(call, np.float32)
    unit = torch.finfo(torch.float32).eps / 2
    rounded = None
    if call.q.element_size() == 2:
        rounded, _ = expected(call, np.float32, weights=call.q.dtype)
    for name, x in found.items():
        evaluations = [torch.from_numpy(exact[name] + unit * sizes[name])]
        evaluations += [torch.from_numpy(e[name].astype(np.float64)) for e in (near, rounded) if e]
        assert x.is_contiguous()
        assert_within_budget(x.reshape(exact[name].shape), exact[name], evaluations, name=name)
    return found
