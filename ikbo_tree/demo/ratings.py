"""MovieLens-100K as the PyPI wheel of RecBole carries it: found, fetched, read; never installed.

The files are tables with tabs between columns and a `name:type` header:

    ml-100k.inter    user_id:token  item_id:token  rating:float  timestamp:float
    ml-100k.item     item_id:token  movie_title:token_seq  release_year:token  class:token_seq
    ml-100k.user     user_id:token  age:token  gender:token  occupation:token  zip_code:token

The data set is GroupLens' (F. M. Harper and J. A. Konstan, "The MovieLens Datasets", 2015); see its
terms of use.
"""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

WHEEL = "recbole==1.2.1"
INSIDE = "recbole/dataset_example/ml-100k/ml-100k"
TABLES = {
    "inter": ("user_id", "item_id", "rating", "timestamp"),
    "item": ("item_id", "release_year", "class"),
    "user": ("user_id", "age", "gender", "occupation"),
}
"""Columns that are read."""


class DataError(Exception):
    """The data cannot be had or read; the message says what to do."""


@dataclass(frozen=True)
class Ratings:
    """Who rated what and when, in order of time; users, movies and categories are numbered from 0.

    Attributes:
        user: [ratings] int64.
        movie: [ratings] int64.
        rating: [ratings] float32, 1 to 5.
        time: [ratings] int64, seconds.
        age: [users] float32, years.
        gender: [users] int64.
        occupation: [users] int64.
        year: [movies] float32; an unknown one is the mean.
        genres: [movies, genres] float32, 1 where a movie has the genre.
        shelf: [movies] int64, the movie's first genre: where a shop would put it.
        shelves: names of the genres.
        genders: how many.
        occupations: how many.
    """

    user: np.ndarray
    movie: np.ndarray
    rating: np.ndarray
    time: np.ndarray
    age: np.ndarray
    gender: np.ndarray
    occupation: np.ndarray
    year: np.ndarray
    genres: np.ndarray
    shelf: np.ndarray
    shelves: list[str]
    genders: int
    occupations: int


def load(data: Path | None, cache: Path | None = None) -> Ratings:
    """The ratings from `data`, or from the wheel, fetched once into `cache`.

    Args:
        data: a folder with one `.inter`, `.item` and `.user` file, such an `.inter` file, or the
            wheel. None: the wheel in `cache`, fetched by pip if it is not there yet.
        cache: default `~/.cache/ikbo-tree` (or below `XDG_CACHE_HOME`).

    Raises:
        DataError: no network, no such file, a file of another form.
    """
    if data is None:
        data = _fetched(cache or _cache())
    opened = _opener(data)
    return _ratings(*(Table.parse(opened(kind), f"{data} (.{kind})", kind) for kind in TABLES))


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ikbo-tree"


def _fetched(cache: Path) -> Path:
    """The wheel in `cache`; pip downloads it (2 MB) where it is missing."""
    name = WHEEL.replace("==", "-")
    for wheel in cache.glob(f"{name}-*.whl"):
        return wheel
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    done = subprocess.run([*command, str(cache), WHEEL], capture_output=True, text=True)
    for wheel in cache.glob(f"{name}-*.whl"):
        return wheel
    lines = [line for line in done.stderr.strip().split("\n") if line]
    raise DataError(
        f"the data comes inside the wheel {WHEEL}, which could not be fetched"
        f" ({lines[-1] if lines else 'pip said nothing'}). Without a network: run"
        f' "pip download --no-deps {WHEEL}" elsewhere and pass the wheel, or a folder with the'
        " .inter, .item and .user files, as --data"
    )


