"""Items that go further: attention over more levels, uneven numbers, backward, bits, a model."""

from __future__ import annotations

from reproduction.attention import KEYS, S1024
from reproduction.compression import FORMS, LCE
from reproduction.spec import Cell, Claim, Item, Panel, Ratio, over

_THREE = "attn3-u1024-v128-i8-n64-h2-d128"

ATTENTION_DEPTH = Item(
    "attention-depth",
    "beyond",
    "Attention over three and four levels",
    "Left open by the authors.",
    "Items attend to their users' and vendors' (and products') keys in one softmax. Others take a"
    " call a level and a merge, or copies.",
    (
        Panel(
            "Forward",
            "bars",
            ("attention", "attention-sweeps"),
            (
                ("3 levels,\nhistory and shop", _THREE),
                ("3 levels,\nuneven", "attn3-s512-n64-h2-d128"),
                ("4 levels", "attn4-s256-n64-h2-d128"),
            ),
            ("cudnn-broadcast", "fa4-varlen", "ikbo-triton", "ikbo-gluon"),
            field="tflops",
            label="useful TFLOP/s",
        ),
    ),
    (
        Claim(
            "Over FlashAttention-4, two calls and a merge",
            "",
            [
                over("attention", workload, "fa4-varlen")
                for workload in (_THREE, "attn3-s512-n64-h2-d128")
            ],
            at_least=1.0,
        ),
        Claim(
            "Over cuDNN on copied keys, three levels",
            "",
            [over("attention", _THREE, "cudnn-broadcast")],
            at_least=2.4,
        ),
    ),
)


def _uneven(keys: int) -> Ratio:
    even = f"attn-s{keys}-r64-n64-h2-d128"
    cells = [
        Cell("attention", workload, "ikbo-gluon", field="tflops")
        for workload in (f"{even}-uneven", even)
    ]
    return cells[0], cells[1]


UNEVEN = Item(
    "uneven",
    "beyond",
    "Uneven numbers of items",
    "Ratios are uniform in the article's comparisons.",
    "1 to 130 items a user at random, 2,048 in all, beside 64 for each; useful operations are the"
    " same. Dense calls with folded query rows cannot take them. Linear compression: 16 users with"
    " 4 to 40 vendors with 1 to 30 items each.",
    (
        Panel(
            "Attention, forward",
            "lines",
            ("attention",),
            tuple((s, f"attn-s{s}-r64-n64-h2-d128-uneven") for s in KEYS),
            ("ikbo-gluon", "ikbo-triton", "fa4-varlen", "cudnn-broadcast"),
            field="tflops",
            label="useful TFLOP/s",
            xlabel="keys a user",
            log=True,
        ),
        Panel(
            "Linear compression, three uneven levels",
            "steps",
            ("lce",),
            (("time", "lce3-uneven"),),
            FORMS,
        ),
    ),
    (
        Claim(
            "Least rate of uneven users, of that of even ones",
            "",
            [_uneven(keys) for keys in KEYS],
            at_least=0.95,
            exactly=True,
        ),
        Claim(
            "Least lead over FlashAttention-4 varlen",
            "",
            [over("attention", f"attn-s{s}-r64-n64-h2-d128-uneven", "fa4-varlen") for s in KEYS],
            at_least=1.0,
        ),
    ),
)

