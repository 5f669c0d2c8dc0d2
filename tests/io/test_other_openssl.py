"""Other copies of OpenSSL in one process: both sides speak TLS, in either order, in threads, and the process ends."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Optional

import pytest
from servers.certificates import Certificates, make_certificates
from servers.http_faults import FaultyServer, Reply
from servers.postgres_tls import postgres_over_tls

# Each brings an OpenSSL or a relative of it, of the system or of its own.
NEIGHBOURS = ("ssl", "cryptography", "OpenSSL", "grpc", "psycopg2", "pycurl", "curl_cffi")
ORDERS = {
    "neighbours first": "load_neighbours(); load_ours()",
    "ours first": "load_ours(); load_neighbours()",
    "torch between": "load_ours(); import torch; load_neighbours()",
}
# A function for each: what its users do with its OpenSSL. All give the same.
PROGRAM = """
import concurrent.futures
import datetime
import importlib
import io
import os
import socket
import sys
import threading
from pathlib import Path

url, authority, chain, key, postgres, *names = sys.argv[1:]
expected = b"over https"

def load_neighbours():
    for name in names:
        globals()[name] = importlib.import_module(name)
        for inside in {"OpenSSL": ["SSL"], "cryptography": ["x509"], "curl_cffi": ["requests"]}.get(name, []):
            importlib.import_module(f"{name}.{inside}")

def load_ours():
    global stream_io
    from tensorizer import stream_io

ORDER

def ours():
    options = stream_io.HTTPOptions(proxy="", retries=0)
    trust = stream_io.CAInfo(cacert=authority)
    return stream_io.open_stream(url, certificate_handling=trust, http_options=options).read()

def with_ssl():
    import urllib.request
    context = ssl.create_default_context(cafile=authority)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    return opener.open(url, timeout=60).read()

def with_cryptography():
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    made = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "neighbour")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(made.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1)).sign(made, hashes.SHA256())
    )
    certificate.verify_directly_issued_by(certificate)
    read = x509.load_pem_x509_certificate(Path(chain).read_bytes())
    read.verify_directly_issued_by(x509.load_pem_x509_certificate(Path(authority).read_bytes()))
    return expected

def with_OpenSSL():
    context = OpenSSL.SSL.Context(OpenSSL.SSL.TLS_CLIENT_METHOD)
    context.load_verify_locations(authority)
    context.set_verify(OpenSSL.SSL.VERIFY_PEER)
    host, _, path = url.partition("://")[2].partition("/")
    name, _, port = host.partition(":")
    with socket.create_connection((name, int(port))) as plain:
        plain.settimeout(None)
        connection = OpenSSL.SSL.Connection(context, plain)
        connection.set_connect_state()
        connection.do_handshake()
        connection.sendall(f"GET /{path} HTTP/1.1\\r\\nHost: {host}\\r\\nConnection: close\\r\\n\\r\\n".encode())
        answer = b""
        while not answer.endswith(expected):
            answer += connection.recv(65536)
    return answer[-len(expected):]

def with_grpc():
    method = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo", {"read": method}),))
        pair = (Path(key).read_bytes(), Path(chain).read_bytes())
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
        server.start()
        trust = grpc.ssl_channel_credentials(Path(authority).read_bytes())
        with grpc.secure_channel(f"127.0.0.1:{port}", trust, [("grpc.enable_http_proxy", 0)]) as channel:
            found = channel.unary_unary("/echo/read")(expected, timeout=60)
        server.stop(None).wait()
    return found

def with_psycopg2():
    connection = psycopg2.connect(
        host="127.0.0.1", port=postgres, user="u", dbname="d", sslmode="verify-full", sslrootcert=authority,
        sslcert="/absent", sslkey="/absent", gssencmode="disable", connect_timeout=60,
    )
    assert connection.info.ssl_in_use
    connection.close()
    return expected

