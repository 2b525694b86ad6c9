"""Background jobs: in order, on one thread, with their errors reported, and not in the way of the program's end."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from planner.training.plan_cache import Background


def test_jobs_run_in_order_on_one_other_thread() -> None:
    background, ran = Background("jobs", failed=lambda error: None), []
    for number in range(20):
        background.submit(lambda number=number: ran.append((number, threading.get_ident())))
    assert background.wait(60)
    assert [number for number, _ in ran] == list(range(20))
    threads = {thread for _, thread in ran}
    assert len(threads) == 1 and threading.get_ident() not in threads
    background.close()


def test_an_error_is_reported_and_the_next_job_runs() -> None:
    errors, ran = [], []
    background = Background("jobs", failed=errors.append)
    background.submit(lambda: ran.append(1 // 0))
    background.submit(lambda: ran.append("next"))
    assert background.wait(60)
    assert [type(error) for error in errors] == [ZeroDivisionError] and ran == ["next"]
    background.close()


def test_closing_waits_for_the_job_under_way_and_drops_the_others() -> None:
    background, ran = Background("jobs", failed=lambda error: None), []
    began, go = threading.Event(), threading.Event()

    def first() -> None:
        began.set()
        assert go.wait(60)
        ran.append("first")

    background.submit(first)
    background.submit(lambda: ran.append("second"))
    assert began.wait(60) and not background.wait(0.01)
    threading.Timer(0.1, go.set).start()
    background.close()
    background.submit(lambda: ran.append("third"))
    assert ran == ["first"] and background.wait(0)
    assert not any(thread.name.startswith("jobs") for thread in threading.enumerate())


@pytest.mark.slow
def test_at_the_end_of_the_program_no_further_job_begins() -> None:
    code = (
        "import threading, time\n"
        "from planner.training.plan_cache import Background\n"
        "background, began = Background('jobs', failed=print), threading.Event()\n"
        "background.submit(lambda: (began.set(), time.sleep(0.5), print('first')))\n"
        "background.submit(lambda: print('second'))\n"
        "began.wait()\n"
        "print('over')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["over", "first"] and done.stderr == ""
