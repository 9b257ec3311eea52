"""AUC, and how far two models' may be apart when their scores nearly agree."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ikbo_tree.extras import require


def auc(scores: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve (torchmetrics): the share of (liked, not liked) pairs in order.

    Args:
        scores: [candidates], larger is better.
        labels: [candidates], 0 or 1.
    """
    metrics = require("torchmetrics.functional.classification", "cli")
    return float(metrics.binary_auroc(scores.cpu(), labels.cpu().long()))


def may_differ(one: Tensor, other: Tensor, labels: Tensor) -> float:
    """How far apart the AUCs of two score vectors can be, given how far the scores are apart.

    If scores differ by at most d, only pairs whose scores in `one` lie within 2 d can change their
    order; the bound is their share of all pairs. To it comes the rounding of a pairwise float32
    sum over the candidates, in which the AUC is computed.

    Args:
        one: [candidates].
        other: [candidates].
        labels: [candidates], 0 or 1.
    """
    scores = one.cpu().double().numpy()
    liked = labels.cpu().numpy() > 0
    reach = 2 * float((one.double() - other.double()).abs().max())
    rest = np.sort(scores[~liked])
    above = np.searchsorted(rest, scores[liked] + reach, side="right")
    below = np.searchsorted(rest, scores[liked] - reach, side="left")
    close = int((above - below).sum()) / max(1, int(liked.sum()) * len(rest))
    rounding = 2 * math.ceil(math.log2(max(2, len(scores)))) * torch.finfo(torch.float32).eps
    return close + rounding
