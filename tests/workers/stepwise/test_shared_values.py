"""Memory that the two processes of a host share: what one leaves there the other finds, and nothing else opens it."""

import dataclasses
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from podembed.embedding.lookup.activation_layout import ActivationLayout, Blocks
from podembed.embedding.tf.tpu_embedding.batches import to_jax
from podembed.workers.stepwise.shared_values import DeviceValues, Placed, SharedValues

LAYOUT = ActivationLayout(num_samples=4, widths=(3, 5), owners=(0, 1))


@pytest.fixture
def host():
    values = SharedValues.create(LAYOUT, num_slots=2)
    yield values
    values.close_descriptor()


def test_activations_are_taken_where_they_lie_and_lent_as_long_as_anything_refers_to_them(host):
    device = DeviceValues(SharedValues.open(host.place))
    smaller = LAYOUT.with_vectors((2, 4))
    blocks = Blocks.of(smaller, host.activations(3, smaller.num_floats))
    for at, block in enumerate(blocks.arrays):
        block[...] = at + 1
    assert host.slot_of(blocks.arrays[0]) == 1
    assert device.lent() == []
    taken = device.taken(Placed(slot=1, vectors=(2, 4)))
    assert [one.shape for one in taken] == [(2, 3), (4, 5)]
    assert [float(one.min()) for one in taken] == [1, 2]
    array = to_jax(taken[1])
    assert array.unsafe_buffer_pointer() == taken[1].ctypes.data
    assert device.lent() == [1]
    other = device.taken(Placed(slot=0, vectors=(4, 4)))
    assert sorted(device.lent()) == [0, 1]
    del other, taken
    assert device.lent() == [1]
    view = np.asarray(array)[1:]
    del array
    assert device.lent() == [1]
    del view
    assert device.lent() == []


def test_gradients_lie_in_the_slot_of_their_activations(host):
    device = DeviceValues(SharedValues.open(host.place))

    def put(value, slot):
        return device.put([np.full((4, 3), value, np.float32), np.full((4, 5), -value, np.float32)], slot)

    for value, slot in ((1.0, 1), (2.0, 0), (3.0, 0)):
        placed = put(value, slot)
        assert placed.slot == slot
    found = [host.layout_of(placed.vectors).blocks(host.gradients(slot, LAYOUT.num_floats)) for slot in (0, 1)]
    assert [[float(block[3, 2]) for block in blocks] for blocks in found] == [[3.0, -3.0], [1.0, -1.0]]


def test_a_batch_that_is_too_large_travels_in_the_call(host):
    device = DeviceValues(SharedValues.open(host.place))
    assert device.put([np.zeros((40, 3), np.float32), np.zeros((4, 5), np.float32)], 0) is None
    assert not host.fits(LAYOUT.with_vectors((0, 0)))
    assert host.slot_of(np.zeros(3, np.float32)) is None


def test_another_process_finds_the_memory_and_one_that_stands_for_another_file_does_not(host):
    host.gradients(0, 1)[:] = 7
    program = """
        import pickle, sys
        from podembed.workers.stepwise.shared_values import SharedValues
        place = pickle.loads(bytes.fromhex(sys.argv[1]))
        values = SharedValues.open(place)
        assert values.gradients(0, 1)[0] == 7
        values.activations(1, 1)[:] = 8
    """
    import pickle

    sent = pickle.dumps(host.place).hex()
    subprocess.run([sys.executable, "-c", textwrap.dedent(program), sent], check=True, timeout=120)
    assert host.activations(1, 1)[0] == 8
    with open(os.devnull) as other:
        elsewhere = dataclasses.replace(host.place, descriptor=other.fileno())
        assert SharedValues.open(elsewhere) is None
    assert SharedValues.open(dataclasses.replace(host.place, process=2**22 + 1)) is None
