"""The movie model: embeddings of each level at its own size, in front of a ranker."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

import ikbo_tree as ikbo
from ikbo_tree.demo.movielens import Columns
from ikbo_tree.demo.ranker import LevelInputs, LevelSizes, Ranker, RankerSizes
from ikbo_tree.demo.ratings import Ratings

SIZES = RankerSizes(
    levels={
        "user": LevelSizes(features=3, tokens=2, history=True),
        "shelf": LevelSizes(features=3, tokens=1, history=True),
        "movie": LevelSizes(features=3, tokens=2),
    }
)
STARS = 6
"""Rows of the table of rating embeddings: 1 to 5, and 0 for padding."""


class MovieRanker(nn.Module):
    """Embeds users, shelves, movies and histories, and ranks.

    Args:
        ranker: `FlatRanker` or `TreeRanker`; the parameters are the same for both.
        ratings: how many of everything there are, and the movies' genres.
        sizes: of the ranker.
    """

    genres: Tensor

    def __init__(self, ranker: type[Ranker], ratings: Ratings, sizes: RankerSizes = SIZES) -> None:
        super().__init__()
        width = sizes.width
        self.register_buffer("genres", torch.from_numpy(ratings.genres), persistent=False)
        self.movie = nn.Embedding(len(ratings.shelf), width)
        self.genre = nn.Linear(len(ratings.shelves), width, bias=False)
        self.stars = nn.Embedding(STARS, width)
        self.shelf = nn.Embedding(len(ratings.shelves), width)
        self.gender = nn.Embedding(ratings.genders, width)
        self.occupation = nn.Embedding(ratings.occupations, width)
        for embedding in self.children():
            if isinstance(embedding, nn.Embedding):
                nn.init.normal_(embedding.weight, std=width**-0.5)
        self.ranker = ranker(sizes)

    def forward(self, tree: ikbo.BroadcastTree, columns: Mapping[str, Columns]) -> Tensor:
        """Scores [candidates] from the columns of `MovieRequests`."""
        user, shelf, movie = columns["user"], columns["shelf"], columns["movie"]
        scores: Tensor = self.ranker(
            tree,
            {
                "user": LevelInputs(
                    user["features"],
                    _tokens(self.gender(user["gender"]), self.occupation(user["occupation"])),
                    *self._history(user),
                ),
                "shelf": LevelInputs(
                    shelf["features"], _tokens(self.shelf(shelf["shelf"])), *self._history(shelf)
                ),
                "movie": LevelInputs(
                    movie["features"],
                    _tokens(self.movie(movie["movie"]), self.genre(self.genres[movie["movie"]])),
                ),
            },
        )
        return scores

    def _history(self, columns: Columns) -> tuple[Tensor, Tensor]:
        """Embedded events [rows, S, width] and their lengths."""
        movie = columns["history_movie"]
        events = self.movie(movie) + self.stars(columns["history_rating"])
        return events + self.genre(self.genres)[movie], columns["lengths"]


def _tokens(*tokens: Tensor) -> Tensor:
    """[rows, T, width] from T tensors [rows, width]."""
    return torch.stack(tokens, dim=1)
