"""What all tests share."""

import os

from hypothesis import settings

# No deadlines: machines are shared, and a slow example is not a wrong one.
settings.register_profile("quick", deadline=None)
settings.register_profile("thorough", deadline=None, max_examples=2_000)
settings.load_profile(os.environ.get("KVALLOC_HYPOTHESIS", "quick"))
