"""Scores one small request with an installed copy that has no extras."""

import subprocess
import sys

import torch

import ikbo_tree as ikbo

tree = ikbo.BroadcastTree.from_counts({"vendor": [2, 1], "item": [3, 0, 2]}, root="user")
x = {"user": torch.randn(2, 4), "vendor": torch.randn(3, 5), "item": torch.randn(5, 6)}
w = {"user": torch.randn(7, 4), "vendor": torch.randn(7, 5), "item": torch.randn(7, 6)}
scores = ikbo.linear(x, w, tree=tree)
flat = torch.cat(
    [x["user"][tree.ancestors("item", of="user")], x["vendor"][tree.parents("item")], x["item"]], 1
)
torch.testing.assert_close(scores, flat @ torch.cat([w["user"], w["vendor"], w["item"]], 1).T)
k = torch.randn(2, 8, 1, 4)
out = ikbo.target_attention(torch.randn(5, 1, 1, 4), {"user": (k, k)}, tree=tree, level="item")
assert out.shape == (5, 1, 1, 4), out.shape

# A missing extra is a sentence with the pip line, not a traceback.
command = [sys.executable, "-m", "ikbo_tree.cli", "demo"]
run = subprocess.run(command, capture_output=True, text=True)
assert run.returncode == 1, run
assert "pip install" in run.stderr, run
assert "Traceback" not in run.stderr, run
print("installed copy: ok")
