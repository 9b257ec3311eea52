"""Micro-models, one op or one idiom each, that test the rewriting of models."""

from __future__ import annotations

from rewrite_cases import (
    attention,
    concatenations,
    elementwise,
    embeddings,
    gathers,
    matmuls,
    mixing,
    reductions,
    traps,
    views,
)
from rewrite_cases.case import Case

THEMES = (
    elementwise,
    reductions,
    views,
    matmuls,
    concatenations,
    attention,
    embeddings,
    gathers,
    mixing,
    traps,
)


def all_cases() -> list[Case]:
    """Every case, file by file."""
    return [case for theme in THEMES for case in theme.CASES]
