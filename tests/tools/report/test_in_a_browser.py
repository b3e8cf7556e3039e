"""The page of a report in a real Chromium: it draws, folds, zooms and prints, and its console stays empty.

A long test. Debian's package `chromium` is enough. It is driven by its own protocol over one socket.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from podembed.tools.report.material import read_material
from podembed.tools.report.page import render_report
from tests.long_tests import is_long
from tests.tools.report.runs import a_fault, add_lines, trained_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Labels of the axes, in any order.
DOMAIN = "[...document.querySelectorAll('#curve-loss .role-axis-label text')].map(t => t.textContent).sort().join(' ')"
pytestmark = [
    is_long,
    pytest.mark.skipif(CHROMIUM is None, reason="found no Chromium; install Debian's package chromium"),
]


class Tab:
    """One page of a browser. Mutated: what its console said."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self.said: list[str] = []
        self.requested: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            answer = await self._socket.receive_json(timeout=120)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _note(self, told: dict[str, Any]) -> None:
        if told["method"] in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.said.append(json.dumps(told["params"]))
        if told["method"] == "Network.requestWillBeSent":
            self.requested.append(told["params"]["request"]["url"])

    async def value(self, expression: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str) -> None:
        for _ in range(600):
            if await self.value(expression):
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"never true: {expression}; the console said {self.said}")

    async def open(self, url: str, *, width: int = 1200, dark: bool = False) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && typeof vegaEmbed === 'function'")
        await self.until("document.querySelectorAll('#curve-loss[data-drawn] .vega-embed svg').length === 1")

    async def shot(self) -> bytes:
        return base64.b64decode((await self.call("Page.captureScreenshot"))["data"])


def in_a_browser(folder: Path, steps: Callable[[Tab], Awaitable[None]]) -> None:
    """Runs steps in a page of a fresh browser, and ends it."""

    async def run() -> None:
        process = subprocess.Popen(
            [
                str(CHROMIUM),
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--remote-debugging-port=0",
                f"--user-data-dir={folder}",
                "about:blank",
            ],
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        try:
            file = folder / "DevToolsActivePort"
            for _ in range(1200):
                if file.exists() and len(file.read_text().splitlines()) == 2:
                    break
                assert process.poll() is None
                await asyncio.sleep(0.1)
            port = file.read_text().splitlines()[0]
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    pages = [one for one in await answer.json() if one["type"] == "page"]
                async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    await steps(Tab(socket))
        finally:
            process.terminate()
            process.wait(60)

    asyncio.run(run())


@pytest.fixture(scope="module")
def url(small_data: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("shown")
    runs = [trained_run(small_data, folder, name=name) for name in ("one", "two")]
    add_lines(runs[0], *a_fault("host 1 was killed"))
    materials = [read_material(str(run), name=run.name, now_unix_s=2e9) for run in runs]
    file = folder / "report.html"
    file.write_text(render_report(materials, version="1.2.3", now_unix_s=2e9))
    return file.as_uri()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "browser"


def num_colours(png: bytes) -> int:
    """Distinct bytes in the rows of a PNG: an empty page has a few."""
    assert png.startswith(b"\x89PNG")
    at, packed = 8, b""
    while at < len(png):
        size = int.from_bytes(png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            packed += png[at + 8 : at + 8 + size]
        at += 12 + size
    return len(set(zlib.decompress(packed)))


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (390, False)])
def test_it_draws_without_a_word_and_without_network(url: str, folder: Path, width: int, dark: bool) -> None:
    async def steps(tab: Tab) -> None:
        await tab.open(url, width=width, dark=dark)
        assert num_colours(await tab.shot()) > 60
        assert await tab.value("document.documentElement.scrollWidth <= innerWidth + 1"), "the page is too wide"
        paper = await tab.value("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(18, 23, 28)" if dark else "rgb(255, 255, 255)")
        # All charts are drawn as they come into sight.
        await tab.value("document.querySelectorAll('details').forEach(one => one.open = true)")
        await tab.until(
            "(() => { const left = [...document.querySelectorAll('figure.drawn:not([data-drawn])')];"
            " if (left.length) left[0].scrollIntoView(); return !left.length; })()"
        )
        assert tab.said == []
        assert [one for one in tab.requested if not one.startswith(("file:", "data:"))] == []

    in_a_browser(folder, steps)


def test_it_zooms_and_folds(url: str, folder: Path) -> None:
    async def steps(tab: Tab) -> None:
        await tab.open(url)
        await tab.until("!document.querySelector('#curve-loss .zoom').hidden")
        whole = await tab.value(DOMAIN)
        await tab.value("document.querySelector('#curve-loss [data-act=in]').click()")
        await tab.until(f"{DOMAIN} !== {json.dumps(whole)}")
        await tab.value("document.querySelector('#curve-loss [data-act=all]').click()")
        await tab.until(f"{DOMAIN} === {json.dumps(whole)}")
        heights = "[...document.querySelectorAll('details.part')].map(one => one.open)"
        await tab.value("document.querySelector('[data-fold=close]').click()")
        assert not any(await tab.value(heights))
        await tab.value("document.querySelector('[data-fold=open]').click()")
        assert all(await tab.value(heights))
        printed = base64.b64decode((await tab.call("Page.printToPDF"))["data"])
        assert printed.startswith(b"%PDF")
        assert tab.said == []

    in_a_browser(folder, steps)


def test_a_browser_without_scripts_sees_the_curves(url: str, folder: Path) -> None:
    async def steps(tab: Tab) -> None:
        await tab.call("Emulation.setScriptExecutionDisabled", value=True)
        await tab.call("Page.enable")
        await tab.call("Page.navigate", url=url)
        await tab.until("document.readyState === 'complete' && document.querySelectorAll('figure svg').length > 3")
        assert await tab.value("document.querySelectorAll('[data-drawn]').length") == 0
        assert num_colours(await tab.shot()) > 60

    in_a_browser(folder, steps)
