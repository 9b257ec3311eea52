"""Who is measured: what each is, and how it looks in plots."""

from __future__ import annotations

from typing import NamedTuple

BLUE, SKY, GREEN, ORANGE, RED, PURPLE, YELLOW, BLACK = (
    "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#f0e442", "#000000",
)  # fmt: skip
"""Okabe and Ito's colours, which the colour-blind tell apart; other ones are shades of them."""
PALE_RED, OCHRE, OLIVE, MINT, PALE_PURPLE = "#f0a883", "#b87d00", "#b8ae2c", "#7fcfb7", "#e6bcd3"


class Contender(NamedTuple):
    """Attributes: colour; mark: of matplotlib; text: what it is."""

    colour: str
    mark: str
    text: str


CONTENDERS = {
    "ikbo-gluon": Contender(BLUE, "o", "this package's kernels for Hopper, in Gluon"),
    "ikbo-gluon-p16": Contender(SKY, "o", "the same with partial results in 16 bits"),
    "ikbo-triton": Contender(GREEN, "s", "this package's Triton kernels"),
    "ikbo-torch": Contender(MINT, "s", "this package's broadcast-free PyTorch"),
    "published-tlx": Contender(
        PURPLE, "D", "the article's warp-specialised kernel (fbtriton), persistent for attention"
    ),
    "published-triton": Contender(PALE_PURPLE, "D", "the article's Triton kernel"),
    "materialised+broadcast": Contender(RED, "X", "rows copied and concatenated, one product"),
    "materialised": Contender(PALE_RED, "x", "the product alone, the copied input given"),
    "decomposed": Contender(ORANGE, "^", "one product a level in torch, gathered and added"),
    "decomposed-padded": Contender(OCHRE, "v", "the same, K padded outside of what is timed"),
    "baddbmm": Contender(OLIVE, "P", "decomposed-padded, last product and sum in one call"),
    "torch-compile": Contender(YELLOW, "P", "decomposed-padded under max-autotune"),
    "cublas-candidate": Contender(
        "#c9ced3", "|", "the finest level's product alone: it does less than all others"
    ),
    "cudnn-broadcast": Contender(RED, "X", "keys and values copied, then cuDNN's attention"),
    "cudnn-copied": Contender(PALE_RED, "x", "cuDNN's attention alone, copies given"),
    "cudnn-folded": Contender(ORANGE, "^", "cuDNN, a user's query rows as one sequence"),
    "fa4-broadcast": Contender("#8c4a20", "X", "keys and values copied, then FlashAttention-4"),
    "fa4-copied": Contender("#c49a7c", "x", "FlashAttention-4 alone, copies given"),
    "fa4-folded": Contender(BLACK, "v", "FlashAttention-4, query rows folded"),
    "fa4-varlen": Contender("#5c5c5c", "<", "FlashAttention-4's varlen call, folded; any numbers"),
    "flash-folded": Contender("#9a9a9a", ">", "torch's flash attention, query rows folded"),
    "two-launches": Contender(ORANGE, "^", "cuDNN for the history, this package for the items"),
    "rounded": Contender("#9a9a9a", "_", "the float64 result, rounded once"),
    "flat": Contender(RED, "X", "the unmodified form: rows copied on the device"),
    "flat-cudnn": Contender(PALE_RED, "x", "the same, attention by cuDNN"),
    "folded-cudnn": Contender(PURPLE, "^", "cuDNN, query rows folded"),
    "system-broadcast": Contender(PALE_RED, "x", "all inputs arrive copied to the items"),
    "roo-split": Contender(ORANGE, "^", "request-only network at the users, the rest at the items"),
    "level-split": Contender(OCHRE, "v", "each level's own network at its own rows"),
    "rewritten": Contender(BLUE, "o", "the unmodified model after ikbo_tree.rewrite"),
}
"""By the name that results files have; `-compiled` behind it is under torch.compile."""


def contender(who: str) -> Contender:
    """By name, compiled or not."""
    return CONTENDERS[who.removesuffix("-compiled")]
