"""Dense halves of the jobs: from activations and dense features to logits.

`DLRM`, `DCNv2`, `FM`, `DeepFM`, `DIN`, `SASRec`, `HSTU`, `TwoTowers`, `MMoE` and `PLE` are public names. Read
`dlrm.py` first; `interaction.py` is the product of features that it shares with others.
"""

from podembed.jobs.models.dcn_v2 import DCNv2
from podembed.jobs.models.din import DIN
from podembed.jobs.models.dlrm import DLRM
from podembed.jobs.models.factorization import FM, DeepFM
from podembed.jobs.models.hstu import HSTU
from podembed.jobs.models.mmoe import MMoE
from podembed.jobs.models.ple import PLE
from podembed.jobs.models.sasrec import SASRec
from podembed.jobs.models.two_towers import TwoTowers

__all__ = ["DIN", "DLRM", "FM", "HSTU", "PLE", "DCNv2", "DeepFM", "MMoE", "SASRec", "TwoTowers"]
