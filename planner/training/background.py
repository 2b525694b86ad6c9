"""Background: jobs that run one after another on a thread which is there only as long as there are any."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

Job = Callable[[], None]


class Background:
    """Runs jobs in the order they come. What a job raises goes to ``failed``, and the next job is run.

    The thread ends with its last job, on ``close()``, and when the main
    thread has ended: then the job under way is finished and no other begun.
    """

    def __init__(self, name: str, failed: Callable[[Exception], None]) -> None:
        self._name = name
        self._failed = failed
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, job: Job) -> None:
        """Run a job later; none is taken after ``close()``."""
        with self._changed:
            if self._closed:
                return
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name)
                self._thread.start()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until there is no job left; whether that came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout_seconds)

    def close(self) -> None:
        """Drop the jobs that have not begun, and wait for the one that has."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._jobs or not threading.main_thread().is_alive():
                    self._jobs.clear()
                    self._thread = None
                    self._changed.notify_all()
                    return
                job = self._jobs.popleft()
            with _Caught(self._failed):
                job()


class _Caught:
    """Hands an exception on: there is no caller on a thread of its own who could."""

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        self._failed = failed

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._failed(error)
        return True
