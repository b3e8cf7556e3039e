"""Numbers as people read them."""

from __future__ import annotations

import pytest

from podembed.orchestrator.api.text import format_bytes, format_duration, format_rate, without_machinery


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 << 10, "1.5 MiB"),
        (3 << 29, "1.5 GiB"),
        (3 << 40, "3.0 TiB"),
        (1 << 60, "1024.0 PiB"),
    ],
)
def test_sizes(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


def test_rates() -> None:
    assert (format_rate(1234.4), format_rate(12_345_678)) == ("1,234", "12.3M")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (59.6, "1:00"),
        (200, "3:20"),
        (5025, "1:23:45"),
        (47 * 3600, "47:00:00"),
        (180_000, "2 d 2 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


REPORT = """\
ray::_DeviceActor.run() (pid=1)
           ^^^^^^^^
  File "/env/podembed/workers/actors.py", line 223, in run
    answer = super().run(method, *arguments)
             ^^^^^^^^^^^
           ^^^^^^^^
  File "/home/me/model.py", line 3, in apply
    return helper(x)
           ^^^^^^^^^
  File "/env/lib/python3.11/site-packages/flax/linen/module.py", line 9, in call
    return method()
  File "/env/lib/python3.11/site-packages/mine/layers.py", line 4, in helper
    return x @ y
  File "/usr/lib/python3.11/functools.py", line 5, in wrapper
    return function()
  File "/env/lib/python3.11/site-packages/jax/numpy.py", line 7, in matmul
    raise TypeError(
TypeError: shapes
    differ
--------------------
For simplicity, JAX has removed its internal frames from the traceback of the following exception.
a note"""


def test_tracebacks_show_the_users_frames_and_the_one_that_raised() -> None:
    assert without_machinery(REPORT).splitlines() == [
        "ray::_DeviceActor.run() (pid=1)",
        '  File "/home/me/model.py", line 3, in apply',
        "    return helper(x)",
        "           ^^^^^^^^^",
        '  File "/env/lib/python3.11/site-packages/mine/layers.py", line 4, in helper',
        "    return x @ y",
        '  File "/env/lib/python3.11/site-packages/jax/numpy.py", line 7, in matmul',
        "    raise TypeError(",
        "TypeError: shapes",
        "    differ",
        "a note",
    ]


def test_a_traceback_without_frames_of_the_user_stays_whole() -> None:
    ours = REPORT.replace("/home/me/", "/env/podembed/embedding/").replace("mine", "ray")
    assert without_machinery(ours) == ours
