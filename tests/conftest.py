"""What all tests share: hypothesis without deadlines, for a busy machine is no failure, and without chance from run to
run.
"""

from hypothesis import settings

settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")
