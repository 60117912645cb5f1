"""Memory calls of a program under `sluice run`, from the preloaded gate through the pool to the (fake) driver."""

import json
import os
import sys
from pathlib import Path

import pytest

from launching import call

JOB = Path(__file__).with_name("driver_memory_job.py")
INVALID_VALUE, OUT_OF_MEMORY, NOT_SUPPORTED = 1, 2, 801  # CUresult
CHUNK = 64  # MiB
POOL = 8 * CHUNK  # MiB


def start(sluice, build, command, **environment):
    fake = build / "lib" / "fake_driver"
    return call(sluice, "run", "--backend", "cuda", "--memory", f"{POOL}MiB", "--require-pool", "--", *command,
                env={**os.environ, "LD_LIBRARY_PATH": str(fake), **environment})


@pytest.fixture
def job(sluice, build):
    done = start(sluice, build, [sys.executable, "-S", JOB])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_memory_is_answered_from_the_pool_and_told_as_it_is(job):
    said, complaints = job
    assert said["at first"] == [POOL, POOL]
    assert said["with 10 MiB"] == [POOL - 10, POOL]
    assert said["with an arena"] == [POOL - 10 - 2 * CHUNK, POOL]
    assert said["with an idle arena"] == [POOL - 10, POOL]
    assert said["after all"] == [POOL, POOL]
    assert said["all that is free"] == 0
    assert said["nothing left"] == [0, POOL]

    assert said["too much"] == [OUT_OF_MEMORY] * 2
    assert complaints.count("sluice: cannot get 1 TiB of persistent memory: of the pool's 512 MiB this job holds ") == 1

    assert said["small"]["results"] == [0] * 100
    assert said["small"]["bytes"] <= said["small"]["held"] * (1 << 20) <= said["small"]["bytes"] + (2 << 20)
    assert said["small freed"] == [POOL, POOL]


def test_the_devices_size_is_the_pools_before_there_is_a_context_and_ever_after(job):
    said, _ = job
    assert said["totals"] == [POOL, POOL, POOL]


def test_managed_pinned_and_stream_ordered_memory_is_the_drivers(job):
    said, complaints = job
    assert said["other memory"] == [0] * 4
    assert said["beside other memory"] == [POOL, POOL]
    assert complaints.count("this process takes memory with cudaMallocAsync") == 1


def test_what_outlives_its_commit_keeps_its_arena_and_no_chunk_more(job):
    said, _ = job
    assert said["generations"] == 1
    assert said["kept"] == [POOL - 4 * CHUNK, POOL]
    assert said["kept in part"] == [POOL - 3 * CHUNK, POOL]
    assert said["kept no more"] == [POOL, POOL]


def test_freeing_memory_leaves_captures_of_other_threads_alone(job):
    said, _ = job
    assert said["capture"] == 0
    assert said["freed beside a capture"] == [POOL, POOL]


def test_memory_is_freed_in_a_streams_order_but_not_by_a_capture(job):
    said, _ = job
    free, within, freed_before, by_capture, by_thread = said["freed in order"]
    assert (free, within, freed_before, by_thread) == (0, INVALID_VALUE, INVALID_VALUE, 0)
    assert by_capture != 0
    assert said["beside what was freed in order"] == [POOL - 10, POOL]
    assert said["after what was freed in order"] == [POOL, POOL]


def test_pool_memory_has_no_ipc_handle_and_that_is_said_once(job):
    said, complaints = job
    assert said["handles"] == [NOT_SUPPORTED] * 3
    assert complaints.count("cuIpcGetMemHandle") == 1
    assert "send tensor.cpu()" in complaints


def test_pool_memory_is_reached_by_no_handle_and_by_no_other_device(job):
    said, complaints = job
    assert said["ways"] == [[INVALID_VALUE] * 5 + [NOT_SUPPORTED]] * 3
    assert complaints.count("cuMemGetHandleForAddressRange") == 1


def test_memory_that_a_program_makes_itself_has_its_handles(job):
    said, _ = job
    retained, _, mapped_twice, access, unmapped, range_of_unmapped = said["own"]
    assert (retained, mapped_twice, access, unmapped, range_of_unmapped) == (0, INVALID_VALUE, 0, 0, INVALID_VALUE)


@pytest.mark.parametrize("setting", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_a_job_whose_memory_would_lie_outside_the_pool_is_not_started(sluice, build, setting):
    done = start(sluice, build, ["echo", "started"], PYTORCH_CUDA_ALLOC_CONF=setting)
    assert done.returncode == 125
    assert done.stdout == ""
    assert f"PYTORCH_CUDA_ALLOC_CONF has {setting}" in done.stderr


def test_a_pool_on_the_host_does_not_mind_settings_for_cuda(sluice):
    done = call(sluice, "run", "--backend", "host", "--memory", "16MiB", "--require-pool", "--", "echo", "started",
                env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert (done.returncode, done.stdout) == (0, "started\n")
