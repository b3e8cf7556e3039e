"""`ALARMS`: everything that a detector may find, with when it begins and what to do. docs/observability.md has the same
table. `StandingAlarm` is one of them in a run, with its numbers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A kind of trouble.

    Attributes:
      name: for programs.
      begins: when, as a part of a sentence.
      remedy: what to do, as one or more sentences.
      is_note: it is worth knowing, and nothing is wrong; it changes no exit code.
      is_said: the driver has an event of its own for it, so it says it no second time.
    """

    name: str
    begins: str
    remedy: str
    is_note: bool = False
    is_said: bool = False

    @property
    def severity(self) -> str:
        """As Prometheus has it."""
        return "info" if self.is_note else "warning"


ALARMS: dict[str, Alarm] = {
    alarm.name: alarm
    for alarm in (
        Alarm(
            name="input_bound",
            begins="hosts waited for their input for 30 % of the last minute",
            remedy="Give hosts more processors, use more hosts, put the data nearer, or prepare it as Parquet with "
            "`podembed prepare`.",
        ),
        Alarm(
            name="device_bound",
            begins="hosts waited for their devices for 85 % of the last minute; a note, for nothing is wrong",
            remedy="More or faster devices would speed the run up; more processors for the hosts would not.",
            is_note=True,
        ),
        Alarm(
            name="slow_host",
            begins="a host worked twice as long as the others for the last minute, and by a tenth of it longer",
            remedy="Look for other programs on its machine, or for a slow disk, and take the machine out if it stays.",
            is_said=True,
        ),
        Alarm(
            name="frequent_commits",
            begins="training stood still for commits for 10 % of the last two minutes",
            remedy="Commit less often with --checkpoint-every or --checkpoint-seconds, or write deltas with "
            "--full-every.",
        ),
        Alarm(
            name="slow_storage",
            begins="training stood still for commits for 10 % of the last two minutes, and a commit takes 5 s or more "
            "at less than 20 MB a second",
            remedy="Give the run a faster storage, or commit less often with --checkpoint-every.",
        ),
        Alarm(
            name="memory_grows",
            begins="a host's memory has grown in each quarter of the last 10 minutes or more, by a tenth in all",
            remedy="Look for what the job's own functions keep, and for caches without an end. A stop and "
            "`podembed resume` begin with new processes.",
        ),
        Alarm(
            name="loss_not_falling",
            begins="after 200 steps of a new run the loss is not below that of its first steps",
            remedy="Look whether labels belong to their rows, and whether a learning rate is near zero or too high.",
        ),
        Alarm(
            name="loss_rises",
            begins="the mean loss of 60 steps or more is a fifth above the best before, and more than it usually "
            "varies",
            remedy="Lower the learning rates, clip gradients, or look for data of another kind since then.",
        ),
        Alarm(
            name="calibration_off",
            begins="after 200 steps scores predict 10 % more or fewer positives than come, in three chunks of 50 steps "
            "or more, and it does not get better",
            remedy="Look for labels that mean something else now, for sample weights, and for a learning rate near "
            "zero.",
        ),
        Alarm(
            name="no_better_than_constant",
            begins="after 200 steps the normalized entropy of windows is 1 or more in three chunks of 50 steps; or, "
            "after 100,000 samples, the AUC of an evaluation is below 0.54 or has less than a quarter of the reachable "
            "lift over 0.5",
            remedy="Look whether labels belong to their rows, and raise the learning rates. If Adagrad or FTRL were "
            "given an initial_accumulator_value such as 0.1, or the run began before jobs had a small one, begin a new "
            "run without it. If the metric is right, the inputs may say nothing about the label.",
        ),
        Alarm(
            name="evaluation_falls",
            begins="three evaluations in a row are worse than the best one, while the training loss falls",
            remedy="Stop at the best evaluation with JobConfig(early_stopping=EarlyStopping()), keep its commit with "
            "--keep-best 1, and train fewer epochs or with lower learning rates.",
        ),
        Alarm(
            name="overfits",
            begins="the AUC of training is 0.05 above that of the evaluation, or the evaluation loss over the training "
            "loss is 1.25 times as high as at first, and the evaluation does not get better",
            remedy="Stop early with JobConfig(early_stopping=EarlyStopping()) and --keep-best 1, train fewer epochs, "
            "lower the learning rates of tables, or use a smaller dim or dropout.",
        ),
        Alarm(
            name="auc_above_reachable",
            begins="the AUC of an evaluation is above the best reachable one (JobConfig.best_auc) by more than chance",
            remedy="Look for an input that is made of the label, and for evaluation rows among the training rows. Or "
            "best_auc is not that of this evaluation data.",
        ),
        Alarm(
            name="learning_rate_too_high",
            begins="after 200 steps each step changes the dense parameters by a tenth of their norm",
            remedy="Lower the learning rate of the dense optimizer, or warm it up.",
        ),
        Alarm(
            name="table_rate_too_high",
            begins="a tenth of a table's rows have grown to 8 times their first norm, in three looks",
            remedy="Lower the learning rate of the table's optimizer, warm it up, or clip its gradients (clipvalue). "
            "Rows that have grown shrink slowly, so begin again, or from a commit from before.",
        ),
        Alarm(
            name="rows_never_train",
            begins="after 1,000 steps fewer than half of a table's rows were ever updated, and hardly any more come; a "
            "note",
            remedy="Rows that no sample names only take memory. A smaller table with hashed ids may do as well.",
            is_note=True,
        ),
        Alarm(
            name="feature_empty",
            begins="an input that had ids has none any more, in two readings of 4,096 samples each",
            remedy="Look at its column in the files that were read since then, and at what writes them. Then go back "
            "to a commit from before.",
        ),
        Alarm(
            name="feature_constant",
            begins="an input that had several ids or numbers has the same one in all samples, in two readings",
            remedy="Look at its column in the files that were read since then. A default value in the place of a "
            "missing one looks like this.",
        ),
        Alarm(
            name="columns_swapped",
            begins="an input differs from before in 30 % of its samples beyond what is usual, and looks as another "
            "one did",
            remedy="Compare the order and the names of columns in the files that were read since then with those "
            "before.",
        ),
        Alarm(
            name="id_takes_over",
            begins="one id or number has a quarter of the samples more than usual, in three readings",
            remedy="Look where its rows come from: a default value, a robot, or one source that is repeated. Leave "
            "them out, or weigh them less.",
        ),
        Alarm(
            name="column_shifted",
            begins="an input differs from before in half of its samples beyond what is usual, within few readings",
            remedy="Look at its column in the files that were read since then: another unit, another vocabulary or "
            "hash, a shifted column.",
        ),
        Alarm(
            name="data_drifts",
            begins="inputs differ from the first part of the run in a fifth of their samples beyond what is usual",
            remedy="If the data is in the order of time, this may be right. Else compare the files that are read now "
            "with those before.",
        ),
        Alarm(
            name="feature_idle",
            begins="an input has had no ids, or one and the same, in all samples since the beginning; a note",
            remedy="Look whether its column is the right one. If so, the model does as well without it.",
            is_note=True,
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingAlarm:
    """An alarm that stands.

    Attributes:
      alarm: a name of `ALARMS`.
      subject: what it is about where there are several, such as `host 1`; else empty.
      text: what was found, with numbers; no full stop.
    """

    alarm: str
    subject: str = ""
    text: str

    @property
    def key(self) -> tuple[str, str]:
        return self.alarm, self.subject

    @property
    def kind(self) -> Alarm:
        return ALARMS[self.alarm]
