"""Models of papers on click logs: DLRM (Naumov et al., 2019) and DCN-V2 (Wang et al., 2021).

They are the job `criteo` with one model each. Data is read, hashed and prepared as there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from podembed import JobConfig
from podembed.jobs.criteo import criteo


def _criteo_with(model: str) -> Callable[..., JobConfig]:
    """The job `criteo` under the name of its model, with its other arguments."""

    def job(**arguments: Any) -> JobConfig:
        return replace(criteo(**arguments, model=model), name=model)

    declared = inspect.signature(criteo)
    parameters = [one for name, one in declared.parameters.items() if name != "model"]
    # What a command line and a record give are checked against it.
    job.__name__ = job.__qualname__ = model
    job.__signature__ = declared.replace(parameters=parameters)  # pyright: ignore[reportFunctionMemberAccess]
    return job


dlrm = _criteo_with("dlrm")
dcn_v2 = _criteo_with("dcn_v2")
