"""Items of attention, after the article's third section: peers, lengths, numbers, query rows."""

from __future__ import annotations

from reproduction.spec import Cell, Claim, Item, Panel, Ratio, over

KEYS = (512, 1024, 2048, 4096)
S1024 = "attn-s1024-r64-n64-h2-d128"


def _attention(slow: str, fast: str, workload: str, topic: str = "attention") -> Ratio:
    return Cell(topic, workload, slow), Cell(topic, workload, fast)


def _self(keys: int) -> Ratio:
    workload = f"self-s{keys}-r64-n64-h2-d128"
    return _attention("two-launches", "ikbo-gluon", workload, "self-attention")


COMPARISON = Item(
    "attention-comparison",
    "article",
    "Attention beside kernels that know nothing of trees",
    "2,048 candidates, 64 a user, 64 query rows each, 2 heads of width 128, 1,024 keys: 2.4x the"
    " throughput of FlashAttention-4 on copied keys, 6.4x with the copies counted, which take"
    " longer than the attention.",
    "The same shape. `-copied` is a kernel alone with copies given, `-broadcast` with the copies"
    " counted. Both are also asked the better way, query rows folded by hand into one sequence a"
    " user, which only works for attention without a mask (and, dense, for as many items a user).",
    (
        Panel(
            "1,024 keys, forward",
            "steps",
            ("attention-sweeps", "attention"),
            (("rate", S1024),),
            (
                "fa4-broadcast",
                "cudnn-broadcast",
                "fa4-copied",
                "cudnn-copied",
                "flash-folded",
                "ikbo-triton",
                "fa4-varlen",
                "fa4-folded",
                "cudnn-folded",
                "ikbo-gluon",
            ),
            field="tflops",
            label="useful TFLOP/s",
        ),
        Panel(
            "Beside the published kernels (another run)",
            "steps",
            ("attention-published",),
            (("rate", S1024),),
            (
                "cudnn-broadcast",
                "flash-folded",
                "published-triton",
                "published-tlx",
                "cudnn-folded",
                "ikbo-triton",
            ),
            field="tflops",
            label="useful TFLOP/s",
        ),
    ),
    (
        Claim(
            "Over FlashAttention-4 alone on copied keys",
            "2.4x",
            [_attention("fa4-copied", "ikbo-gluon", S1024, "attention-sweeps")],
            at_least=2.4,
        ),
        Claim(
            "Over FlashAttention-4 with the copies counted",
            "6.4x",
            [_attention("fa4-broadcast", "ikbo-gluon", S1024, "attention-sweeps")],
            at_least=6.4,
        ),
        Claim(
            "Over cuDNN alone on copied keys",
            "",
            [_attention("cudnn-copied", "ikbo-gluon", S1024, "attention-sweeps")],
            at_least=2.4,
        ),
        Claim(
            "Over cuDNN with the copies counted",
            "6.4x, of FlashAttention-4",
            [_attention("cudnn-broadcast", "ikbo-gluon", S1024)],
            at_least=6.4,
        ),
        Claim(
            "Over cuDNN with query rows folded by hand",
            "",
            [_attention("cudnn-folded", "ikbo-gluon", S1024)],
            at_least=1.0,
        ),
    ),
)

_LENGTHS = tuple((s, f"attn-s{s}-r64-n64-h2-d128") for s in (*KEYS, 8192, 16384))

LENGTHS = Item(
    "attention-lengths",
    "article",
    "Attention over sequence length",
    "2,048 candidates, 64 a user: the persistent kernel leads from 512 to 4,096 keys, its variants"
    " meet beyond 8,192, and it reaches 621 TFLOP/s.",
    "The same lengths; each from 8,192 on, and those of the published kernels, from another run"
    " than the rest.",
    (
        Panel(
            "Forward",
            "lines",
            ("attention", "attention-sweeps", "attention-published"),
            _LENGTHS,
            (
                "ikbo-gluon",
                "ikbo-triton",
                "published-tlx",
                "published-triton",
                "cudnn-folded",
                "fa4-folded",
                "fa4-varlen",
                "flash-folded",
                "cudnn-broadcast",
            ),
            field="tflops",
            label="useful TFLOP/s",
            xlabel="keys a user",
            log=True,
        ),
    ),
    (
        Claim(
            "Most, up to 4,096 keys",
            "621 TFLOP/s",
            [
                (Cell("attention", w, "ikbo-gluon", field="tflops"), None)
                for _, w in _LENGTHS[: len(KEYS)]
            ],
            pick="most",
            at_least=621,
            unit=" TFLOP/s",
        ),
        Claim(
            "The published kernel on this card",
            "621 TFLOP/s",
            [
                (Cell("attention-published", w, "published-tlx", field="tflops"), None)
                for _, w in _LENGTHS[: len(KEYS)]
            ],
            pick="most",
            at_least=621,
            unit=" TFLOP/s",
        ),
        Claim(
            "Least lead over cuDNN folded",
            "",
            [_attention("cudnn-folded", "ikbo-gluon", w) for _, w in _LENGTHS[: len(KEYS)]],
            at_least=1.0,
        ),
        Claim(
            "Least lead over FlashAttention-4 folded",
            "",
            [_attention("fa4-folded", "ikbo-gluon", w) for _, w in _LENGTHS[: len(KEYS)]],
            at_least=1.0,
        ),
    ),
)

