"""MovieLens ratings as requests over user -> genre shelf -> movie.

A request is a user at a point in time; its history is what the user rated strictly before, its
candidates are the movies that the user rates next, grouped by shelf (a movie's first genre), and a
label says whether the rating is 4 or 5. A user's ratings, in order of time, are cut into requests
before the 17th, 33rd, 65th, 129th, ... rating, and at the moment that divides training from test;
ratings of one second are never cut apart. So every rating is predicted once, from what was known
when its request began, and fan-outs are as uneven as the data: first requests have no history,
many shelves have one movie, some hundreds.

What a row knows was known when its request began:

    user    age, gender, occupation; number and mean of the earlier ratings; history: the latest
    shelf   the genre; number, share and mean of the user's earlier ratings there; history: the
            latest of them
    movie   the movie, its genres and year; number and mean of everybody's earlier ratings
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

import ikbo_tree as ikbo
from ikbo_tree.demo.ratings import Ratings

LIKED = 4.0
"""Least rating with label 1."""
MIDDLE = 3.5
"""What a mean rating is drawn to while there are few: near the mean of all."""
PRIOR = 5.0
"""Ratings at `MIDDLE` that every mean starts from."""

Columns = dict[str, Tensor]


@dataclass(frozen=True)
class MovieRequests:
    """Requests with what every level knows: `columns[level][name]` has a row for each of its rows.

    Columns, by level ("history" ones are [rows, events], the latest event last, with `lengths`):

        user    features, gender, occupation, history_movie, history_rating, lengths
        shelf   features, shelf, history_movie, history_rating, lengths
        movie   features, movie
    """

    tree: ikbo.BroadcastTree
    inputs: dict[str, Columns]
    labels: Tensor

    def select(self, requests: Tensor) -> MovieRequests:
        """Some of the requests, in the given order."""
        tree = self.tree.select(user=requests)
        origin = {level: tree.origin(level).long() for level in tree.levels}
        inputs = {
            level: {name: x[origin[level]] for name, x in columns.items()}
            for level, columns in self.inputs.items()
        }
        return MovieRequests(tree, inputs, self.labels[origin["movie"]])

    def to(self, to: torch.dtype | torch.device) -> MovieRequests:
        """The same in another float dtype, or on another device."""

        def moved(x: Tensor) -> Tensor:
            return x.to(to) if isinstance(to, torch.device) or x.is_floating_point() else x

        inputs = {
            level: {name: moved(x) for name, x in columns.items()}
            for level, columns in self.inputs.items()
        }
        tree = self.tree.to(to) if isinstance(to, torch.device) else self.tree
        return replace(self, tree=tree, inputs=inputs, labels=moved(self.labels))


class MovieLog:
    """The ratings sorted for questions about what was known when.

    Args:
        ratings: what was rated.
        user_events: longest history of a user.
        shelf_events: longest history of a shelf.
        first: ratings in a user's first request.
    """

    def __init__(
        self, ratings: Ratings, *, user_events: int = 64, shelf_events: int = 16, first: int = 16
    ) -> None:
        self.ratings = ratings
        self.user_events, self.shelf_events, self.first = user_events, shelf_events, first
        # By user, then time; `ratings` is in order of time already.
        order = np.argsort(ratings.user, kind="stable")
        self._user, self._movie = ratings.user[order], ratings.movie[order]
        self._rating, self._time = ratings.rating[order], ratings.time[order]
        users = np.arange(len(ratings.age) + 1)
        self._user_begin = np.searchsorted(self._user, users)
        self._rating_sum = _running_sum(self._rating)
        # By user and shelf, then time.
        shelf = self._pair(self._user, ratings.shelf[self._movie])
        self._by_shelf = np.argsort(shelf, kind="stable")
        self._shelf_key = shelf[self._by_shelf] * len(order) + self._by_shelf
        self._shelf_sum = _running_sum(self._rating[self._by_shelf])
        # By movie, then time.
        by_movie = np.argsort(ratings.movie, kind="stable")
        self._movie_key = self._moment(ratings.movie[by_movie], ratings.time[by_movie])
        self._movie_sum = _running_sum(ratings.rating[by_movie])

    def split_time(self, test_share: float) -> int:
        """The second that leaves so much of all ratings to the test."""
        return int(np.quantile(self.ratings.time, 1 - test_share, method="nearest"))

    def last_seen(self, time: int, count: int) -> np.ndarray:
        """The `count` users who rated something last before `time`, latest first."""
        before = self.ratings.user[self.ratings.time < time][::-1]
        users, place = np.unique(before, return_index=True)
        latest: np.ndarray = users[np.argsort(place)][:count]
        return latest

    def rated_next(self, split: int) -> tuple[MovieRequests, Tensor]:
        """All requests for what users rated next, and which of them [requests] are the test's."""
        place = np.arange(len(self._user)) - self._user_begin[self._user]
        new_second = np.ones(len(place), bool)
        new_second[1:] = (np.diff(self._user) != 0) | (np.diff(self._time) != 0)
        # The place of the first rating of the same user and second: ties are never cut apart.
        tied = np.maximum.accumulate(np.where(new_second, np.arange(len(place)), 0))
        page = np.searchsorted(self.first << np.arange(32), place[tied], side="right")
        late = self._time >= split
        changed = np.ones(len(place), bool)
        changed[1:] = (np.diff(self._user) != 0) | (np.diff(page) != 0) | (np.diff(late) != 0)
        start = np.flatnonzero(changed)
        request = np.cumsum(changed) - 1
        labels = self._rating >= LIKED
        made = self._requests(start, self._user[start], self._time[start], request, self._movie)
        order = _grouped(request, self.ratings.shelf[self._movie])
        labelled = replace(made, labels=torch.from_numpy(labels[order]).float())
        return labelled, torch.from_numpy(late[start])

    def catalogue(self, users: np.ndarray, time: int) -> MovieRequests:
        """Every movie as a candidate for each of `users` at a point in time; labels are zero."""
        begin, end = self._user_begin[users], self._user_begin[users + 1]
        start = [
            b + np.searchsorted(self._time[b:e], time) for b, e in zip(begin, end, strict=True)
        ]
        movies = len(self.ratings.shelf)
        return self._requests(
            np.array(start, np.int64),
            users,
            np.full(len(users), time),
            np.repeat(np.arange(len(users)), movies),
            np.tile(np.arange(movies), len(users)),
        )

    def _requests(
        self,
        start: np.ndarray,
        user: np.ndarray,
        time: np.ndarray,
        request: np.ndarray,
        movie: np.ndarray,
    ) -> MovieRequests:
        """Requests of users at points in time.

        Args:
            start: [requests] where the user's ratings from then on begin in this log.
            user: [requests].
            time: [requests].
            request: [candidates] the request of each candidate.
            movie: [candidates].
        """
        order = _grouped(request, self.ratings.shelf[movie])
        request, movie = request[order], movie[order]
        shelf = self.ratings.shelf[movie]
        tree = ikbo.BroadcastTree.from_keys(
            {"user": request, "shelf": shelf, "movie": movie}, rows={"user": np.arange(len(start))}
        )
        of_shelf = tree.ancestors("shelf", of="user").numpy()
        inputs = {
            "user": self._user_columns(user, start),
            "shelf": self._shelf_columns(user[of_shelf], tree.keys("shelf"), start[of_shelf]),
            "movie": self._movie_columns(movie, time[request]),
        }
        tensors = {
            level: {name: torch.from_numpy(x) for name, x in columns.items()}
            for level, columns in inputs.items()
        }
        return MovieRequests(tree, tensors, torch.zeros(len(movie)))

    def _user_columns(self, user: np.ndarray, start: np.ndarray) -> dict[str, np.ndarray]:
        ratings, begin = self.ratings, self._user_begin[user]
        features = [
            np.log1p(start - begin) / 4,
            _mean_above_middle(self._rating_sum, begin, start),
            ratings.age[user] / 40 - 1,
        ]
        return {
            "features": np.stack(features, 1).astype(np.float32),
            "gender": ratings.gender[user],
            "occupation": ratings.occupation[user],
            **self._history(np.arange(len(self._user)), begin, start, self.user_events),
        }

    def _shelf_columns(
        self, user: np.ndarray, shelf: np.ndarray, start: np.ndarray
    ) -> dict[str, np.ndarray]:
        key = self._pair(user, shelf) * len(self._user)
        begin = np.searchsorted(self._shelf_key, key)
        end = np.searchsorted(self._shelf_key, key + start)
        earlier = start - self._user_begin[user]
        features = [
            np.log1p(end - begin) / 4,
            (end - begin) / np.maximum(earlier, 1),
            _mean_above_middle(self._shelf_sum, begin, end),
        ]
        return {
            "features": np.stack(features, 1).astype(np.float32),
            "shelf": shelf.astype(np.int64),
            **self._history(self._by_shelf, begin, end, self.shelf_events),
        }

    def _movie_columns(self, movie: np.ndarray, time: np.ndarray) -> dict[str, np.ndarray]:
        ratings = self.ratings
        begin = np.searchsorted(self._movie_key, self._moment(movie, ratings.time[0]))
        end = np.searchsorted(self._movie_key, self._moment(movie, time))
        features = [
            np.log1p(end - begin) / 4,
            _mean_above_middle(self._movie_sum, begin, end),
            (ratings.year[movie] - 1990) / 10,
        ]
        return {
            "features": np.stack(features, 1).astype(np.float32),
            "movie": movie.astype(np.int64),
        }

    def _history(
        self, log: np.ndarray, begin: np.ndarray, end: np.ndarray, events: int
    ) -> dict[str, np.ndarray]:
        """The latest `events` of `log[begin:end]`, padded at the end."""
        begin = np.maximum(begin, end - events)
        at = np.minimum(begin[:, None] + np.arange(events), len(log) - 1)
        real = np.arange(events) < (end - begin)[:, None]
        event = log[at]
        return {
            "history_movie": np.where(real, self._movie[event], 0),
            "history_rating": np.where(real, self._rating[event], 0).astype(np.int64),
            "lengths": (end - begin).astype(np.int32),
        }

    def _pair(self, user: np.ndarray, shelf: np.ndarray) -> np.ndarray:
        pair: np.ndarray = user * len(self.ratings.shelves) + shelf
        return pair

    def _moment(self, movie: np.ndarray, time: np.ndarray | int) -> np.ndarray:
        """Movie and second as one number that sorts by both."""
        first, last = int(self.ratings.time[0]), int(self.ratings.time[-1])
        moment: np.ndarray = movie * (last - first + 2) + (time - first)
        return moment


def _grouped(request: np.ndarray, shelf: np.ndarray) -> np.ndarray:
    """The order of candidates by request, then shelf."""
    order: np.ndarray = np.lexsort((shelf, request))
    return order


def _running_sum(rating: np.ndarray) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(rating, dtype=np.float64)])


def _mean_above_middle(total: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Smoothed mean of the ratings begin .. end, less `MIDDLE`, from their running sum."""
    n = end - begin
    mean: np.ndarray = (total[end] - total[begin] - MIDDLE * n) / (n + PRIOR)
    return mean
