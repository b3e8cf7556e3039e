"""Samples of the papers' jobs: what is held out, in which forms ratings come, and what is refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from podembed.jobs.papers.ratings import RatingsSet, RatingsSpec, write_ratings
from podembed.workers.data.input_errors import InputError

# User, movie, stars and time: the last rating of user 4 is that of the higher movie of one second.
RATINGS = [(4, 30, 5.0, 9), (4, 10, 3.0, 7), (4, 20, 4.0, 9), (9, 20, 2.5, 5), (2, 10, 1.0, 3), (2, 30, 4.5, 2)]
HEADER = "userId,movieId,rating,timestamp\n"


def lines(between: str) -> str:
    return "".join(f"{between.join(f'{value:g}' for value in row)}\n" for row in RATINGS)


def rows(made: RatingsSet, name: str) -> list[tuple[int, int, float]]:
    table = pq.read_table(made.folder / f"{name}-00000.parquet")
    return sorted(zip(*(table[column].to_pylist() for column in ("user", "item", "rating")), strict=True))


def test_each_form_of_movielens_gives_the_same_samples_with_the_last_rating_held_out(tmp_path: Path) -> None:
    files = {
        "ratings.csv": HEADER + lines(","),
        "ratings.dat": lines("::"),
        "u.data": lines("\t"),
    }
    made = []
    for name, text in files.items():
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        (folder / name).write_text(text)
        made.append(write_ratings(folder, tmp_path / "cache", RatingsSpec()))
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "ratings.csv.gz").write_bytes(gzip.compress(files["ratings.csv"].encode()))
    made.append(write_ratings(packed, tmp_path / "cache", RatingsSpec()))
    for one in made:
        assert (one.num_users, one.num_items) == (3, 3)
        # Users 2, 4, 9 and movies 10, 20, 30 are numbered from 0. User 9 has nothing that could be held out.
        assert rows(one, "eval") == [(0, 0, 1.0), (1, 2, 5.0)]
        assert rows(one, "train") == [(0, 2, 4.5), (1, 0, 3.0), (1, 1, 4.0), (2, 1, 2.5)]
        assert one.mean_rating == pytest.approx((4.5 + 3 + 4 + 2.5) / 4)


def test_a_history_has_the_other_training_items_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "u.data").write_text("".join(f"1\t{movie}\t5\t{movie}\n" for movie in range(1, 7)))
    made = write_ratings(tmp_path, tmp_path / "cache", RatingsSpec(history_length=3))
    table = pq.read_table(made.folder / "train-00000.parquet")
    found = dict(zip(table["item"].to_pylist(), table["history"].to_pylist(), strict=True))
    assert found == {0: [2, 3, 4], 1: [2, 3, 4], 2: [1, 3, 4], 3: [1, 2, 4], 4: [1, 2, 3]}
    assert pq.read_table(made.folder / "eval-00000.parquet")["history"].to_pylist() == [[2, 3, 4]]
    made = write_ratings(tmp_path, tmp_path / "cache", RatingsSpec(history_length=3, history_of="before"))
    table = pq.read_table(made.folder / "train-00000.parquet")
    found = dict(zip(table["item"].to_pylist(), table["history"].to_pylist(), strict=True))
    assert found == {0: [], 1: [0], 2: [0, 1], 3: [0, 1, 2], 4: [1, 2, 3]}
    assert pq.read_table(made.folder / "eval-00000.parquet")["history"].to_pylist() == [[2, 3, 4]]


def test_rare_users_and_items_are_left_out_as_long_as_there_are_any(tmp_path: Path) -> None:
    # Without movie 4, user 3 has one rating left.
    text = "".join(f"{u}\t{m}\t5\t{u + m}\n" for u, m in [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 4)])
    (tmp_path / "u.data").write_text(text)
    made = write_ratings(tmp_path, tmp_path / "cache", RatingsSpec(least_ratings=2))
    assert (made.num_users, made.num_items) == (2, 2)


def test_a_random_share_is_held_out(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    text = "".join(f"{u}\t{m}\t3\t1\n" for u, m in random.integers(1, 60, (2000, 2)).tolist())
    (tmp_path / "u.data").write_text(text)
    made = write_ratings(tmp_path, tmp_path / "cache", RatingsSpec(held_out="random", held_out_share=0.25))
    assert len(rows(made, "eval")) == pytest.approx(500, abs=80)
    assert len(rows(made, "eval")) + len(rows(made, "train")) == 2000


def test_what_is_no_ratings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Found none of ratings\.csv.*Unpack a data set of MovieLens"):
        write_ratings(tmp_path, tmp_path / "cache", RatingsSpec())
    for text in ("userId,rating\n1,2\n", HEADER + "1,2,three,4\n", HEADER, HEADER + "1,,3,4\n"):
        (tmp_path / "ratings.csv").write_text(text)
        with pytest.raises(InputError, match=r"ratings\.csv (unreadable as ratings|without ratings)"):
            write_ratings(tmp_path, tmp_path / "cache", RatingsSpec())
    (tmp_path / "ratings.csv").write_text(HEADER + "1,2,3,4\n")
    with pytest.raises(InputError, match="1 ratings of 1 users to divide"):
        write_ratings(tmp_path, tmp_path / "cache", RatingsSpec())
