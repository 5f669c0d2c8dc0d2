"""The cache of the node: several processes, some of which are killed."""

from __future__ import annotations

import signal
import time

import cache_tools
import pytest
from cache_tools import MIB, digest_of, entries, load, needs_nginx, result, same, sent, serving, start, tensors, write

environment, folder, site = cache_tools.environment, cache_tools.folder, cache_tools.site


# A unit of 8 MiB takes four seconds at the lower rate, longer than anybody waits for somebody who makes no progress.
@needs_nginx
@pytest.mark.parametrize(("rate", "processes", "nbytes"), [("8m", 4, 36 * MIB), ("2m", 3, 24 * MIB)], ids=["8m", "2m"])
def test_processes_that_start_together_share_what_they_read(tmp_path, folder, rate, processes, nbytes):
    with serving(tmp_path, f"limit_rate {rate};") as site:
        wanted = write(site.root / "m.tensors", tensors(nbytes))
        size = (site.root / "m.tensors").stat().st_size
        started = [start(f"{site.url}/m.tensors", folder) for _ in range(processes)]
        assert {result(process)[0] for process in started} == {digest_of(wanted)}
        assert sent(site.requests()) <= 1.25 * size


@needs_nginx
def test_a_load_that_is_interrupted_keeps_what_had_come(tmp_path, folder):
    with serving(tmp_path, "limit_rate 1m;") as site:  # eight seconds for a unit
        wanted = write(site.root / "m.tensors", tensors(24 * MIB))
        process = start(f"{site.url}/m.tensors", folder)
        while not entries(folder):
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        time.sleep(4)
        assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGINT)
        process.communicate()
        found, file = load(f"{site.url}/m.tensors", folder)
        assert same(found, wanted)
        assert file.cached_bytes_read >= 4 * MIB  # of three units, a third of which came


@needs_nginx
def test_who_waits_for_a_process_that_is_killed_goes_on_itself(tmp_path, folder):
    with serving(tmp_path, "limit_rate 1m;") as site:
        wanted = write(site.root / "m.tensors", tensors(48 * MIB))
        first = start(f"{site.url}/m.tensors", folder)
        while not entries(folder) or not any((entries(folder)[0] / "map").read_bytes()[66:]):
            assert first.poll() is None, first.communicate()
            time.sleep(0.02)
        second = start(f"{site.url}/m.tensors", folder)
        assert second.stdout is not None
        second.stdout.readline()
        time.sleep(0.5)
        first.send_signal(signal.SIGKILL)
        first.communicate()
        killed = time.monotonic()
        digest, _, ended = result(second)
        assert digest == digest_of(wanted)
        transfer = 48 / 6  # by six connections of 1 MiB/s each
        assert float(ended) - killed < 3 + transfer
        found, file = load(f"{site.url}/m.tensors", folder)
        assert same(found, wanted)
        assert file.cached_bytes_read >= 48 * MIB


@needs_nginx
def test_a_process_that_is_killed_at_any_moment_leaves_nothing_wrong(tmp_path, folder):
    with serving(tmp_path, "limit_rate 20m;") as site:
        wanted = write(site.root / "m.tensors", tensors(24 * MIB))
        for round_number in range(6):
            uri = f"{site.url}/m.tensors?round={round_number}"
            process = start(uri, folder)
            while process.poll() is None and len(entries(folder)) <= round_number:
                time.sleep(0.001)
            time.sleep(0.012 * round_number)
            process.kill()
            process.communicate()
            found, _ = load(uri, folder, verify_hash=True)
            assert same(found, wanted)


@needs_nginx
def test_control_c_ends_the_wait_for_another_process(tmp_path, folder):
    with serving(tmp_path, "limit_rate 100k;") as site:  # a quarter of a minute, or more
        write(site.root / "m.tensors", tensors(24 * MIB))
        first = start(f"{site.url}/m.tensors", folder)
        while not entries(folder):
            time.sleep(0.02)
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
        assert second.stdout is not None
        second.stdout.readline()
        time.sleep(1.0)
        second.send_signal(signal.SIGINT)
        begin = time.monotonic()
        (ended,) = result(second)
        first.kill()
        first.communicate()
        assert float(ended) - begin < 5, "it waited for the other process"
