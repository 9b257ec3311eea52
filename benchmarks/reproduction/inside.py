"""Items of the article that look inside: rooflines, counters, clocks, single techniques, errors."""

from __future__ import annotations

from itertools import product

from reproduction.compression import LCE
from reproduction.spec import Cell, Claim, Intensity, Item, Panel, Ratio

ROOFLINE = Item(
    "roofline",
    "article",
    "Where the forms lie below the roofline",
    "One product of copied rows: 356 FLOP/B. Attention over 1,024 keys with 64 query rows a"
    " candidate: 60 FLOP/B on copied keys and 833 with keys shared in the kernel, 70 candidates a"
    " user; the H100's ridge is at 495 FLOP/B, so sharing turns a memory-bound op into a"
    " compute-bound one.",
    "Operations and bytes are counted (ikbo_tree.analysis): every tensor read or written once,"
    " partial results and copies included where a form makes them. Times are measured. The roof has"
    " the copy bandwidth and matrix rate of the same run. Hollow marks have the bytes that Nsight"
    " Compute counted, where counters were read.",
    (
        Panel(
            "Linear compression and attention, forward",
            "roofline",
            ("lce", "attention", "attention-sweeps", "counters"),
            (),
            label="TFLOP/s",
            xlabel="operations a byte of memory, FLOP/B",
        ),
    ),
    (
        Claim(
            "Product of copied rows, operations a byte",
            "356 FLOP/B",
            [(Intensity(LCE, "op"), None)],
            near=356,
            unit=" FLOP/B",
        ),
        Claim(
            "Attention on copied keys, 70 a user",
            "60 FLOP/B",
            [(Intensity("attn-s1024-r70-n64-h2-d128", "op"), None)],
            near=60,
            unit=" FLOP/B",
        ),
        Claim(
            "Attention on shared keys, 70 a user",
            "833 FLOP/B",
            [(Intensity("attn-s1024-r70-n64-h2-d128", "tree"), None)],
            near=833,
            unit=" FLOP/B",
        ),
    ),
)

_COUNTERS = f"{LCE}-p16"

COUNTERS = Item(
    "counters",
    "article",
    "What the hardware counted",
    "Fused kernel: 6.25 % of warps resident, DRAM at 39 % and L2 at 74 % of their peaks. One"
    " warp-specialised launch: 18.75 %, 52 % and 84 %. Product with K not padded: 351 million"
    " L1 sectors, none when padded.",
    "Nsight Compute on this package's Gluon kernels and on cuBLAS' product of the finest level.",
    (Panel("Counters", "records", ("counters",), (), direction=None),),
    tuple(
        Claim(
            text,
            article,
            [(Cell("counters", _COUNTERS, "stages_kernel", None, field), None)],
            at_least=least,
            unit=" %",
        )
        for text, article, field, least in (
            ("Warps resident, beyond one warpgroup's", "6.25 to 18.75 %", "warps_pct", 6.25),
            ("L2 throughput, beyond the fused kernel's", "74 to 84 %", "l2_pct", 74),
        )
    ),
)

TIMELINE = Item(
    "timeline",
    "article",
    "What the warpgroups do, by the clock",
    "Traces of single warps: loads beside products, products beside epilogues, and the coarse level"
    " beside the fine one; in attention the wait between tiles, which persistence removes.",
    "Clock reads inside of the Gluon kernels: how long each phase takes, and how much of it has the"
    " other warpgroup's products beside it. docs/kernels shows the pictures.",
    (Panel("Phases of consumers, cycles", "records", ("timeline",), (), direction=None),),
)

ABLATION = Item(
    "ablation",
    "article",
    "What each technique buys",
    "Persistence is what attention gains most by; the balance of dispatch order, double buffers for"
    " queries and results, and overlaps of load, product and epilogue.",
    "The shipped kernels with one technique switched off at a time, same results.",
    (Panel("Variants", "records", ("ablation",), (), direction=None),),
)

_NUM = (10, 100, 1000, 10_000)
_OPS = {"linear": "linear", "lce": "linear compression", "attn": "attention"}
_FORMS = ("rounded", "flat", "decomposed", "ikbo-gluon-p16", "ikbo-gluon", "ikbo-triton")


def _errors(direction: str, dtype: str) -> list[Ratio]:
    """Of the flat form over this package's, for all ops and ratios."""
    found: list[Ratio] = []
    for op, ratio in product(_OPS, _NUM):
        flat, ours = (
            Cell("numerics", f"num-{op}-r{ratio}", who, direction, "rms", dtype)
            for who in ("flat", "ikbo-gluon")
        )
        found.append((flat, ours))
    return found


NUMERICS = Item(
    "numerics",
    "article",
    "Errors at ratios from 10 to 10,000",
    "Validated from 10 to 10,000 candidates a user. Decomposition adds partial results in 16 bits;"
    " partial sums in float32 to the end where exactness against the unsplit form matters.",
    "Root mean square error against float64 of 10,000 items' results, and of the gradient that"
    " users sum over their items, relative to the values' own root mean square; float16 in the"
    " plots, both dtypes below. `rounded` is the float64 value rounded once.",
    tuple(
        Panel(
            f"{name}, {words}",
            "lines",
            ("numerics",),
            tuple((r, f"num-{op}-r{r}") for r in _NUM),
            _FORMS,
            direction=direction,
            dtype="float16",
            field="rms",
            label="relative error, millionths",
            xlabel="items a user",
            log=True,
        )
        for direction, words in (("fwd", "result"), ("bwd", "users' gradient"))
        for op, name in _OPS.items()
    ),
    tuple(
        Claim(
            f"Flat form's error over this package's, {words}, {dtype}; the least",
            "exact" if direction == "fwd" else "",
            _errors(direction, dtype),
            at_least=0.97,
            exactly=True,
        )
        for dtype in ("float16", "bfloat16")
        for direction, words in (("fwd", "results"), ("bwd", "gradients"))
    ),
)
