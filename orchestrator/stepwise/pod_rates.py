"""The driver's answers to functions that a pod runs and that ask for learning rates (`replicas.dynamic_rates`).

A rate is called here, once for an update of all replicas, and then travels to each of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from podembed.embedding.tf.replicas.dynamic_rates import RatesQuestion, rates_of
from podembed.orchestrator.stepwise.pod import Pod
from podembed.workers.stepwise.asking import Asked
from podembed.workers.stepwise.device import Ran


def until_ended(pod: Pod, answers: Sequence[Ran | Asked], *, timeout_s: float) -> list[Ran]:
    """Answers what the functions ask until they have ended.

    Args:
      answers: of the replicas so far, in order.
      timeout_s: for each part of the functions between two questions.

    Raises:
      ValueError: the replicas gave different rates for one update.
      RuntimeError: only some of them apply gradients now, or not those of one embedding and step.
      Exception: what a learning rate raised, and as `Pod.ask_devices`.
    """
    while not all(isinstance(one, Ran) for one in answers):
        try:
            rates = rates_of(_same_question(answers))
        except BaseException:
            # No replica may go on alone: its host would wait for the others.
            pod.ask_devices(lambda replica, device: device.give_up(), timeout_s=pod.call_timeout_s)
            raise
        answers = pod.ask_devices(lambda replica, device, rates=rates: device.go_on(rates), timeout_s=timeout_s)
    return [one for one in answers if isinstance(one, Ran)]


def _same_question(answers: Sequence[Ran | Asked]) -> RatesQuestion:
    questions: list[RatesQuestion | None] = [one.question if isinstance(one, Asked) else None for one in answers]
    first = questions[0]
    if first is not None and all(question == first for question in questions):
        return first
    if None in questions:
        ended = [replica for replica, question in enumerate(questions) if question is None]
        raise RuntimeError(
            f"Found gradients on some replicas while the function has ended on replicas {ended}. Expected "
            "apply_gradients on all of them, since an update is one of all hosts. Call it on each replica, with zeros "
            "where there are none; discard() forgets the batch."
        )
    given = {replica: list(question.given) for replica, question in enumerate(questions) if question is not None}
    if any(given.values()):
        raise ValueError(
            f"Found different learning rates for one update, by replica: {given}. Expected the same on all, since "
            "tables are one over all hosts. Find the rates on the driver and pass them as an argument of the function."
        )
    steps = [(question.key, question.step) for question in questions if question is not None]
    raise RuntimeError(
        f"Found updates of different embeddings or steps at once, by replica: {steps}. Expected the same "
        "apply_gradients on all. Let no call depend on the number of the replica."
    )
