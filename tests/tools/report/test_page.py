"""The page of a report, read as a program reads it: what it says, and that it needs and runs nothing from elsewhere."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import vl_convert

from podembed.orchestrator.api.config import ScalingConfig
from podembed.orchestrator.run.job_settings import SettingChange, SettingsRecord
from podembed.tools.metrics.point import Measurement, Point
from podembed.tools.report.charts import CONFIG, curve_chart, line_keys, time_line_chart
from podembed.tools.report.commands import commands_of
from podembed.tools.report.curves import Curve
from podembed.tools.report.differences import differences
from podembed.tools.report.material import Material, distinct_names, read_material
from podembed.tools.report.page import render_report
from podembed.tools.report.sections import outcome, phase_times
from podembed.tools.report.vega import drawn
from tests.small_job import small_job
from tests.tools.report.runs import (
    EVIL,
    NUM_STEPS,
    a_fault,
    a_point,
    add_lines,
    an_evaluation,
    an_event,
    copied,
    trained_run,
    without_measurements,
)
from tests.training import fit_job

VOID = {"meta", "link", "img", "br", "hr", "input"}
RAW = {"script", "style"}


class Reader(HTMLParser):
    """Collects elements and texts, and checks that each element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.headings: list[tuple[int, str]] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append((int(tag[1]), ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in RAW:
            if self._open[-1] == "script":
                self.scripts.append((self.elements[-1][1], data))
            return
        self.texts.append(data)
        if self.headings and not self.headings[-1][1]:
            self.headings[-1] = (self.headings[-1][0], data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    @property
    def specs(self) -> dict[str, dict[str, Any]]:
        return json.loads(next(data for attributes, data in self.scripts if attributes.get("id") == "charts"))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def material(run: Path, name: str = "clicks") -> Material:
    return read_material(str(run), name=name, now_unix_s=2e9)


def page_of(*materials: Material) -> Reader:
    reader = Reader()
    reader.feed(render_report(materials, version="1.2.3", now_unix_s=2e9))
    reader.close()
    return reader


@pytest.fixture(scope="module")
def run(small_data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(small_data, tmp_path_factory.mktemp("reported"))


@pytest.fixture(scope="module")
def page(run: Path) -> Reader:
    return page_of(material(run))


def test_it_says_what_was_trained_and_how_it_went(page: Reader, run: Path) -> None:
    for part in (f"{NUM_STEPS} of {NUM_STEPS}", "s000000012-g00000001", "No fault is known.", f"podembed fsck {run}"):
        assert part in page.text
    assert {
        "curve-loss",
        "curve-evaluation-auc",
        "curve-samples-per-second",
        "curve-goodput-ratio",
    } <= page.specs.keys()
    assert {"run-1-phases", "run-1-time-line"} <= page.specs.keys()
    loss = page.specs["curve-loss"]["data"]["values"]
    assert [one["step"] for one in loss] == [point.step for point in material(run).stream.windows]


def test_the_report_the_top_view_and_the_result_have_one_median(small_data: str, tmp_path: Path) -> None:
    result = fit_job(small_job(folder=small_data), tmp_path, name="clicks", max_steps=60)
    made = material(tmp_path / "clicks")
    assert made.stream.median_samples_per_s == pytest.approx(result.median_samples_per_s, rel=1e-3)
    assert dict(outcome(made))["Median samples/s"] == f"{made.stream.median_samples_per_s:,.0f}"


def test_a_first_step_that_is_far_off_does_not_squash_a_curve() -> None:
    line = [(1, 9.0), *((step, 0.5 + 0.01 * (step % 7)) for step in range(2, 40))]

    def scale(line: list[tuple[int, float]]) -> dict[str, Any]:
        curve = Curve(key="loss", title="Loss", meaning="", unit="", lines={"loss": line}, is_main=True)
        return curve_chart(curve)["encoding"]["y"]["scale"]

    assert scale(line)["domain"] == pytest.approx([0.497, 0.563])
    assert "domain" not in scale(line[1:])


def test_times_are_of_24_hours() -> None:
    marks = [{"row": "commits", "from": 1.7e12 + at, "until": 1.7e12 + at, "text": ""} for at in (0, 4 * 3600_000)]
    svg = drawn(time_line_chart(marks, ["commits"]))
    labels = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert "22:30:00" in labels
    assert not [label for label in labels if "PM" in label]


def test_legends_are_the_page_s_own_and_tell_all_lines_apart(run: Path, tmp_path: Path) -> None:
    other = copied(run, tmp_path / "other")
    lines = [Measurement("heat", float(at), {"table": f"t{at:02d}"}) for at in range(12)]
    add_lines(other, a_point(13, *lines), a_point(14, *lines))
    reader = page_of(material(other))
    assert "legend" not in CONFIG
    assert "t11" in reader.text
    drawn_as = [(key.colour, key.dash) for key in line_keys([f"line {at}" for at in range(24)])]
    assert len(set(drawn_as)) == 24
    for (_, dash), (_, after) in pairwise(drawn_as):
        assert dash != after
    for spec in page_of(material(run, "new"), material(other, "old")).specs.values():
        for encoding in [spec.get("encoding", {}), *(layer["encoding"] for layer in spec.get("layer", []))]:
            assert all(encoding[name]["legend"] is None for name in ("color", "strokeDash") if name in encoding)


def test_a_label_that_all_lines_have_is_left_out(run: Path) -> None:
    reader = page_of(material(run, "new"), material(run, "old"))
    assert {one["line"] for one in reader.specs["curve-memory-bytes"]["data"]["values"]} == {"new", "old"}


def test_the_best_and_the_reachable_are_shown(run: Path, tmp_path: Path) -> None:
    assert "Best reachable AUC" not in dict(outcome(material(run)))
    other = copied(run, tmp_path / "other")
    add_lines(
        other,
        *(
            an_evaluation(step, auc=auc, reachable_auc=0.8125, evaluation_samples=1e6)
            for step, auc in ((13, 0.78), (14, 0.79), (15, 0.79), (16, 0.77))
        ),
    )
    made = material(other)
    shown = dict(outcome(made))
    assert shown["Last AUC"] == "0.7700"
    assert shown["Best AUC"] == "0.7900 at step 14"
    assert shown["Best reachable AUC"] == "0.8125"
    reader = page_of(made, material(run, "old"))
    level = [one for one in reader.specs["curve-evaluation-auc"]["data"]["values"] if one["line"] == "best reachable"]
    assert {one["value"] for one in level} == {0.8125}
    assert "curve-reachable-auc" not in reader.specs


def test_the_best_of_a_metric_follows_the_run_s_own_order(run: Path) -> None:
    made = material(run)
    line = [(1, 3.0), (2, 1.0), (3, 2.0)]
    assert made.best("log_loss", line) == (2, 1.0)
    assert made.best("rank", line) is None
    assert made.policies is not None
    low = replace(made, policies=replace(made.policies, metric="rank", metric_order="min"))
    assert low.best("rank", line) == (2, 1.0)
    high = replace(made, policies=replace(made.policies, metric="rank", metric_order="max"))
    assert high.best("rank", line) == (1, 3.0)
    # podembed's own metrics by name, also of a task, and those that the job declares.
    assert made.best("rmse", line) == made.best("click/mae", line) == (2, 1.0)
    assert made.best("hit_rate@10", line) == made.best("ndcg@5", line) == (1, 3.0)
    order = Measurement("evaluation_order", -1.0, {"metric": "rank"})
    point = Point(generation=1, first_step=3, step=3, unix_s=2e9, measurements=(order,))
    declared = replace(made, stream=replace(made.stream, points=(*made.stream.points, point)))
    assert declared.best("rank", line) == (2, 1.0)


def test_what_differs_between_runs(run: Path, tmp_path: Path) -> None:
    assert differences([material(run), material(run, "again")]) == []
    assert "Nothing of what runs record" in page_of(material(run), material(run, "again")).text
    assert "What differs" not in page_of(material(run)).text
    read = material(run)
    recorded = read.description.record
    assert recorded is not None

    def changed(arguments: str, *settings: SettingsRecord, **fields: Any) -> Material:
        record = replace(recorded, job_arguments=arguments, job_function="own:job", **fields)
        return replace(read, description=replace(read.description, record=record, settings=settings))

    one = changed('{"rate": 0.1, "dim": 8}')
    change = SettingsRecord(
        generation=2,
        step=9,
        changed_unix_s=0.0,
        changes=(SettingChange(name="rate", before="0.2", after="0.05"),),
        job_arguments='{"rate": 0.05}',
    )
    table = replace(recorded.tables[0], num_rows=7, dim=3)
    other = changed('{"rate": 0.2}', change, seed=9, tables=(table, *recorded.tables[1:]))
    rows = {name: values for name, *values in differences([one, other])}
    assert rows["argument rate"] == ["0.1", "0.2; 0.05 from step 9 on"]
    assert rows["argument dim"] == ["8", "its default"]
    assert rows["seed"][1] == "9"
    assert rows[f"table {table.name}"][1].startswith("7 rows, dim 3")
    assert set(rows) == {"argument rate", "argument dim", "seed", f"table {table.name}"}
    assert "0.2; 0.05 from step 9 on" in page_of(one, replace(other, name="other")).text
    broken = changed("no json")
    assert {row[0]: row[2] for row in differences([one, broken])}["arguments"] == "no json"


def test_it_says_which_alarms_stand(page: Reader, run: Path, tmp_path: Path) -> None:
    assert "No alarm stands." in page.text
    ill = copied(run, tmp_path / "ill")
    add_lines(
        ill,
        a_point(12, Measurement("loss", 0.1)),
        an_evaluation(12, auc=0.83, reachable_auc=0.8, evaluation_samples=1e6),
    )
    text = page_of(material(ill)).text
    assert "auc_above_reachable" in text
    assert "0.8300, and the best that any model can reach is 0.8000." in text
    assert "Look for an input that is made of the label" in text


def test_nothing_is_loaded_from_elsewhere(page: Reader) -> None:
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            if name in ("src", "href", "action", "data", "poster", "srcset", "xlink:href"):
                assert (value or "").startswith(("#", "data:")), (tag, name, value)
    policy = next(one["content"] for one in page.all("meta") if one.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_it_can_be_read_by_a_screen_reader(page: Reader) -> None:
    assert page.all("html") == [{"lang": "en"}]
    levels = [level for level, _ in page.headings]
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels)), page.headings
    assert all(text.strip() for _, text in page.headings)
    ids = Counter(attributes["id"] for _, attributes in page.elements if "id" in attributes)
    assert [key for key, count in ids.items() if count > 1] == []
    targets = {(one["href"] or "")[1:] for one in page.all("a")}
    assert targets <= ids.keys()
    charts = [one for one in page.all("div") if "chart" in (one.get("class") or "").split()]
    assert len(charts) == len(page.specs)
    assert all(one.get("role") == "img" and len(one.get("aria-label") or "") > 30 for one in charts)
    # Each curve has its values in words, too; those of the time line are in the tables of events.
    assert page.text.count("Values as a table") == len(page.specs) - 1
    assert len(page.all("caption")) == len(page.all("table"))
    assert all(one.get("scope") in ("row", "col") for one in page.all("th"))


def test_every_chart_is_one(page: Reader) -> None:
    for spec in page.specs.values():
        assert vl_convert.vegalite_to_vega(spec, vl_version="6.4")["marks"]


def test_texts_of_a_run_are_no_markup(run: Path, tmp_path: Path) -> None:
    evil = copied(run, tmp_path / "evil")
    add_lines(
        evil,
        *a_fault(EVIL),
        an_event("rows_put_aside", EVIL, {"num_rows": 3, "location": EVIL}),
        an_event("unheard_of", EVIL, {"new": EVIL}),
        a_point(13, Measurement("malformed_rows", 3.0), Measurement("new_series", 2.0, {"table": EVIL})),
    )
    reader = page_of(material(evil, name=EVIL), material(run))
    assert reader.text.count("alert('x')") > 5
    assert reader.all("img") == []
    assert len(reader.scripts) == len(page_of(material(run)).scripts)
    assert reader.specs["curve-loss"]["data"]["values"][0]["line"] == EVIL


def test_a_fault_is_in_the_time_line_and_in_words(run: Path, tmp_path: Path) -> None:
    faulty = copied(run, tmp_path / "faulty")
    add_lines(faulty, *a_fault("host 1 was killed"))
    reader = page_of(material(faulty))
    marks = {mark["row"]: mark for mark in reader.specs["run-1-time-line"]["data"]["values"]}
    assert marks["faults"]["text"] == "fault: host 1 was killed"
    assert marks["recoveries"]["until"] - marks["recoveries"]["from"] == 4000
    assert "fault: host 1 was killed" in reader.texts
    assert "1, 2 steps lost" in reader.texts


def test_runs_side_by_side(run: Path, tmp_path: Path) -> None:
    old = without_measurements(run, tmp_path / "old")
    reader = page_of(material(run, "new"), material(old, "old"))
    assert {one["line"] for one in reader.specs["curve-loss"]["data"]["values"]} == {"new", "old"}
    assert [text for level, text in reader.headings if level == 2] == ["Overview", "Curves", "new", "old"]
    assert "Without measurements, faults are not known." in reader.text
    assert any(text.startswith("old: This run has no measurements") for text in reader.texts)


def test_tables_have_what_hosts_saw_of_their_rows(run: Path, tmp_path: Path) -> None:
    other = copied(run, tmp_path / "other")
    seen = [
        Measurement("table_trained_ratio", 0.525, {"table": "a"}),
        Measurement("table_row_norm", 0.375, {"table": "a", "quantile": "0.5"}),
        Measurement("table_row_norm", 77.5, {"table": "a", "quantile": "0.9"}),
    ]
    add_lines(other, a_point(13, *seen))
    text = page_of(material(other)).text
    for part in ("trained", "0.525", "median row norm", "0.375", "those of samples of rows"):
        assert part in text
    assert "77.5" not in text
    # Hosts look at their rows by the clock, so a run that took long enough has such lines by itself.
    unmeasured = without_measurements(run, tmp_path / "unmeasured")
    assert "samples of rows" not in page_of(material(unmeasured)).text


def test_series_and_lines_of_another_version(run: Path, tmp_path: Path) -> None:
    other = copied(run, tmp_path / "other")
    add_lines(
        other, *(a_point(step, Measurement("window_auc", 0.6), Measurement("heat", 2.0 * step)) for step in (13, 14))
    )
    segment = max((other / "metrics").glob("*/*.jsonl"))
    segment.write_text(segment.read_text() + "no json\n")
    reader = page_of(material(other))
    assert {"curve-window-auc", "curve-heat"} <= reader.specs.keys()
    assert "1 lines of measurements are damaged and left out." in reader.text


def commands(run: Path) -> dict[str, str]:
    """Those of a run whose job is a function."""
    read = material(run)
    assert read.description.record is not None
    record = replace(read.description.record, job_function="own.jobs:clicks", job_arguments='{"folder": "a b", "n": 2}')
    given = replace(read, description=replace(read.description, record=record))
    return {title: line for title, line, _ in commands_of(given)}


def test_commands_repeat_what_the_record_has(run: Path) -> None:
    lines = commands(run)
    assert lines["Resume"] == f"podembed resume {run} --hosts 1"
    assert lines["Reproduce"] == "podembed train --job own.jobs:clicks --set 'folder=\"a b\"' n=2 --hosts 1"
    assert lines["Serve"] == f"podembed export-model {run}@s000000012-g00000001 --out model"


@pytest.mark.parametrize(("number", "flag"), [(2, "2"), ((1, 4), "1-4")])
def test_commands_of_a_run_on_slices_name_them(run: Path, tmp_path: Path, number: Any, flag: str) -> None:
    other = copied(run, tmp_path / "other")
    scaling = ScalingConfig(topology="4x4", accelerator_type="TPU-V6E", num_slices=number, platform="cpu")
    add_lines(other, an_event("generation_started", "begun", {"slices": scaling.slice_fields}))
    lines = commands(other)
    words = f"--topology 4x4 --accelerator-type TPU-V6E --slices {flag} --platform cpu"
    assert lines["Resume"] == f"podembed resume {other} {words}"
    assert lines["Reproduce"].endswith(f" {words}")


def test_times_of_phases_do_not_depend_on_how_much_a_stream_was_thinned(run: Path, tmp_path: Path) -> None:
    sums = []
    for name, kept in (("all", 1), ("some", 7)):
        other = copied(run, tmp_path / name)
        shutil.rmtree(other / "metrics")
        seconds = Measurement("phase_seconds", 0.5, {"host": "0", "phase": "device"})
        add_lines(other, *(a_point(step, seconds) for step in range(1, 101) if step % kept == 1 % kept or step == 100))
        sums.append(phase_times(material(other)))
    assert sums == [{"0": {"device": pytest.approx(50.0)}}] * 2


@pytest.mark.parametrize(
    ("runs", "names"),
    [
        (["a/x", "b/y/"], ["x", "y"]),
        (["a/x", "b/x"], ["a/x", "b/x"]),
        (["a/x", "a/x"], ["x (1)", "x (2)"]),
    ],
)
def test_names_tell_runs_apart(runs: list[str], names: list[str]) -> None:
    assert distinct_names(runs) == names
