"""What benchmarks compile for Hopper: variants, traced kernels, the forms that a table shows."""

import json
import subprocess
import sys
from unittest import mock

import harness
import machine_code
import pytest
import triton
from ablate_kernels import SHIPPED, VARIANTS, switched
from offline.compiling import compile_only, read
from offline.miscompiled import miscompiled
from triton.runtime.jit import JITFunction

FORMS = {
    "lce": ("lce, 16-bit partials", "lce, float32 partials"),
    "attn": ("attn, D = 128",),
    "attn-bwd": ("attn, gradients of keys", "attn, gradient of queries"),
}
CASES = [
    (family, variant, form)
    for family, forms in FORMS.items()
    for variant in VARIANTS[family]
    for form in forms
    if variant.who != SHIPPED
]


def compiled(call):
    """All kernels that a call launches."""
    kept = []
    with compile_only():
        compile_ = JITFunction.run

        def keep(self, *args, **kwargs):
            kept.append(compile_(self, *args, **kwargs))
            return kept[-1]

        with mock.patch.object(JITFunction, "run", keep):
            call()
    return kept


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "variant", "form"), CASES, ids=lambda x: getattr(x, "who", str(x))
)
def test_variants_compile(family, variant, form):
    """And are right and fit; a few bytes may spill outside of loops."""
    _, call = machine_code.FORMS[form]
    with switched(variant, family):
        kernels = compiled(call)
    assert kernels
    for kernel in kernels:
        found = read(kernel, "sm_90")
        assert found.fits
        assert found.spills <= 16
        assert miscompiled(found.listing) == []


@pytest.mark.slow
@pytest.mark.parametrize("form", machine_code.FORMS)
def test_facts_about_machine_code(form):
    """benchmarks/results/machine-code_sm-90.json is what kernels compile to now."""
    path = harness.RESULTS / "machine-code_sm-90.json"
    content = json.loads(path.read_text())
    if content["versions"]["triton"] != triton.__version__:
        pytest.skip(f"the file is of triton {content['versions']['triton']}")
    (record,) = (r for r in content["records"] if r["workload"] == form)
    assert machine_code.facts(form) == record


TRACED = """
import re, sys
sys.path[:0] = {folders}
import machine_code, trace_kernels
from offline.compiling import read
with trace_kernels.traced(132, "cpu"):
    for form in {forms}:
        found = machine_code.facts(form)
        assert found["serialised"] == found["miscompiled"] == 0, found
        listing = read(machine_code.built(*machine_code.FORMS[form]), "sm_90").listing
        assert listing.count("SR_CLOCKLO") == 10, form
        loops = re.findall(r"HGMMA(?:(?!BRA).)*HGMMA", listing, re.DOTALL)
        assert loops and not any(re.search(r"LDL|STL", loop) for loop in loops), form
print("done")
"""


@pytest.mark.slow
def test_traced_kernels_compile():
    """In a process that has compiled them in no other way.

    Both consumers read the clock five times: in tiles of either kind, or for first blocks, steps
    and results. Nothing is kept in memory between products.
    """
    forms = ("lce, 16-bit partials", "lce, float32 partials", "attn, D = 128")
    folders = [str(harness.ROOT / name) for name in ("benchmarks", "tests")]
    code = TRACED.format(folders=folders, forms=forms)
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith("done\n")
