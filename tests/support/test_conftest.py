"""What tests/conftest.py sees to for all tests."""

import gc


def test_a_full_collection_passes_over_what_is_there_anyway() -> None:
    """Otherwise each stops all threads for half a second, in the middle of what a test measures."""
    walked_over, passed_over = len(gc.get_objects()), gc.get_freeze_count()
    assert walked_over < passed_over
