"""Every frame has one way through the grid, of at most two hops, and no host has many frames to send."""

from __future__ import annotations

from math import sqrt

import pytest

from podembed.workers.mesh.grid import Grid

ALL_SIZES = [*range(1, 41), 97, 127, 128, 1000, 1024]


@pytest.mark.parametrize("num_ranks", ALL_SIZES)
def test_each_frame_comes_to_its_host_by_one_relay(num_ranks: int) -> None:
    grid = Grid(num_ranks)
    places = [grid.place(rank) for rank in range(min(num_ranks, 130))]
    for sender, place in enumerate(places):
        reached = [rank for column in place.columns for rank in column.ranks]
        assert sorted(reached) == list(range(num_ranks))
        for number, column in enumerate(place.columns):
            # The relay expects this sender, and passes on to exactly this column.
            assert sender in grid.senders(column.relay)
            assert grid.column(grid.column_of(column.relay)) == column.ranks
            assert (column.relay == sender) == (number == place.own)


@pytest.mark.parametrize("num_ranks", ALL_SIZES)
def test_each_host_gets_the_frames_of_every_other_one_once(num_ranks: int) -> None:
    grid = Grid(num_ranks)
    for rank in range(min(num_ranks, 130)):
        place = grid.place(rank)
        senders = [sender for sources in place.sources.values() for sender in sources]
        assert sorted(senders) == list(range(num_ranks))
        assert set(place.sources) == set(place.columns[place.own].ranks)


@pytest.mark.parametrize("num_ranks", ALL_SIZES)
def test_frames_grow_with_the_root_of_the_hosts(num_ranks: int) -> None:
    grid = Grid(num_ranks)
    assert grid.most_frames <= 2.4 * sqrt(num_ranks) + 1
    for rank in range(min(num_ranks, 130)):
        place = grid.place(rank)
        relays = len(place.sources) - 1
        assert len(place.columns) - 1 + relays <= grid.most_frames
        assert len(place.sources[rank]) - 1 + relays <= grid.most_frames
