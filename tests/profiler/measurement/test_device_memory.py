"""Host room: what the host may hold, by the machine and by its control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiler.measurement.device_memory import available_host_bytes

FREE = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    600 kB\n"


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/meminfo": FREE}, 600 * 1024),
        ({"proc/meminfo": FREE, "proc/self/cgroup": "0::/\n"}, 600 * 1024),
        (
            {
                "proc/meminfo": FREE,
                "proc/self/cgroup": "0::/outer/inner\n",
                "sys/fs/cgroup/outer/inner/memory.max": "max\n",
                "sys/fs/cgroup/outer/inner/memory.current": "5\n",
                "sys/fs/cgroup/outer/memory.max": "4096\n",
                "sys/fs/cgroup/outer/memory.current": "1096\n",
            },
            3000,
        ),
        (
            {
                "proc/meminfo": FREE,
                "proc/self/cgroup": "9:name=systemd:/\n4:memory:/jobs/1\n3:cpuset:/\n0::/\n",
                "sys/fs/cgroup/memory/jobs/1/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/jobs/1/memory.usage_in_bytes": "10\n",
                "sys/fs/cgroup/memory/jobs/memory.limit_in_bytes": "500\n",
                "sys/fs/cgroup/memory/jobs/memory.usage_in_bytes": "700\n",
            },
            0,
        ),
        (
            {
                "proc/meminfo": FREE,
                "proc/self/cgroup": "0::/job\n",
                "sys/fs/cgroup/job/memory.max": "4096\n",
                "sys/fs/cgroup/job/memory.current": "4000\n",
                "sys/fs/cgroup/job/memory.stat": "anon 900\nfile 3100\ninactive_file 2500\nactive_file 500\n",
            },
            3096,
        ),
        (
            {
                "proc/meminfo": FREE,
                "proc/self/cgroup": "4:memory:/job\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "4096\n",
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "4000\n",
                "sys/fs/cgroup/memory/job/memory.stat": "inactive_file 7\ntotal_inactive_file 2\ntotal_active_file 1\n",
            },
            99,
        ),
    ],
    ids=[
        "machine",
        "no limit",
        "version 2, outer group",
        "version 1, full",
        "version 2, pages of files",
        "version 1, pages of files",
    ],
)
def test_host_memory_is_what_is_free_and_allowed(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert available_host_bytes(machine(tmp_path, files)) == expected


def test_this_machine_tells_its_memory() -> None:
    found = available_host_bytes()
    assert found is None or found >= 0