BACKWARD = Item(
    "backward",
    "beyond",
    "Backward",
    "The published kernels have no backward; training gains are claimed where a model is written on"
    " them.",
    "The backward alone, from a forward that is kept. Gradients of coarse rows are summed in a"
    " fixed order, which takes attention seven products where peers that add by atomics, in an"
    " order of chance, need five.",
    (
        Panel(
            "Attention",
            "lines",
            ("attention",),
            tuple((s, f"attn-s{s}-r64-n64-h2-d128") for s in KEYS),
            (
                "ikbo-gluon",
                "ikbo-triton",
                "cudnn-folded",
                "fa4-folded",
                "fa4-varlen",
                "flash-folded",
                "cudnn-broadcast",
            ),
            direction="bwd",
            field="tflops",
            label="useful TFLOP/s",
            xlabel="keys a user",
            log=True,
        ),
        Panel(
            "Linear compression",
            "bars",
            ("lce",),
            (("2 levels", LCE), ("3 levels", "lce3-b1024-r64")),
            FORMS,
            direction="bwd",
        ),
    ),
    (
        Claim(
            "Linear compression over the product of copied rows",
            "",
            [over("lce", LCE, "materialised", "bwd")],
            at_least=4.0,
        ),
        Claim(
            "Linear compression over the best form in torch",
            "",
            [over("lce", LCE, "baddbmm", "bwd")],
            at_least=1.0,
        ),
        Claim(
            "Attention over cuDNN on copied keys, 1,024 keys",
            "",
            [over("attention", S1024, "cudnn-broadcast", "bwd")],
            at_least=6.4,
        ),
        Claim(
            "Attention over FlashAttention-4 folded, least",
            "",
            [over("attention", f"attn-s{s}-r64-n64-h2-d128", "fa4-folded", "bwd") for s in KEYS],
            at_least=1.0,
        ),
    ),
)

_INVARIANT = (
    ("linear", "inv-linear"),
    ("linear compression", "inv-lce"),
    ("attention", "inv-attn"),
)

INVARIANCE = Item(
    "invariance",
    "beyond",
    "The same bits in any batch",
    "Not claimed.",
    "A user with 64 items is computed alone and at the first, middle and last place among 2, 5, 16"
    " and 32 users. Plotted: results whose bits are not those that they have alone. BLAS libraries"
    " choose kernels by numbers of rows; this package's tiles follow from widths and dtypes alone.",
    (
        Panel(
            "Results with other bits than alone",
            "bars",
            ("invariance",),
            _INVARIANT,
            (
                "flat",
                "decomposed",
                "flat-cudnn",
                "folded-cudnn",
                "ikbo-torch",
                "ikbo-triton",
                "ikbo-gluon",
            ),
            field="percent",
            label="% of all results",
        ),
    ),
    tuple(
        Claim(
            f"Results of {who} with other bits than alone",
            "",
            [
                (Cell("invariance", f"inv-{op}", who, field="differing"), None)
                for op in ("linear", "lce", "attn")
            ],
            pick="most",
            at_most=0,
            unit="",
        )
        for who in ("ikbo-gluon", "ikbo-triton")
    ),
)

_WAYS = ("system-broadcast", "flat", "roo-split", "level-split", "rewritten")
_MODEL = "model-ads-r64"


def _model(slow: str, fast: str, dtype: str) -> Ratio:
    cells = [Cell("whole-model", _MODEL, who, dtype=dtype) for who in (slow, fast)]
    return cells[0], cells[1]


MODEL = Item(
    "whole-model",
    "beyond",
    "A whole model: copies, network split, tree",
    "Up to two thirds off the latency of compute-heavy networks; compared in words with copies made"
    " before the GPU and with splitting the network (ROO), which restricts where interactions"
    " happen.",
    "A ranker over users, advertisers and ads with towers, attention to histories and catalogues"
    " and an interaction of all (frozen widths of the model zoo), inference, 1,024 ads, 64 a user."
    " The splits run each network at its own rows and copy what comes out, keys and values"
    " included, before the first interaction; the rewritten model is the unchanged one after"
    " `ikbo_tree.rewrite`.",
    tuple(
        Panel(
            dtype,
            "steps",
            ("whole-model",),
            (("time", _MODEL),),
            (*_WAYS, *(f"{who}-compiled" for who in _WAYS)),
            dtype=dtype,
        )
        for dtype in ("float32", "bfloat16")
    ),
    tuple(
        Claim(
            f"Rewritten over {other}, {dtype}{', both compiled' if end else ''}",
            article,
            [_model(other + end, f"rewritten{end}", dtype)],
            at_least=least,
        )
        for dtype in ("float32", "bfloat16")
        for end in ("", "-compiled")
        for other, article, least in (
            ("system-broadcast", "up to 3x", 3.0),
            ("roo-split", "", 1.0),
            ("level-split", "", 1.0),
        )
    ),
)
