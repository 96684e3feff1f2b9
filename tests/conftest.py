"""What all tests share: one thread of torch, and hypothesis without deadlines, for a busy machine is no failure, and
without chance from run to run.
"""

import torch
from hypothesis import settings

# the bits of a sum follow its threads, and replicas have one; two workers of pytest with two each would fight, too
torch.set_num_threads(1)
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")
