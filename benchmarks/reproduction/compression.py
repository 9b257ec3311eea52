"""Items of linear compression, after the article's second section: steps, sweeps, more levels."""

from __future__ import annotations

from reproduction.spec import Cell, Claim, Item, Panel, Ratio, over

LCE = "lce-b1024-r70"
FORMS = (
    "materialised+broadcast", "materialised", "decomposed", "decomposed-padded", "baddbmm",
    "ikbo-triton", "ikbo-gluon",
)  # fmt: skip

_STAGES = ("decomposed", "decomposed-padded", "ikbo-triton", "ikbo-gluon")


def _lce(slow: str, fast: str, workload: str = LCE, topic: str = "lce") -> Ratio:
    return Cell(topic, workload, slow), Cell(topic, workload, fast)


STEPS = Item(
    "lce-steps",
    "article",
    "Linear compression, step by step",
    "1,024 candidates, 70 a user, M 433, K 1,178 + 866, N 256: one product of copied rows takes"
    " 1.944 ms; decomposed by level 1.389; K padded to a multiple of 8 0.798; the sum fused into"
    " the product's epilogue 0.580; one warp-specialised launch for both levels 0.482. About 4x.",
    "The same shape, float16. The article's last two steps are here this package's kernels: Triton,"
    " one fused launch a level, and Gluon, one warp-specialised launch for the tree. Both keep"
    " partial results in float32 and pad W inside of what is timed; the padded torch forms get"
    " padded tensors for nothing. The published kernels stand in a run of their own, with the"
    " compiler they need.",
    (
        Panel(
            "Forward",
            "steps",
            ("lce",),
            (("time", LCE),),
            (
                "materialised+broadcast",
                "materialised",
                *_STAGES[:2],
                "torch-compile",
                *_STAGES[2:],
                "ikbo-gluon-p16",
                "cublas-candidate",
            ),
        ),
        Panel(
            "Beside the published kernels (another run)",
            "steps",
            ("lce-published",),
            (("time", LCE),),
            (
                "published-triton",
                "published-tlx",
                "ikbo-triton",
                "ikbo-gluon",
                "ikbo-gluon-p16",
                "cublas-candidate",
            ),
        ),
    ),
    (
        Claim(
            "Decomposition",
            "1.944 to 1.389 ms, 1.40x",
            [_lce("materialised", "decomposed")],
            at_least=1.40,
        ),
        Claim(
            "Alignment",
            "1.389 to 0.798 ms, 1.74x",
            [_lce("decomposed", "decomposed-padded")],
            at_least=1.74,
        ),
        Claim(
            "Fusion of the sum",
            "0.798 to 0.580 ms, 1.38x",
            [_lce("decomposed-padded", "ikbo-triton")],
            at_least=1.38,
        ),
        Claim(
            "Warp specialisation, both levels in one launch",
            "0.580 to 0.482 ms, 1.20x",
            [_lce("ikbo-triton", "ikbo-gluon")],
            at_least=1.20,
        ),
        Claim(
            "The same step between the published kernels",
            "0.580 to 0.482 ms, 1.20x",
            [_lce("published-triton", "published-tlx", topic="lce-published")],
            at_least=1.20,
        ),
        Claim(
            "All steps together, copies not counted",
            "1.944 to 0.482 ms, 4.03x",
            [_lce("materialised", "ikbo-gluon")],
            at_least=4.03,
        ),
        Claim(
            "All steps together, copies counted",
            "",
            [_lce("materialised+broadcast", "ikbo-gluon")],
            at_least=4.03,
        ),
        Claim(
            "This package beside the published warp-specialised kernel",
            "",
            [_lce("published-tlx", "ikbo-gluon", topic="lce-published")],
            at_least=1.0,
        ),
    ),
)

_BATCHES = tuple((n, f"lce-b{n}-r70") for n in (512, 1024, 2048, 3072))
_RATIOS = tuple((n, f"lce-b1024-r{n}") for n in (2, 10, 70, 1000))
_SPEEDUP = "speed-up over materialised, x"

SWEEPS = Item(
    "lce-sweeps",
    "article",
    "Linear compression over batch and ratio",
    "Cumulative speed-up over the product of copied rows, in torch: about 4x at every batch from"
    " 512 to 3,072 (70 a user) and at every ratio from 2 to 1,000 (batch 1,024), somewhat less at"
    " low ratios.",
    "The same sweeps. The product that is divided by gets its copied and concatenated input for"
    " nothing.",
    (
        Panel(
            "70 items a user",
            "lines",
            ("lce",),
            _BATCHES,
            _STAGES,
            label=_SPEEDUP,
            xlabel="items in the batch",
            over="materialised",
        ),
        Panel(
            "1,024 items",
            "lines",
            ("lce",),
            _RATIOS,
            _STAGES,
            label=_SPEEDUP,
            xlabel="items a user",
            over="materialised",
            log=True,
        ),
    ),
    (
        Claim(
            "Least speed-up over batches",
            "about 4x",
            [_lce("materialised", "ikbo-gluon", workload) for _, workload in _BATCHES],
            at_least=4.0,
        ),
        Claim(
            "Least speed-up at 10 to 1,000 a user",
            "about 4x",
            [_lce("materialised", "ikbo-gluon", workload) for _, workload in _RATIOS[1:]],
            at_least=4.0,
        ),
        Claim(
            "Speed-up at 2 a user",
            "still considerable",
            [_lce("materialised", "ikbo-gluon", "lce-b1024-r2")],
            at_least=1.5,
        ),
    ),
)

DEPTH = Item(
    "depth",
    "beyond",
    "Linear compression over two, three and four levels",
    "Left open by the authors: deeper hierarchies with independent ratios.",
    "1,024 items, 64 a user; three levels add 8 vendors a user, four add 2 products a vendor. One"
    " launch for any of them.",
    tuple(
        Panel(
            words,
            "bars",
            ("lce-depth", "lce"),
            (
                ("2 levels", "lce-b1024-r64"),
                ("3 levels", "lce3-b1024-r64"),
                ("4 levels", "lce4-b1024-r64"),
            ),
            FORMS,
            direction=direction,
        )
        for words, direction in (("Forward", "fwd"), ("Forward and backward", "fwd_bwd"))
    ),
    (
        Claim(
            "Forward over the product of copied rows, four levels",
            "",
            [over("lce-depth", "lce4-b1024-r64", "materialised")],
            at_least=4.0,
        ),
        Claim(
            "Forward over the product of copied rows, three levels",
            "",
            [over("lce", "lce3-b1024-r64", "materialised")],
            at_least=4.0,
        ),
        Claim(
            "Forward over torch.compile's best, three levels",
            "",
            [over("lce", "lce3-b1024-r64", "torch-compile")],
            at_least=1.0,
        ),
    ),
)
