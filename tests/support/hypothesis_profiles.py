"""How many examples Hypothesis tries: few in every run, many in the part `examples`.

`HYPOTHESIS_PROFILE=long` chooses the many. A test that needs another number than Hypothesis' own
says by `examples` how many it needs of the usual 100.
"""

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

ENVIRONMENT = "HYPOTHESIS_PROFILE"
FACTORS = {"quick": 0.25, "long": 5.0}
_USUAL = 100


def load_profile() -> None:
    """How long an example takes depends on who else uses the machine: no deadline."""
    for name in FACTORS:
        settings.register_profile(
            name,
            parent=settings(),
            max_examples=_number(_USUAL, name),
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        )
    settings.load_profile(profile())


def build_character_table() -> None:
    """In a new clone Hypothesis builds it once, which takes seconds. Call it before the workers
    start: else the first test with a text pays for it."""
    st.characters(codec="utf-8").validate()


def examples(usual: int) -> int:
    """`max_examples` of a test, by the profile: a quarter of `usual` in each run, or five times."""
    return _number(usual, profile())


def profile() -> str:
    """The one that is loaded: "quick" or "long"."""
    return os.environ.get(ENVIRONMENT, "quick")


def _number(usual: int, profile: str) -> int:
    return max(1, int(usual * FACTORS[profile]))
