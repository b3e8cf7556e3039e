"""`StepOrder`: an independent trace of what runs when, and every call that would wait for ever."""

import numpy as np
import pytest

from podembed.embedding.tf.engine.order import OrderError, StepOrder


class Recorded:
    """Forward and backward that only write down their order."""

    def __init__(self, *, is_pipelined):
        self.trace = []
        self.order = StepOrder(self.forward, self.backward, is_pipelined=is_pipelined)

    def forward(self, batch):
        self.trace.append(f"F{batch}")
        return batch, [np.full((1, 2), batch, np.float32)]

    def backward(self, prepared, gradients, learning_rates):
        self.trace.append(f"B{prepared}@{learning_rates[0]}")

    def enqueue(self, batch, training=True, name=None):
        self.order.enqueue(batch, is_training=training, name=name)

    def apply(self, name=None, rate=0):
        return self.order.apply([np.zeros((1, 2), np.float32)], lambda step: [step + rate], name)

    def step(self, batch):
        self.enqueue(batch)
        assert self.order.dequeue(None)[0][0, 0] == batch
        self.apply()


def test_sequential_steps_update_before_the_next_forward():
    recorded = Recorded(is_pipelined=False)
    for batch in range(3):
        recorded.step(batch)
    assert recorded.trace == ["F0", "B0@0", "F1", "B1@1", "F2", "B2@2"]
    recorded.order.drain()
    assert len(recorded.trace) == 6


def test_pipelined_steps_update_right_after_the_next_forward_and_the_last_by_a_drain():
    recorded = Recorded(is_pipelined=True)
    for batch in range(4):
        recorded.step(batch)
    assert recorded.trace == ["F0", "F1", "B0@0", "F2", "B1@1", "F3", "B2@2"]
    recorded.order.drain()
    recorded.order.drain()
    assert recorded.trace[-1] == "B3@3"
    assert len(recorded.trace) == 8
    assert recorded.order.num_applied == 4


def test_a_pipeline_holds_two_batches_and_runs_the_same_order():
    recorded = Recorded(is_pipelined=True)
    recorded.enqueue(0)
    recorded.enqueue(1)
    with pytest.raises(OrderError, match="2 earlier batches are in flight"):
        recorded.enqueue(2)
    assert recorded.order.dequeue(None)[0][0, 0] == 0
    recorded.apply()
    recorded.enqueue(2)
    assert recorded.order.dequeue(None)[0][0, 0] == 1
    recorded.apply()
    assert recorded.order.dequeue(None)[0][0, 0] == 2
    recorded.apply()
    recorded.order.drain()
    assert recorded.trace == ["F0", "F1", "B0@0", "F2", "B1@1", "B2@2"]


def test_evaluation_in_a_pipeline_sees_every_update():
    recorded = Recorded(is_pipelined=True)
    recorded.step(0)
    recorded.enqueue(7, training=False)
    recorded.order.dequeue(None)
    recorded.step(1)
    assert recorded.trace == ["F0", "B0@0", "F7", "F1"]


def test_gradients_may_come_before_the_dequeue_but_not_twice():
    recorded = Recorded(is_pipelined=False)
    recorded.enqueue(0)
    recorded.apply()
    with pytest.raises(OrderError, match="waiting for dequeue"):
        recorded.enqueue(1)
    with pytest.raises(OrderError, match="without an enqueued training batch"):
        recorded.apply()
    recorded.order.dequeue(None)
    recorded.step(1)
    assert recorded.trace == ["F0", "B0@0", "F1", "B1@1"]


def test_gradients_of_another_shape_change_nothing():
    recorded = Recorded(is_pipelined=False)
    recorded.enqueue(0)
    with pytest.raises(ValueError, match=r"Found gradients of shapes \[\(2, 2\)\]. Expected \[\(1, 2\)\]"):
        recorded.order.apply([np.zeros((2, 2), np.float32)], lambda step: [0], None)
    assert recorded.apply() == [0]


def test_a_forward_that_fails_leaves_nothing_in_flight():
    recorded = Recorded(is_pipelined=True)
    recorded.step(0)
    original, recorded.order._forward = recorded.order._forward, lambda batch: 1 / 0
    with pytest.raises(ZeroDivisionError):
        recorded.enqueue(1)
    recorded.order._forward = original
    recorded.step(2)
    recorded.order.drain()
    assert recorded.trace == ["F0", "F2", "B0@0", "B2@1"]


def test_discarded_batches_are_forgotten_and_given_gradients_are_not():
    recorded = Recorded(is_pipelined=True)
    recorded.step(0)
    recorded.enqueue(1)
    recorded.enqueue(2)
    recorded.order.dequeue(None)
    recorded.order.discard()
    with pytest.raises(OrderError, match="without an enqueued"):
        recorded.apply()
    recorded.step(3)
    assert recorded.trace == ["F0", "F1", "B0@0", "F2", "F3"]


def test_names_decide_afterwards_whether_a_batch_was_one_of_training():
    recorded = Recorded(is_pipelined=False)
    recorded.enqueue(0, name="a")
    recorded.order.dequeue("a")
    recorded.enqueue(1, training=False, name="b")
    recorded.order.dequeue("b")
    with pytest.raises(OrderError):
        recorded.apply(name="a")
    recorded.apply(name="b")
    with pytest.raises(OrderError):
        recorded.apply(name="b")
    assert recorded.trace == ["F0", "F1", "B1@0"]
    recorded.enqueue(2, name="c")
    with pytest.raises(OrderError, match="name='d'"):
        recorded.order.dequeue("d")


@pytest.mark.parametrize("refuse", ["rate", "shape", "asked alone"])
def test_a_tagged_batch_of_inference_stays_where_it_is_if_its_gradients_are_refused(refuse):
    """It was dequeued, and the next batch has room. With gradients it would have become one of training."""
    recorded = Recorded(is_pipelined=False)
    recorded.enqueue(0, training=False, name="a")
    recorded.order.dequeue("a")

    def rates(step):
        raise KeyError(step)

    if refuse == "rate":
        with pytest.raises(KeyError):
            recorded.order.apply([np.zeros((1, 2), np.float32)], rates, "a")
    elif refuse == "shape":
        with pytest.raises(ValueError, match="one gradient per activation"):
            recorded.order.apply([np.zeros((3, 2), np.float32)], rates, "a")
    else:
        recorded.order.require_unapplied("a")
    assert recorded.order.has_room
    recorded.apply("a")
    recorded.step(1)
    assert recorded.trace == ["F0", "B0@0", "F1", "B1@1"]
