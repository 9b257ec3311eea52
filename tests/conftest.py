"""For all tests: poisoned memory, hypothesis profiles, GPU tests only where there is a GPU."""

import pytest
import torch

from ikbo_tree.testing import profiles
from ikbo_tree.testing.poison import poisoned_memory

profiles.load()


def pytest_collection_modifyitems(config, items):
    """Deselects, not skips: a laptop's run shall not look as if something were missing."""
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if item not in set(gpu)]


@pytest.fixture(autouse=True)
def poison():
    """What no one wrote is NaN; no test may depend on memory that happens to be zero."""
    with poisoned_memory():
        yield
