"""The page `docs/from-tpuembedding.md` runs from top to bottom, in one process and on two hosts."""

from pathlib import Path

import numpy as np
import pytest

from podembed.embedding.tf.replicas.strategies import LocalStrategy
from tests.long_tests import is_long
from tests.pages import blocks

PAGE = Path(__file__).parents[2] / "docs" / "from-tpuembedding.md"
BEGINNING = 'strategy = LocalStrategy()\nfolder = "saved"\n'


def run_page(strategy, folder):
    """Runs all blocks as one program. Functions are taken for those of a script, so that they travel by value."""
    namespace = {"__name__": "__main__"}
    first, *others = blocks("docs/from-tpuembedding.md")
    assert first.code.endswith(BEGINNING)
    first.run(namespace)
    namespace |= {"strategy": strategy, "folder": str(folder)}
    for block in others:
        block.run(namespace)
    return namespace


def test_in_one_process(tmp_path):
    found = run_page(LocalStrategy(), tmp_path / "saved")
    assert 0.5 < found["training_loss"] < 0.72
    assert 0 < found["num_right"] <= 48
    assert np.all(np.diff(found["losses_of_strongest"]) < 0), "the rows of the largest numbers are trained"
    assert found["last_losses"][:2] == found["first_losses"][10:]
    saved = sorted(path.name for path in (tmp_path / "saved-checkpoints").iterdir())
    assert saved == ["ckpt-1", "ckpt-2", "ckpt-3"]


@is_long
@pytest.mark.ray
def test_on_two_hosts_with_the_same_numbers(tmp_path, pod_strategy):
    alone = run_page(LocalStrategy(), tmp_path / "alone")
    together = run_page(pod_strategy, tmp_path / "together")
    np.testing.assert_allclose(together["training_loss"], alone["training_loss"], rtol=1e-5)
    assert together["num_right"] == alone["num_right"]
    np.testing.assert_allclose(together["losses_of_strongest"], alone["losses_of_strongest"], rtol=1e-5)
    np.testing.assert_allclose(together["last_losses"], alone["last_losses"], rtol=1e-5)
    for one, other in zip(alone["tables"].values(), together["tables"].values(), strict=True):
        np.testing.assert_allclose(one.value, other.value, rtol=1e-5, atol=1e-6)


def test_every_public_difference_is_listed():
    text = PAGE.read_text(encoding="utf-8")
    for word in (
        "invalid_ids",
        "int64",
        "RuntimeError",
        "FTRL",
        "weight decay",
        "seed, table and row",
        "use_gradient_accumulation",
    ):
        assert word in text
