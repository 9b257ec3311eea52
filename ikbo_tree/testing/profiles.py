"""Hypothesis profiles: `default` is fast, `nightly` is long."""

from __future__ import annotations

import os

from ikbo_tree.extras import require

ENVIRONMENT = "HYPOTHESIS_PROFILE"


def load() -> None:
    """Registers both profiles and loads the one that HYPOTHESIS_PROFILE names, or `default`.

    `default` tries 25 trees a test, the same ones in every run, so that a failure is a change's
    and not the day's. `nightly` tries 2,000, new ones each time.
    """
    settings = require("hypothesis", "testing").settings
    settings.register_profile("default", max_examples=25, deadline=None, derandomize=True)
    settings.register_profile("nightly", max_examples=2000, deadline=None, print_blob=True)
    settings.load_profile(os.environ.get(ENVIRONMENT, "default"))