_ODD = (
    ("64", S1024),
    ("63", "attn-s1024-r63-n64-h2-d128"),
    ("65", "attn-s1024-r65-n64-h2-d128"),
    ("63, 64, 65", f"{S1024}-odd-even"),
    ("1", "attn-s1024-r1-n64-h2-d128"),
)


def _rate(workload: str, even: str) -> Ratio:
    cells = [
        Cell("attention-sweeps", name, "ikbo-gluon", field="tflops") for name in (workload, even)
    ]
    return cells[0], cells[1]


ODD = Item(
    "attention-odd",
    "article",
    "Attention with odd numbers of candidates",
    "Where a block takes two candidates of one user, an odd one out leaves half a block idle: under"
    " 0.7 % of tiles at 70 a user, negligible in the throughput (half of the users odd).",
    "Odd, even and mixed numbers at 1,024 keys. This package's tiles are runs of query rows of one"
    " user, so that a number of items is never odd to it; with one item a user nothing is shared.",
    (
        Panel(
            "1,024 keys, about 2,048 items, forward",
            "bars",
            ("attention-sweeps",),
            _ODD,
            ("ikbo-gluon", "ikbo-triton", "cudnn-folded", "fa4-varlen", "cudnn-broadcast"),
            field="tflops",
            label="useful TFLOP/s",
            xlabel="items a user",
        ),
    ),
    (
        Claim(
            "Rate at 63, 64 and 65 a user, mixed, of that at 64",
            "negligible loss",
            [_rate(f"{S1024}-odd-even", S1024)],
            at_least=0.97,
            exactly=True,
        ),
        Claim(
            "Rate at 63 a user of that at 64",
            "",
            [_rate("attn-s1024-r63-n64-h2-d128", S1024)],
            at_least=0.95,
            exactly=True,
        ),
    ),
)

SELF = Item(
    "self-target",
    "article",
    "Self-attention and target attention in one launch",
    "One launch for a history's own attention and that of its candidates gains 6.6 % at 512 keys,"
    " 4.1 % at 1,024 and 0.3 % at 2,048, the saved projections not counted.",
    "`self_target_attention` beside two launches, cuDNN for the history and this package's kernel"
    " for the candidates; full and causal histories.",
    tuple(
        Panel(
            title,
            "lines",
            ("self-attention",),
            tuple((s, f"self-s{s}-r64-n64-h2-d128{end}") for s in KEYS),
            ("ikbo-gluon", "ikbo-triton", "two-launches"),
            field="tflops",
            label="useful TFLOP/s",
            xlabel="keys a user",
            log=True,
        )
        for title, end in (("Full history", ""), ("Causal history", "-causal"))
    ),
    tuple(
        Claim(
            f"Gain at {keys:,} keys",
            f"{gain:.1%}".replace("%", " %"),
            [_self(keys)],
            at_least=1 + gain,
        )
        for keys, gain in ((512, 0.066), (1024, 0.041), (2048, 0.003))
    ),
)

_ROWS = (1, 5, 16, 32, 64, 65)

QUERY_ROWS = Item(
    "query-rows",
    "beyond",
    "Attention over query rows a candidate",
    "32 or 64 query rows a candidate; at 32 a block takes four candidates.",
    "1,024 keys, 64 items a user, 1 to 65 query rows an item. One row (as in DIN) is bound by"
    " memory at this ratio: the arithmetic is 64 operations a byte of keys.",
    (
        Panel(
            "Forward",
            "bars",
            ("attention-sweeps",),
            tuple((str(n), f"attn-s1024-r64-n{n}-h2-d128") for n in _ROWS),
            (
                "ikbo-gluon",
                "ikbo-triton",
                "cudnn-folded",
                "fa4-folded",
                "fa4-varlen",
                "cudnn-broadcast",
            ),
            field="tflops",
            label="useful TFLOP/s",
            xlabel="query rows an item",
        ),
        Panel(
            "One row an item: bytes moved",
            "bars",
            ("attention",),
            (
                ("2,048 users,\n512 keys", "attn-s512-r64-n1-h2-d128"),
                ("2,048 users,\n2,048 keys", "attn-s2048-r64-n1-h2-d128"),
            ),
            ("ikbo-gluon", "ikbo-triton", "cudnn-folded", "fa4-folded", "fa4-varlen"),
            field="gbps",
            label="GB/s",
        ),
    ),
    (
        Claim(
            "Least lead over FlashAttention-4 varlen",
            "",
            [over("attention-sweeps", f"attn-s1024-r64-n{n}-h2-d128", "fa4-varlen") for n in _ROWS],
            at_least=1.0,
        ),
        Claim(
            "Least lead over cuDNN folded",
            "",
            [
                over("attention-sweeps", f"attn-s1024-r64-n{n}-h2-d128", "cudnn-folded")
                for n in _ROWS
            ],
            at_least=1.0,
        ),
    ),
)
