"""Vega-Lite, as the package `vl-convert-python` ships it: its programs for a page, and charts drawn without a browser.

It is the only part of a report that needs a package of its own, the extra `report`.
"""

from __future__ import annotations

import re
from typing import Any

from podembed.orchestrator.api.configuration_error import ConfigurationError

VERSION = "6.4"
"""The version of Vega-Lite."""


def _library() -> Any:
    """Raises `ConfigurationError` if it is not installed."""
    try:
        import vl_convert  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigurationError(
            "Found no package vl-convert-python, which draws the curves of a report. Expected it beside podembed. "
            "Install it: pip install 'podembed[report]'."
        ) from error
    return vl_convert


def programs() -> str:
    """JavaScript that defines `vegaEmbed`, safe within a script element."""
    text: str = _library().javascript_bundle(vl_version=VERSION)
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def drawn(spec: dict[str, Any]) -> str:
    """A chart as SVG, which grows with its place. It is seen until the browser draws the chart, and on paper.

    Raises:
      ValueError: the specification is none.
    """
    svg: str = _library().vegalite_to_svg(spec, vl_version=VERSION)
    return re.sub(r'(<svg[^>]*?) width="[\d.]+" height="[\d.]+"', r"\1", svg, count=1)
