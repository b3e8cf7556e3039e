"""Jobs compiled by the TPU's own compiler."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from podembed.jobs.cli.main import main
from podembed.orchestrator.api.config import ConfigurationError
from podembed.tools.preflight import compiling
from podembed.tools.preflight.compiling import compile_for, require_libtpu
from podembed.tools.preflight.slices import parse_slice
from podembed.tools.preflight.text import flaws, problems, render
from podembed.workers.device.options import DeviceOptions
from podembed.workers.job.reference import JobReference
from tests.long_tests import long_case
from tests.tools.preflight.compiled import FEW, MANY, ROOT, STORED, figures, version

HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None
needs_libtpu = pytest.mark.skipif(not HAS_LIBTPU, reason="no libtpu: pip install -e '.[tpu]' (Linux on x86-64)")
ODD = "tests.tools.preflight.odd_jobs:linear"
TOLERANCE = 0.1


def job(**arguments: Any) -> JobReference:
    return JobReference(function=ODD, arguments=arguments, folder=str(ROOT))


def numbers(values: Any, at: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(values, dict):
        for name, value in values.items():
            yield from numbers(value, f"{at}/{name}")
    elif isinstance(values, list):
        for place, value in enumerate(values):
            yield from numbers(value, f"{at}/{place}")
    else:
        yield at, float(values)


@needs_libtpu
@pytest.mark.parametrize("name", [*FEW, *(long_case(name) for name in MANY)])
def test_programs_stay_as_good_as_they_were(name: str) -> None:
    accounts = (FEW | MANY)[name].accounts()
    for account in accounts:
        assert not account.failures
        assert {program.name.split()[0] for program in account.programs} == {"forward", "train"}
        assert problems(account) == flaws(account) == []
    stored = json.loads(STORED.read_text(encoding="utf-8")).get(version())
    if stored is None:
        return  # another compiler: that it compiles is all that can be said
    found = {one.wanted.name: {program.name: figures(program) for program in one.programs} for one in accounts}
    before, now = dict(numbers(stored[name])), dict(numbers(found))
    assert before.keys() == now.keys()
    # A page of memory is no change for the worse.
    moved = {at: (before[at], now[at]) for at in before if abs(now[at] - before[at]) > TOLERANCE * before[at] + 4096}
    assert not moved, "if that is meant, store the figures anew: python -m tests.tools.preflight.compiled"


@needs_libtpu
def test_a_command_tells_what_a_slice_would_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(ROOT)
    dump = tmp_path / "texts"
    command = ["compile", "--job", ODD, "--topology", "v6e-16", "--json", "--dump", str(dump)]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 0
    (found,) = json.loads(capsys.readouterr().out)["slices"]
    assert (found["num_devices"], found["num_hosts"], found["samples_per_device"]) == (16, 4, 4)
    train = next(program for program in found["programs"] if program["program"] == "train")
    assert train["bound_s"] == max(train["least_seconds"].values()) > 0
    assert train["memory_bytes"] < found["device_memory_bytes"]
    assert [(one["kind"], one["group"]) for one in train["collectives"]] == [("all-reduce", 16)]
    # Two features of 128 float32 for each of 4 samples; back come their gradients. Each array is whole tiles.
    assert train["to_host_bytes"] >= 2 * 4 * 128 * 4
    assert sorted(path.name for path in dump.iterdir()) == [
        f"v6e-4x4-{name}.{kind}.txt" for name in ("forward", "train") for kind in ("compiled", "stablehlo")
    ]
    assert "all-reduce" in (dump / "v6e-4x4-train.compiled.txt").read_text(encoding="utf-8")


@needs_libtpu
def test_what_slows_a_step_is_named_and_runs_all_the_same() -> None:
    (account,) = compile_for(job(kind="float64 and a callback"), [parse_slice("v6e:2x2")], environ=os.environ)
    assert problems(account) == []
    for said in ("a call to the host", "float64: "):
        found = [flaw.partition(said)[0] for flaw in flaws(account) if said in flaw]
        assert found == ["forward contains ", "train contains "]


@needs_libtpu
def test_what_does_not_fit_is_told_with_what_takes_the_memory() -> None:
    slices = [parse_slice("v5e:2x2"), parse_slice("v5p:2x2x1")]
    # Wide rows: the compiler takes the longer the more samples there are.
    small, large = compile_for(job(dim=4096, batch_size=1 << 21), slices, environ=os.environ)
    assert "RESOURCE_EXHAUSTED" in small.failures["train"]
    *_, remedy = problems(small)
    assert "The rest comes from 524,288 samples a device. Use a smaller batch" in remedy
    assert "does not compile" in render([small])
    assert large.programs


@needs_libtpu
def test_tables_go_to_the_chips_while_there_is_room() -> None:
    """Each of the two tables takes 12 GiB of a chip, where tables may take 16."""
    (account,) = compile_for(job(place="auto", rows=50_000_000), [parse_slice("v6e:2x2")], environ=os.environ)
    assert problems(account) == []
    sizes = "12,219 MiB on each of 4 x TPU v6 lite, where {} MiB are left for tables"
    assert account.places == {
        "a": ("sharded", f"place='auto': {sizes.format('16,384')}"),
        "b": ("host", f"place='auto': {sizes.format('4,166')}"),
    }
    assert f"\n  b on hosts: {account.places['b'][1]}\n  a on devices: " in render([account])
    # What was said of a table is what the program takes of the chip.
    assert account.table_bytes == pytest.approx(12_219 << 20, rel=1e-3)
    train = next(program for program in account.programs if program.name == "train")
    assert train.argument_bytes == pytest.approx(account.table_bytes, rel=1e-2)


@needs_libtpu
def test_a_compiler_that_ends_its_process_is_told() -> None:
    with pytest.raises(ConfigurationError, match=r"ended before its time\.\nit was ended by SIGABRT"):
        compile_for(job(kind="killed"), [parse_slice("v6e:2x2")], environ=os.environ)


@needs_libtpu
def test_what_a_slice_cannot_have_is_told_beside_the_others() -> None:
    options = DeviceOptions(mesh=(("data", 4), ("model", 2)))
    slices = [parse_slice("v6e:2x4", num_hosts=2), parse_slice("v6e:2x4")]
    four, eight = compile_for(job(), slices, options=options, environ=os.environ)
    assert problems(four)[0].startswith("Found 4 x TPU v6 lite on a host and mesh=data=4,model=2")
    # What is refused takes nothing from the others.
    assert problems(eight) == []
    assert {program.name for program in eight.programs} == {"forward", "train"}


@needs_libtpu
def test_more_hosts_than_training_takes_are_refused_in_its_words() -> None:
    (many,) = compile_for(job(), [parse_slice("v5e:16x16")], environ=os.environ)
    assert problems(many)[0].startswith("Found 64 hosts for the 16 lanes of job 'linear'")
    assert problems(many)[0] in render([many])


def test_without_the_compiler_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None if name == "libtpu" else find(name))
    with pytest.raises(ConfigurationError, match=r"Found no libtpu.*pip install 'podembed\[tpu\]'"):
        require_libtpu()
