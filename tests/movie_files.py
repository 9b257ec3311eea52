"""A small made-up data set in the files of MovieLens-100K as RecBole's wheel has them."""

from pathlib import Path

import numpy as np

GENRES = ("Action", "Comedy", "Drama", "War")


def write(folder: Path, *, users: int = 12, movies: int = 25, ratings: int = 260, seed: int = 0):
    """Writes `made.inter`, `made.item`, `made.user`; several ratings share a second.

    Users like movies whose number has their own remainder by 3: there is something to learn.
    """
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token"]
    lines += [
        f"{user + 1}\t{20 + user}\t{'MF'[user % 2]}\twork{user % 3}\t{10000 + user}"
        for user in range(users)
    ]
    (folder / "made.user").write_text("\n".join(lines) + "\n")

    lines = ["item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq"]
    for movie in range(movies):
        genres = sorted(rng.choice(GENRES, size=rng.integers(1, 4), replace=False))
        year = "V" if movie == 3 else str(1980 + movie % 20)
        lines.append(f'{movie + 1}\t"A" film, {movie}\t{year}\t{" ".join(genres)}')
    (folder / "made.item").write_text("\n".join(lines) + "\n")

    pairs = rng.permutation(users * movies)[:ratings]
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    for pair in pairs:
        user, movie = divmod(int(pair), movies)
        liked = rng.random() < (0.9 if movie % 3 == user % 3 else 0.2)
        stars = rng.integers(4, 6) if liked else rng.integers(1, 4)
        lines.append(f"{user + 1}\t{movie + 1}\t{stars}\t{881250000 + rng.integers(ratings // 2)}")
    (folder / "made.inter").write_text("\n".join(lines) + "\n")
    return folder
