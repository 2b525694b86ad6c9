"""Jobs that run one after another on one thread, beside training."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

Job = Callable[[], None]


class Background:
    """Runs jobs in the order they come. What a job raises goes to ``failed``, and the next job is run.

    The thread stays until ``close()``.

    When the main thread has ended the job under way is finished and no other begun: an executor finishes all that it
    was given before the program ends, so it is given one job at a time.
    """

    def __init__(self, name: str, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._waiting: deque[Job] = deque()
        self._running: Future[None] | None = None
        self._closed = False
        self._changed = threading.Condition()

    def submit(self, job: Job) -> None:
        """Run a job later; none is taken after ``close()``."""
        with self._changed:
            if self._closed:
                return
            self._waiting.append(job)
            if self._running is None:
                self._begin()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until there is no job left; whether that came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._running is None, timeout_seconds)

    def close(self) -> None:
        """Drop the jobs that have not begun, wait for the one that has, and end the thread."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
        self._executor.shutdown()

    def _begin(self) -> None:
        self._running = self._executor.submit(self._waiting.popleft())
        self._running.add_done_callback(self._done)

    def _done(self, job: Future[None]) -> None:
        if (error := job.exception()) is not None:
            self._failed(error)
        with self._changed:
            self._running = None
            try:
                if self._waiting:
                    self._begin()
            except RuntimeError:  # The program is ending: an executor takes nothing then.
                self._waiting.clear()
            self._changed.notify_all()
