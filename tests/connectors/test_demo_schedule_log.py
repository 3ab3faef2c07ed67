"""The log of vLLM's scheduler: written by one process, read by another while it grows."""

from pathlib import Path

from examples.demo.schedule_log import Item, ScheduleLog, Step

FIRST = Step(1, 300, ("0-abcd", "1-ef01"), (Item("0-abcd", "cat"),), (Item("1-ef01", "coffee"),))
SECOND = Step(2, 1, ("0-abcd",), (), ())


def test_a_step_survives_its_line() -> None:
    assert Step.from_line(FIRST.to_line()) == FIRST


def test_no_file_is_no_step(tmp_path: Path) -> None:
    log = ScheduleLog(tmp_path / "missing")
    assert log.steps() == []
    assert log.encoder_runs() == 0


def test_a_line_still_being_written_waits(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(FIRST.to_line() + SECOND.to_line()[:-9])
    log = ScheduleLog(path)
    assert log.steps() == [FIRST]
    path.write_text(FIRST.to_line() + SECOND.to_line())
    assert log.steps() == [FIRST, SECOND]


def test_only_encodes_count_as_runs(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(FIRST.to_line() + SECOND.to_line() + FIRST.to_line())
    assert ScheduleLog(path).encoder_runs() == 2


def test_images_are_found_by_the_id_without_its_random_suffix(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(FIRST.to_line())
    log = ScheduleLog(path)
    assert log.images("0") == [("encoded", Item("0-abcd", "cat"))]
    assert log.images("1") == [("loaded", Item("1-ef01", "coffee"))]
    assert log.images("0-abcd") == log.images("0")
    assert log.images("2") == []
