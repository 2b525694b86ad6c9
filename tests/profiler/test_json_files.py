"""Files are written whole; what is no file is written into, never replaced."""

from __future__ import annotations

import os
import threading

import pytest

from profiler.json_files import write_whole


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