def _opener(data: Path) -> Callable[[str], str]:
    """What reads the text of the file with a given suffix."""
    if not data.exists():
        raise DataError(f"--data: {data} does not exist")
    if data.is_file() and data.suffix in (".whl", ".zip"):
        try:
            archive = zipfile.ZipFile(data)
        except zipfile.BadZipFile as error:
            raise DataError(f"--data: {data} is no wheel: {error}") from None

        def from_wheel(kind: str) -> str:
            try:
                return archive.read(f"{INSIDE}.{kind}").decode()
            except KeyError:
                raise DataError(f"--data: {data} has no {INSIDE}.{kind}; use {WHEEL}") from None

        return from_wheel
    folder = data if data.is_dir() else data.parent

    def from_folder(kind: str) -> str:
        if data.is_file() and kind == "inter":
            return data.read_text()
        found = sorted(folder.glob(f"*.{kind}"))
        if len(found) != 1:
            names = ", ".join(path.name for path in found) or "none"
            raise DataError(f"--data: {folder} must hold one .{kind} file; found {names}")
        return found[0].read_text()

    return from_folder


@dataclass(frozen=True)
class Table:
    """The columns of one file that are read, as text; `source` names it in messages."""

    source: str
    columns: dict[str, np.ndarray]

    @classmethod
    def parse(cls, text: str, source: str, kind: str) -> Table:
        """A table with the columns `TABLES[kind]`."""
        rows = csv.reader(io.StringIO(text), delimiter="\t", quoting=csv.QUOTE_NONE)
        header = [column.partition(":")[0] for column in next(rows, [])]
        missing = [name for name in TABLES[kind] if name not in header]
        if missing:
            raise DataError(f"{source} lacks the columns {', '.join(missing)}; it has {header}")
        body = [row for row in rows if row]
        for number, row in enumerate(body, start=2):
            if len(row) != len(header):
                raise DataError(
                    f"{source}, line {number}: {len(row)} columns instead of {len(header)}"
                )
        places = {name: header.index(name) for name in TABLES[kind]}
        return cls(source, {n: np.array([r[i] for r in body], np.str_) for n, i in places.items()})

    def numbers(self, name: str) -> np.ndarray:
        """A column as float64."""
        try:
            return self.columns[name].astype(np.float64)
        except ValueError as error:
            raise DataError(f"{self.source}, column {name}: {error}") from None


def _ratings(inter: Table, item: Table, user: Table) -> Ratings:
    time = inter.numbers("timestamp").astype(np.int64)
    if not len(time):
        raise DataError(f"{inter.source} has no ratings")
    order = np.argsort(time, kind="stable")
    named = [genres.split(" ") for genres in item.columns["class"].tolist()]
    shelves = sorted({genre for genres in named for genre in genres})
    genres = np.zeros((len(named), len(shelves)), np.float32)
    for row, names in enumerate(named):
        genres[row, [shelves.index(name) for name in names]] = 1
    texts = item.columns["release_year"].tolist()
    years = np.array([float(text) if text.isdecimal() else np.nan for text in texts])
    genders, gender = np.unique(user.columns["gender"], return_inverse=True)
    occupations, occupation = np.unique(user.columns["occupation"], return_inverse=True)
    return Ratings(
        user=_numbered(inter, user, "user")[order],
        movie=_numbered(inter, item, "item")[order],
        rating=inter.numbers("rating").astype(np.float32)[order],
        time=time[order],
        age=user.numbers("age").astype(np.float32),
        gender=gender,
        occupation=occupation,
        year=np.nan_to_num(years, nan=float(np.nanmean(years))).astype(np.float32),
        genres=genres,
        shelf=np.array([shelves.index(names[0]) for names in named]),
        shelves=shelves,
        genders=len(genders),
        occupations=len(occupations),
    )


def _numbered(inter: Table, of: Table, kind: str) -> np.ndarray:
    """The row in `of` of every rating's user or item."""
    ids, known = inter.columns[f"{kind}_id"], of.columns[f"{kind}_id"]
    strange = np.setdiff1d(ids, known)
    if len(strange):
        raise DataError(f"{inter.source} names {kind} {strange[0]}, which the .{kind} file lacks")
    order = np.argsort(known)
    row: np.ndarray = order[np.searchsorted(known, ids, sorter=order)]
    return row