def with_pycurl():
    content = io.BytesIO()
    handle = pycurl.Curl()
    for option, value in [
        (pycurl.URL, url), (pycurl.CAINFO, authority), (pycurl.PROXY, ""), (pycurl.WRITEDATA, content),
        (pycurl.NOSIGNAL, 1),
    ]:
        handle.setopt(option, value)
    handle.perform()
    handle.close()
    return content.getvalue()

def with_curl_cffi():
    with curl_cffi.requests.Session(trust_env=False) as session:
        return session.get(url, verify=authority, timeout=60).content

def theirs():
    (found,) = {globals()[f"with_{name}"]() for name in names}
    return found
"""
BOTH = """
import time
read = []
threads = [threading.Thread(target=lambda f=f: read.append(f())) for f in (ours, theirs) * 4]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
# join() returns before a thread has ended. One that is in OpenSSL's handler for ending threads when the process forks
# leaves a lock behind that OpenSSL's handler for ending processes waits for, in the child, for ever.
while {str(thread.native_id) for thread in threads} & set(os.listdir("/proc/self/task")):
    time.sleep(0.001)
child = os.fork()
if child == 0:
    sys.exit(0)  # the handlers of both sides run here too
print(len(read), set(read), os.waitpid(child, 0)[1])
"""
# The process ends while a read waits for bytes that never come.
UNFINISHED = """
import ssl
import time
threading.Thread(target=ours, daemon=True).start()
time.sleep(0.3)
ssl.create_default_context(cafile=authority)
print("end")
"""


class Peers(NamedTuple):
    """What the programs speak to."""

    certificates: Certificates
    https: FaultyServer
    stalling: FaultyServer
    postgres: int

    def run(self, program: str, order: str, names: list[str]) -> Optional[tuple[object, ...]]:
        """What is wrong with how `program` ended."""
        wanted = "end" if program is UNFINISHED else "8 {b'over https'} 0"
        text = PROGRAM.replace("ORDER", ORDERS[order]) + program
        server = self.stalling if program is UNFINISHED else self.https
        files = (self.certificates.authority, self.certificates.chain, self.certificates.key)
        command = [sys.executable, "-c", text, server.url, *map(str, files), str(self.postgres), *names]
        done = subprocess.run(command, cwd=files[0].parent, capture_output=True, text=True, timeout=120, check=False)
        found = (done.returncode, done.stdout.strip())
        return None if found == (0, wanted) else (order, names, *found, done.stderr)


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    certificates = make_certificates(tmp_path_factory.mktemp("certificates"))
    context = certificates.context()
    with (
        FaultyServer(b"over https", tls=context) as https,
        FaultyServer(b"x" * 1000, tls=context, default=Reply(stall_after=10)) as stalling,
        postgres_over_tls(context) as postgres,
    ):
        yield Peers(certificates, https, stalling, postgres)


def installed() -> list[str]:
    return [name for name in NEIGHBOURS if importlib.util.find_spec(name)]


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_a_neighbour_and_we_speak_tls_in_one_process_whoever_was_imported_first(peers, name):
    if name not in installed():  # which does not import it into this process
        pytest.skip(f"{name} is not installed")
    for order in ("neighbours first", "ours first"):
        assert not peers.run(BOTH, order, [name])


def test_all_neighbours_and_we_speak_tls_in_one_process_whoever_was_imported_first(peers):
    for order in ORDERS:
        assert not peers.run(BOTH, order, installed())


def test_a_process_ends_in_the_middle_of_a_read_beside_other_copies_of_openssl(peers):
    for order in ORDERS:
        assert not peers.run(UNFINISHED, order, installed())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_processes_each_that_read_beside_other_copies_of_openssl_and_end_have_no_crash(peers):
    runs = [
        (program, order) for program in (BOTH, UNFINISHED) for order in itertools.islice(itertools.cycle(ORDERS), 50)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        assert [wrong for wrong in pool.map(lambda case: peers.run(*case, installed()), runs) if wrong] == []
