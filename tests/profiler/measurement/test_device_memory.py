"""What the host may hold is what the machine has free, and its control groups allow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from profiler.measurement.device_memory import available_host_bytes, has_expandable_segments

FREE_BYTES = 600 * 1024


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, FREE_BYTES),
        ({"proc/self/cgroup": "0::/\n"}, FREE_BYTES),
        (
            {
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
                "proc/self/cgroup": "0::/job\n",
                "sys/fs/cgroup/job/memory.max": "4096\n",
                "sys/fs/cgroup/job/memory.current": "4000\n",
                "sys/fs/cgroup/job/memory.stat": "anon 900\nfile 3100\ninactive_file 2500\nactive_file 500\n",
            },
            3096,
        ),
        (
            {
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
def test_host_memory_is_what_is_free_and_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=FREE_BYTES))
    assert available_host_bytes(machine(tmp_path, files)) == expected


def test_this_machine_tells_its_memory() -> None:
    assert 0 <= available_host_bytes() <= psutil.virtual_memory().total


FREED = """
import contextlib, psutil, torch
from profiler.measurement.device_memory import large_blocks_mapped
torch.ones(2**22)  # from now on glibc has blocks of such a size in its heap
process = psutil.Process()
with {}:
    before = process.memory_info().rss
    held = [torch.ones(2**18) if n % 2 else torch.ones(2**14) for n in range(200)]
    del held[1::2]
    print(process.memory_info().rss - before < 20 * 2**20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc's malloc")
@pytest.mark.parametrize(("around", "goes_back"), [("large_blocks_mapped", True), ("contextlib.nullcontext", False)])
@pytest.mark.slow
def test_large_blocks_go_back_to_the_system_from_between_small_ones(around: str, goes_back: bool) -> None:
    command = [sys.executable, "-c", FREED.format(f"{around}()")]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == [str(goes_back)]


@pytest.mark.parametrize(
    ("backend", "segments", "expected"),
    [
        ("native", [{"is_expandable": False}, {"is_expandable": True}], True),
        ("native", [{"is_expandable": False}, {}], False),
        ("cudaMallocAsync", None, False),
    ],
)
def test_only_torchs_own_allocator_grows_segments(monkeypatch, backend, segments, expected):
    def snapshot() -> list[dict[str, bool]]:
        if segments is None:
            raise RuntimeError("cudaMallocAsync does not yet support snapshot()")
        return segments

    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    assert has_expandable_segments() is expected
