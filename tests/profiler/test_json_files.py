"""Files are written whole; what is no file is written into, never replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from profiler.json_files import check_writable, read_document, write_document, write_whole


def test_of_a_link_what_it_points_to_is_replaced(tmp_path):
    (tmp_path / "plan.json").write_text("old")
    (tmp_path / "latest.json").symlink_to("plan.json")
    write_whole(tmp_path / "latest.json", "new")
    assert (tmp_path / "latest.json").is_symlink() and (tmp_path / "plan.json").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "plan.json"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_into_a_pipe_the_content_is_written(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_whole(pipe, "content")
    reader.join(timeout=10)
    assert read == ["content"] and pipe.is_fifo()


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_a_file_keeps_its_mode_and_a_new_one_has_what_the_umask_leaves(tmp_path):
    secret, link, new = tmp_path / "secret.json", tmp_path / "link.json", tmp_path / "new.json"
    secret.touch(0o600)
    link.symlink_to(secret)
    for path in (link, new):
        check_writable(path)
        write_whole(path, "content")
    assert secret.stat().st_mode & 0o777 == 0o600 and new.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "new.json", "secret.json"]


KILLED = """
import os, sys
from profiler import json_files
held = json_files._beside(json_files.Path(sys.argv[1]))
print(held[1], flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such locks")
def test_what_a_killed_run_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path):
    target = tmp_path / "plan.json"
    (tmp_path / "plan.json.notes.part").touch()  # The user's.
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        part = Path(run.stdout.readline().strip())
        write_whole(target, "first")
        assert part.exists()
        run.send_signal(signal.SIGKILL)
    assert part.exists()
    write_whole(target, "second")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "plan.json.notes.part"]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (10**30, "numbers up to 2"),
        (-1e308, "numbers up to 2"),
        (float("nan"), "finite"),
        ("\x1b[31m", "plain characters at field"),
        ({"\u202e": 1}, "plain characters"),
        ("\ud800", "plain characters"),
    ],
)
def test_what_no_part_of_the_planner_writes_is_refused(tmp_path, value, said):
    path = tmp_path / "file.json"
    path.write_text(json.dumps({"format": "f", "version": 1, "field": value}))
    with pytest.raises(ValueError, match=said) as caught:
        read_document(path, {"f": 1})
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("depth", [900, 100_000])
def test_deep_nesting_is_refused(tmp_path, depth):
    path = tmp_path / "file.json"
    path.write_text('{"format": "f", "version": 1, "field": ' + "[" * depth + "]" * depth + "}")
    with pytest.raises(ValueError, match="nest"):
        read_document(path, {"f": 1})


def test_line_breaks_in_reasons_are_text(tmp_path):
    write_document(tmp_path / "file.json", document := {"format": "f", "version": 1, "reason": "a\n\tb [/] \u05d0"})
    assert read_document(tmp_path / "file.json", {"f": 1}) == document


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_devices_and_pipes_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", tmp_path / "pipe"):
        with pytest.raises(ValueError, match="a device or a pipe"):
            read_document(path, {"f": 1})
