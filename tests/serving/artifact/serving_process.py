"""Scores columns with exports, in a process that has none of our packages: arguments are a folder of columns, then
exports. Prints nothing; writes `scores-<n>.npz` for each.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

BLOCKED = {"podembed", "ray", "optax", "flax", "pyarrow", "numba", "fsspec", "google_crc32c", "tyro", "pandas"}


class Blocker:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is not there", name=name)


def main() -> None:
    sys.meta_path.insert(0, Blocker())  # pyright: ignore[reportArgumentType]
    import numpy as np

    folder, *exports = map(Path, sys.argv[1:])
    columns = json.loads((folder / "columns.json").read_text())
    columns["seen"] = np.array(columns["seen"], "datetime64[us]")
    columns["item"] = np.array(columns["item"])
    for number, export in enumerate(exports):
        spec = importlib.util.spec_from_file_location("served_model", export / "served_model.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        model = module.load(str(export), reads_tables=True)
        given = {name: columns[name] for name in model.columns}
        np.savez(folder / f"scores-{number}.npz", predict=model.predict(given), **model.outputs(given))
    assert not BLOCKED & {name.partition(".")[0] for name in sys.modules}


if __name__ == "__main__":
    main()
