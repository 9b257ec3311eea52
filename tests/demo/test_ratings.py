"""Finding and reading the data; every failure is a sentence."""

import subprocess
import zipfile

import numpy as np
import pytest
from movie_files import write

from ikbo_tree.demo import ratings as module
from ikbo_tree.demo.ratings import DataError, load


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "made")


def test_what_is_read(folder):
    ratings = load(folder)
    lines = [line.split("\t") for line in (folder / "made.inter").read_text().split("\n")[1:-1]]
    lines.sort(key=lambda line: float(line[3]))
    assert [int(line[0]) - 1 for line in lines] == ratings.user.tolist()
    assert [int(line[1]) - 1 for line in lines] == ratings.movie.tolist()
    assert [float(line[2]) for line in lines] == ratings.rating.tolist()
    assert (np.diff(ratings.time) >= 0).all()
    items = [line.split("\t") for line in (folder / "made.item").read_text().split("\n")[1:-1]]
    for movie, (_, title, year, genres) in enumerate(items):
        assert title == f'"A" film, {movie}'
        assert ratings.shelves[ratings.shelf[movie]] == genres.split(" ")[0]
        assert {ratings.shelves[i] for i in np.flatnonzero(ratings.genres[movie])} == set(
            genres.split(" ")
        )
        if year.isdecimal():
            assert ratings.year[movie] == float(year)
    known = [float(year) for _, _, year, _ in items if year.isdecimal()]
    assert ratings.year[3] == pytest.approx(np.mean(known))
    assert ratings.genders == 2
    assert ratings.occupations == 3
    assert ratings.age.tolist() == [20.0 + user for user in range(12)]


def test_folder_file_and_wheel_are_the_same(folder, tmp_path):
    wheel = tmp_path / "recbole-1.2.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for kind in ("inter", "item", "user"):
            archive.write(folder / f"made.{kind}", f"{module.INSIDE}.{kind}")
    (folder / "other.inter").write_text((folder / "made.inter").read_text())
    found = [load(folder / "other.inter"), load(wheel), load(None, cache=tmp_path)]
    (folder / "other.inter").unlink()
    for ratings in found:
        assert all(
            np.array_equal(getattr(ratings, name), getattr(load(folder), name))
            for name in ("user", "movie", "rating", "time", "genres", "year", "age")
        )


def test_without_a_network_one_sentence_says_what_to_do(tmp_path, monkeypatch):
    def offline(command, **kwargs):
        assert command[1:4] == ["-m", "pip", "download"]
        assert "--no-deps" in command
        assert "recbole==1.2.1" in command
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution\n")

    monkeypatch.setattr(module.subprocess, "run", offline)
    with pytest.raises(DataError, match=r"No matching distribution.*--data"):
        load(None, cache=tmp_path / "empty")


def edited(folder, kind, change):
    path = folder / f"made.{kind}"
    path.write_text(change(path.read_text()))
    return folder


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: f / "nowhere", "nowhere does not exist"),
        (lambda f: (f / "made.item").unlink() or f, "must hold one .item file; found none"),
        (
            lambda f: (f / "b.user").write_text("x") and f,
            "must hold one .user file; found b.user, made.user",
        ),
        (
            lambda f: edited(f, "inter", lambda t: t.replace("rating:float", "stars:float", 1)),
            r"\(.inter\) lacks the columns rating",
        ),
        (lambda f: edited(f, "user", lambda t: t + "13\t40\n"), "line 14: 2 columns instead of 5"),
        (
            lambda f: edited(f, "inter", lambda t: t + "99\t1\t5\t881250000\n"),
            "names user 99, which the .user file lacks",
        ),
        (
            lambda f: edited(f, "inter", lambda t: t.replace("\t881250", "\tnoon", 1)),
            r"\(.inter\).*timestamp.*noon",
        ),
        (lambda f: edited(f, "inter", lambda t: t.split("\n")[0] + "\n"), "has no ratings"),
    ],
)
def test_errors_name_the_file_and_what_is_wrong(folder, spoil, message):
    with pytest.raises(DataError, match=message):
        load(spoil(folder))


def test_another_wheel_is_refused(tmp_path):
    wheel = tmp_path / "other-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other/__init__.py", "")
    with pytest.raises(DataError, match=r"has no .*ml-100k\.inter; use recbole==1\.2\.1"):
        load(wheel)
    wheel.write_text("no archive")
    with pytest.raises(DataError, match="no wheel"):
        load(wheel)
