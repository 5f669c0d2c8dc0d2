"""Other copies of OpenSSL in one process: both sides speak TLS, in either order, in threads, and the process ends."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from servers.certificates import make_certificates
from servers.http_faults import FaultyServer, Reply

# Each brings an OpenSSL or a relative of it, of the system or of its own; those that are installed are tried.
NEIGHBOURS = ("cryptography.hazmat.bindings._rust", "OpenSSL.SSL", "grpc", "psycopg2", "pycurl", "curl_cffi")
ORDERS = {
    "neighbours first": "load_neighbours(); load_ours()",
    "ours first": "load_ours(); load_neighbours()",
    "torch between": "load_ours(); import torch; load_neighbours()",
}
PROGRAM = """
import importlib
import os
import ssl
import sys
import threading
import urllib.request

url, authority, *names = sys.argv[1:]

def load_neighbours():
    for name in names:
        importlib.import_module(name)

def load_ours():
    global stream_io
    from tensorizer import stream_io

ORDER

def ours():
    options = stream_io.HTTPOptions(proxy="", retries=0)
    trust = stream_io.CAInfo(cacert=authority)
    return stream_io.open_stream(url, certificate_handling=trust, http_options=options).read()

def theirs():
    context = ssl.create_default_context(cafile=authority)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    return opener.open(url, timeout=60).read()
"""
BOTH = """
import time
read = []
tasks = len(os.listdir("/proc/self/task"))
threads = [threading.Thread(target=lambda f=f: read.append(f())) for f in (ours, theirs) * 4]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
# join() returns before a thread has ended. One that is in OpenSSL's handler for ending threads when the process forks
# leaves a lock behind that OpenSSL's handler for ending processes waits for, in the child, for ever.
while len(os.listdir("/proc/self/task")) > tasks:
    time.sleep(0.001)
child = os.fork()
if child == 0:
    sys.exit(0)  # the handlers of both sides run here too
print(len(read), set(read), os.waitpid(child, 0)[1])
"""
# The process ends while a read waits for bytes that never come.
UNFINISHED = """
import time
threading.Thread(target=ours, daemon=True).start()
time.sleep(0.3)
ssl.create_default_context(cafile=authority)
print("end")
"""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def installed() -> list[str]:
    return [name for name in NEIGHBOURS if importlib.util.find_spec(name.partition(".")[0])]


def run(program: str, order: str, server: FaultyServer, authority: object, folder: object) -> tuple[int, str, str]:
    text = PROGRAM.replace("ORDER", ORDERS[order]) + program
    command = [sys.executable, "-c", text, server.url, str(authority), *installed()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout.strip(), done.stderr


def test_tls_of_others_and_of_ours_work_in_one_process_whatever_was_imported_first(certificates, tmp_path):
    with FaultyServer(b"over https", tls=certificates.context()) as server:
        for order in ORDERS:
            found = run(BOTH, order, server, certificates.authority, tmp_path)
            assert found[:2] == (0, "8 {b'over https'} 0"), (order, installed(), found)


def test_a_process_ends_in_the_middle_of_a_read_beside_other_copies_of_openssl(certificates, tmp_path):
    with FaultyServer(b"x" * 1000, tls=certificates.context(), default=Reply(stall_after=10)) as server:
        for order in ORDERS:
            found = run(UNFINISHED, order, server, certificates.authority, tmp_path)
            assert found[:2] == (0, "end"), (order, installed(), found)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_processes_each_that_read_beside_other_copies_of_openssl_and_end_have_no_crash(certificates, tmp_path):
    stalling = Reply(stall_after=10)
    with (
        FaultyServer(b"over https", tls=certificates.context()) as server,
        FaultyServer(b"x" * 1000, tls=certificates.context(), default=stalling) as stalled,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        cases = [(BOTH, server, "8 {b'over https'} 0"), (UNFINISHED, stalled, "end")]
        runs = [(*case, order) for case in cases for order in itertools.islice(itertools.cycle(ORDERS), 50)]

        def found(case):
            program, peer, wanted, order = case
            result = run(program, order, peer, certificates.authority, tmp_path)
            return None if result[:2] == (0, wanted) else (order, installed(), result)

        assert [wrong for wrong in pool.map(found, runs) if wrong] == []
