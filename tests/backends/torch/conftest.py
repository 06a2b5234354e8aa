"""PyTorch is part of the extra `dev`: without it these tests fail and are never skipped, so that
continuous integration cannot lose the second oracle unseen.
"""

from __future__ import annotations

import torch

# A model this small gains nothing from threads, and the machine may be shared.
torch.set_num_threads(1)
