"""MovieLens requests against a reading of the ratings one at a time."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from movie_files import write

from ikbo_tree.demo.movielens import LIKED, MIDDLE, PRIOR, MovieLog
from ikbo_tree.demo.ratings import load

EVENTS, SHELF_EVENTS, FIRST = 6, 3, 4


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    ratings = load(write(tmp_path_factory.mktemp("movies")))
    return MovieLog(ratings, user_events=EVENTS, shelf_events=SHELF_EVENTS, first=FIRST)


@pytest.fixture(scope="module")
def made(log):
    split = log.split_time(0.3)
    return split, *log.rated_next(split)


def everything(ratings):
    """(user, movie, stars, time) of every rating, in order of time."""
    columns = (ratings.user, ratings.movie, ratings.rating, ratings.time)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def candidates(requests, request):
    """Rows of the movies below a request."""
    begin, end = requests.tree.offsets("movie", of="user")[request : request + 2].tolist()
    return range(begin, end)


def moments(log, made):
    """User, time and movies of every request: cuts redone rating by rating."""
    split, *_ = made
    found = []
    for user in range(len(log.ratings.age)):
        own = [(time, movie) for u, movie, _, time in everything(log.ratings) if u == user]
        cuts = {0}
        for at in range(1, len(own)):
            crosses = own[at - 1][0] < split <= own[at][0]
            new_second = own[at - 1][0] < own[at][0]
            # The first second that begins at or after a power of two times FIRST.
            last = max((c for c in cuts), default=0)
            due = any(last < FIRST * 2**k <= at for k in range(8))
            if crosses or (new_second and due):
                cuts.add(at)
        bounds = [*sorted(cuts), len(own)]
        for begin, end in pairwise(bounds):
            found.append((user, own[begin][0], sorted(movie for _, movie in own[begin:end])))
    return found


def test_requests_are_cut_as_described(log, made):
    _, requests, is_test = made
    expected = moments(log, made)
    movie = requests.inputs["movie"]["movie"]
    got = [
        sorted(movie[list(candidates(requests, i))].tolist())
        for i in range(requests.tree.rows("user"))
    ]
    assert got == [movies for _, _, movies in expected]
    split = made[0]
    assert is_test.tolist() == [time >= split for _, time, _ in expected]
    assert requests.tree.is_sorted


def test_every_rating_is_predicted_once(log, made):
    _, requests, _ = made
    user = [u for u, _, _ in moments(log, made)]
    of_request = requests.tree.ancestors("movie", of="user").tolist()
    pairs = [
        (user[request], movie, label)
        for request, movie, label in zip(
            of_request,
            requests.inputs["movie"]["movie"].tolist(),
            requests.labels.tolist(),
            strict=True,
        )
    ]
    assert sorted(pairs) == sorted(
        (u, m, float(stars >= LIKED)) for u, m, stars, _ in everything(log.ratings)
    )


def smoothed(stars):
    return (sum(stars) - MIDDLE * len(stars)) / (len(stars) + PRIOR)


def last_events(columns, row):
    n = int(columns["lengths"][row])
    return list(
        zip(
            columns["history_movie"][row, :n].tolist(),
            columns["history_rating"][row, :n].tolist(),
            strict=True,
        )
    )


def check_known_before(log, requests, expected):
    """Every level of every request against the ratings strictly before its time."""
    ratings = log.ratings
    shelves = requests.tree.keys("shelf")
    for request, (user, time, _) in enumerate(expected):
        earlier = [(m, int(s)) for u, m, s, t in everything(ratings) if u == user and t < time]
        columns = requests.inputs["user"]
        assert last_events(columns, request) == earlier[-EVENTS:]
        features = columns["features"][request].tolist()
        assert features[0] == pytest.approx(np.log1p(len(earlier)) / 4)
        assert features[1] == pytest.approx(smoothed([s for _, s in earlier]), abs=1e-6)
        begin, end = requests.tree.offsets("shelf", of="user")[request : request + 2].tolist()
        for row in range(begin, end):
            there = [(m, s) for m, s in earlier if ratings.shelf[m] == shelves[row]]
            columns = requests.inputs["shelf"]
            assert last_events(columns, row) == there[-SHELF_EVENTS:]
            count, share, mean = columns["features"][row].tolist()
            assert count == pytest.approx(np.log1p(len(there)) / 4)
            assert share == pytest.approx(len(there) / max(1, len(earlier)))
            assert mean == pytest.approx(smoothed([s for _, s in there]), abs=1e-6)
        for row in candidates(requests, request):
            columns = requests.inputs["movie"]
            movie = int(columns["movie"][row])
            stars = [s for _, m, s, t in everything(ratings) if m == movie and t < time]
            count, mean, _ = columns["features"][row].tolist()
            assert count == pytest.approx(np.log1p(len(stars)) / 4)
            assert mean == pytest.approx(smoothed(stars), abs=1e-6)
            shelf = int(requests.tree.parents("movie")[row])
            assert ratings.shelf[movie] == shelves[shelf]


def test_a_request_knows_what_came_before_it_and_no_more(log, made):
    check_known_before(log, made[1], moments(log, made))


def test_the_catalogue_has_every_movie_for_every_user(log):
    time = log.split_time(0.5)
    users = log.last_seen(time, 4)
    latest = [u for u, _, _, t in everything(log.ratings) if t < time]
    assert users.tolist() == sorted(set(latest), key=lambda u: latest[::-1].index(u))[:4]
    requests = log.catalogue(users, time)
    movies = range(len(log.ratings.shelf))
    for request in range(4):
        rows = list(candidates(requests, request))
        assert sorted(requests.inputs["movie"]["movie"][rows].tolist()) == list(movies)
    check_known_before(log, requests, [(int(user), time, None) for user in users])


def test_selected_requests_are_the_same_requests(log, made):
    _, requests, _ = made
    some = torch.tensor([5, 0, 7])
    few = requests.select(some)
    expected = [moments(log, made)[i] for i in some.tolist()]
    check_known_before(log, few, expected)
    rows = [row for i in some.tolist() for row in candidates(requests, i)]
    assert few.labels.tolist() == requests.labels[rows].tolist()


def test_doubles_have_the_same_integers(made):
    _, requests, _ = made
    doubles = requests.to(torch.float64)
    assert doubles.labels.dtype == doubles.inputs["user"]["features"].dtype == torch.float64
    assert doubles.inputs["user"]["lengths"].dtype == torch.int32
    assert doubles.tree is requests.tree
