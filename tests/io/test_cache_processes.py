"""The cache of the node: several processes, some of which are killed."""

from __future__ import annotations

import signal
import time

import cache_tools
import pytest
import torch
from cache_tools import MIB, digest_of, entries, load, needs_nginx, result, same, sent, serving, tensors, write

from tensorizer import TensorDeserializer

environment, folder, start = cache_tools.environment, cache_tools.folder, cache_tools.start


# A unit of 8 MiB takes four seconds at the lower rate, longer than anybody waits for somebody who makes no progress.
@needs_nginx
@pytest.mark.parametrize(("rate", "processes", "nbytes"), [("8m", 4, 36 * MIB), ("2m", 3, 24 * MIB)], ids=["8m", "2m"])
def test_processes_that_start_together_share_what_they_read(tmp_path, folder, start, rate, processes, nbytes):
    with serving(tmp_path, f"limit_rate {rate};") as site:
        wanted = write(site.root / "m.tensors", tensors(nbytes))
        size = (site.root / "m.tensors").stat().st_size
        started = [start(f"{site.url}/m.tensors", folder) for _ in range(processes)]
        assert {result(process)[0] for process in started} == {digest_of(wanted)}
        assert sent(site.requests()) <= 1.25 * size


def begun(folder, process):
    """Waits until a process makes a copy."""
    while not entries(folder, "lock"):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


@needs_nginx
def test_a_load_that_is_interrupted_or_killed_leaves_no_copy_and_no_room_taken(tmp_path, folder, start):
    with serving(tmp_path, "limit_rate 1m;") as site:
        wanted = write(site.root / "m.tensors", tensors(24 * MIB))
        for how in (signal.SIGINT, signal.SIGKILL):
            process = start(f"{site.url}/m.tensors", folder)
            begun(folder, process)
            process.send_signal(how)
            process.communicate()
            assert entries(folder) == []
            assert sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file()) < MIB
    with serving(tmp_path) as site:
        assert same(load(f"{site.url}/m.tensors", folder)[0], wanted)
        assert load(f"{site.url}/m.tensors", folder)[1].cached_bytes_read >= 24 * MIB


@needs_nginx
def test_a_process_that_waits_for_one_that_is_killed_goes_on_itself(tmp_path, folder, start):
    with serving(tmp_path, "limit_rate 1m;") as site:
        wanted = write(site.root / "m.tensors", tensors(24 * MIB))
        first = start(f"{site.url}/m.tensors", folder)
        begun(folder, first)
        second = start(f"{site.url}/m.tensors", folder)
        second.stdout.readline()
        time.sleep(0.5)
        first.send_signal(signal.SIGKILL)
        first.communicate()
        digest, _, _ = result(second)
        assert digest == digest_of(wanted)
        found, file = load(f"{site.url}/m.tensors", folder)
        assert same(found, wanted)
        assert file.cached_bytes_read >= 24 * MIB


@needs_nginx
def test_a_process_that_is_stopped_is_not_waited_for_without_end(tmp_path, folder, start):
    with serving(tmp_path, "limit_rate 2m;") as site:
        wanted = write(site.root / "m.tensors", tensors(24 * MIB))
        first = start(f"{site.url}/m.tensors", folder)
        begun(folder, first)
        first.send_signal(signal.SIGSTOP)
        try:
            found, file = load(f"{site.url}/m.tensors", folder)
        finally:
            first.kill()
            first.communicate()
        assert same(found, wanted)
        assert file.cached_bytes_read == 0


@needs_nginx
def test_a_load_of_parts_does_not_wait_for_another_process(tmp_path, folder, start):
    with serving(tmp_path, "limit_rate 500k;") as site:  # most of a minute for the whole
        wanted = write(site.root / "m.tensors", tensors(24 * MIB))
        first = start(f"{site.url}/m.tensors", folder)
        begun(folder, first)
        try:
            with TensorDeserializer(
                f"{site.url}/m.tensors", device="cpu", lazy_load=True, stream_options={"cache": folder}
            ) as file:
                assert torch.equal(file.get_slice("t0")[:1000], wanted["t0"][:1000])
        finally:
            first.kill()
            first.communicate()
        assert entries(folder) == []


@needs_nginx
def test_a_process_that_is_killed_at_any_moment_leaves_nothing_wrong(tmp_path, folder, start):
    with serving(tmp_path, "limit_rate 20m;") as site:
        wanted = write(site.root / "m.tensors", tensors(24 * MIB))
        for round_number in range(6):
            uri = f"{site.url}/m.tensors?round={round_number}"
            process = start(uri, folder)
            while process.poll() is None and len(entries(folder, "lock")) <= round_number:
                time.sleep(0.001)
            time.sleep(0.03 * round_number)
            process.kill()
            process.communicate()
            found, _ = load(uri, folder, verify_hash=True)
            assert same(found, wanted)


@needs_nginx
def test_control_c_ends_the_wait_for_another_process(tmp_path, folder, start):
    with serving(tmp_path, "limit_rate 500k;") as site:  # many seconds for the whole, whoever reads it
        write(site.root / "m.tensors", tensors(24 * MIB))
        first = start(f"{site.url}/m.tensors", folder)
        begun(folder, first)
        program = """
            import sys, time
            from tensorizer import TensorDeserializer
            print("ready", flush=True)
            try:
                TensorDeserializer(sys.argv[1], device="cpu", stream_options={"cache": sys.argv[2]})
            except KeyboardInterrupt:
                print(time.monotonic(), flush=True)
        """
        second = start(f"{site.url}/m.tensors", folder, program)
        second.stdout.readline()
        time.sleep(1.0)
        second.send_signal(signal.SIGINT)
        begin = time.monotonic()
        (ended,) = result(second)
        first.kill()
        first.communicate()
        assert float(ended) - begin < 5, "it waited for the other process"
