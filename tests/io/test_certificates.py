"""Whom https, uploads, rediss:// and https proxies trust: one order, and errors that say what was tried."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import textwrap
import types
from pathlib import Path

import pytest
import torch
from mounts import require_mounts, with_mounts
from servers import needs
from servers.certificates import make_certificates
from servers.http_faults import FaultyServer, Reply
from servers.redis_server import RedisServer, redis_is_installed
from servers.s3_recorder import S3Recorder
from servers.tls_proxy import tls_proxy

from tensorizer import _C, TensorSerializer
from tensorizer._io import http_options as module
from tensorizer._io.http_options import TrustAnchors, trust_for
from tensorizer.errors import StreamError
from tensorizer.stream_io import CAInfo, HTTPOptions, open_stream

VARIABLES = ("SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in (*VARIABLES, "SSL_CERT_DIR", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "_found", None)


@pytest.fixture
def bundle(tmp_path):
    file = tmp_path / "bundle.pem"
    file.write_text("")
    return str(file)


def nothing_on_this_machine(monkeypatch, cafile=None, capath=None):
    """A Python that knows of these certificates of the system only, without certifi."""
    paths = ssl.get_default_verify_paths()._replace(cafile=cafile, capath=capath, openssl_cafile="/absent/cert.pem")
    monkeypatch.setattr(ssl, "get_default_verify_paths", lambda: paths)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)


def test_the_callers_choice_goes_before_every_variable(monkeypatch, bundle, tmp_path):
    for name in VARIABLES:
        monkeypatch.setenv(name, str(tmp_path / "absent"))
    assert trust_for(CAInfo(cacert=bundle)) == TrustAnchors(file=bundle)
    assert trust_for(CAInfo(capath=str(tmp_path))) == TrustAnchors(path=str(tmp_path))
    assert trust_for(CAInfo(allow_untrusted=True)) == TrustAnchors(verify=False)


def test_variables_are_read_in_one_order_and_may_name_folders(monkeypatch, bundle, tmp_path):
    for name in reversed(VARIABLES):
        for path, wanted in ((str(tmp_path), TrustAnchors(path=str(tmp_path))), (bundle, TrustAnchors(bundle))):
            monkeypatch.setenv(name, path)
            assert trust_for(None) == wanted
        monkeypatch.setenv(name, str(tmp_path))


def test_a_variable_that_names_something_unreadable_is_an_error_that_names_it(monkeypatch, tmp_path):
    for name in VARIABLES:
        with monkeypatch.context() as patch:
            patch.setenv(name, str(tmp_path / "absent"))
            with pytest.raises(StreamError, match=rf"{name} names .*absent: expected a readable"):
                trust_for(None)
            assert trust_for(None, secure=False) is not None, "plain http needs no certificate"


def test_a_folder_that_may_be_listed_and_not_searched_is_an_error_that_names_the_variable(monkeypatch):
    """In a process of its own, as another user where root would be let by."""
    with tempfile.TemporaryDirectory() as outer:  # that of pytest is closed to other users
        os.chmod(outer, 0o755)
        for mode, accepted in ((0o555, True), (0o444, False)):
            folder = Path(outer, f"{mode:o}")
            folder.mkdir()
            folder.chmod(mode)
            for name in VARIABLES:
                with monkeypatch.context() as patch:
                    patch.setenv(name, str(folder))
                    text = error_as_another_user()
                    assert text == "" if accepted else f"{name} names {folder}: expected a readable" in text, (
                        mode,
                        text,
                    )


def error_as_another_user() -> str:
    """What ``trust_for`` says where nobody is root; empty where it finds certificates."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.getuid() == 0:
                os.setuid(65534)
            trust_for(None)
        except BaseException as error:
            os.write(writing, repr(error).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    return text


def test_without_a_variable_the_paths_of_python_are_trusted_and_then_certifi(monkeypatch, bundle, tmp_path):
    nothing_on_this_machine(monkeypatch, bundle, str(tmp_path))
    assert trust_for(None) == TrustAnchors(bundle, str(tmp_path))
    monkeypatch.setattr(module, "_found", None)
    nothing_on_this_machine(monkeypatch)
    (tmp_path / "cacert.pem").touch()
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(module.importlib.util, "find_spec", {"certifi": spec}.get)
    assert trust_for(None) == TrustAnchors(str(tmp_path / "cacert.pem"))


def test_without_any_certificate_one_error_says_what_was_tried_and_the_next_call_looks_again(monkeypatch, bundle):
    nothing_on_this_machine(monkeypatch)
    with pytest.raises(StreamError, match="no certificate to trust") as caught:
        trust_for(None)
    for text in (*VARIABLES, "/absent/cert.pem", "certifi", "ca-certificates", "CAInfo(cacert"):
        assert text in str(caught.value)
    assert trust_for(None, secure=False) == TrustAnchors()
    nothing_on_this_machine(monkeypatch, bundle)
    assert trust_for(None) == TrustAnchors(bundle)


def test_importing_and_plain_http_look_for_no_certificate_and_into_no_package(tmp_path):
    program = """
        import ssl, sys
        import tensorizer
        from tensorizer._io import http_options as certificates
        from tensorizer.stream_io import CURLStreamFile
        def looked(*arguments):
            raise AssertionError("looked for certificates")
        assert callable(certificates._of_certifi)
        certificates._of_certifi = ssl.get_default_verify_paths = looked
        with CURLStreamFile(sys.argv[1]) as stream:
            assert len(stream.read()) == 3_000_000
        assert certificates._found is None
        assert not {"certifi", "botocore"} & set(sys.modules)
    """
    os.mkfifo(tmp_path / "never read.pem")  # whoever opens it waits for a writer
    clean = {name: value for name, value in os.environ.items() if "proxy" not in name.lower() and name not in VARIABLES}
    with FaultyServer(bytes(3_000_000)) as server:
        for variables in ({}, {"SSL_CERT_FILE": str(tmp_path / "never read.pem")}, {"CURL_CA_BUNDLE": "/absent"}):
            command = [sys.executable, "-c", textwrap.dedent(program), server.url]
            subprocess.run(command, check=True, cwd=tmp_path, env={**clean, **variables}, timeout=100)


def test_a_redirect_from_plain_http_to_https_looks_for_the_certificates_then(monkeypatch, tmp_path):
    made = make_certificates(tmp_path)
    nothing_on_this_machine(monkeypatch)
    options = HTTPOptions(proxy="", retries=0)
    with FaultyServer(b"secure", tls=made.context()) as target:
        found = Reply(status=302, headers={"Location": target.url})
        with FaultyServer(default=found) as server:
            with pytest.raises(StreamError, match=r"no certificate to trust: none of SSL_CERT_FILE.*certifi"):
                open_stream(server.url, http_options=options)
            assert not target.requests
            nothing_on_this_machine(monkeypatch, str(made.authority))
            with open_stream(server.url, http_options=options) as stream:
                assert stream.read() == b"secure"
            assert module._found == TrustAnchors(file=str(made.authority))
            trusted = CAInfo(cacert=str(made.self_signed))
            with pytest.raises(StreamError, match="certificate"):
                open_stream(server.url, http_options=options, certificate_handling=trusted)


UPLOADS = {
    "file": lambda made: ({"certificate_handling": CAInfo(cacert=str(made.authority))}, {}),
    "folder": lambda made: ({"certificate_handling": CAInfo(capath=str(made.folder))}, {}),
    "nobody": lambda made: ({"certificate_handling": CAInfo(allow_untrusted=True)}, {}),
    "settings": lambda made: (
        {"http_options": HTTPOptions(certificate_handling=CAInfo(cacert=str(made.authority)))},
        {"AWS_CA_BUNDLE": str(made.self_signed)},
    ),
    "CURL_CA_BUNDLE": lambda made: ({}, {"CURL_CA_BUNDLE": str(made.authority)}),
    "SSL_CERT_FILE": lambda made: ({}, {"SSL_CERT_FILE": str(made.authority)}),
    "a folder": lambda made: ({}, {"SSL_CERT_FILE": str(made.folder)}),
    "REQUESTS_CA_BUNDLE": lambda made: ({}, {"REQUESTS_CA_BUNDLE": str(made.authority)}),
    "REQUESTS_CA_BUNDLE, a folder": lambda made: ({}, {"REQUESTS_CA_BUNDLE": str(made.folder)}),
    "AWS_CA_BUNDLE": lambda made: ({}, {"AWS_CA_BUNDLE": str(made.authority)}),
}


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
@pytest.mark.parametrize("trust", UPLOADS)
def test_all_requests_of_an_upload_trust_the_same(monkeypatch, tmp_path, trust):
    pytest.importorskip("boto3")
    for name in ("MIN_PART_NBYTES", "MAX_PART_NBYTES"):
        monkeypatch.setattr(f"tensorizer._io.s3.upload.{name}", 64 << 10)
    made = make_certificates(tmp_path)
    options, variables = UPLOADS[trust](made)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with S3Recorder(made.context()) as store:
        options = {**store.arguments, **options}
        with TensorSerializer("s3://bucket/in-parts", stream_options=options) as serializer:
            serializer.write_state_dict({"w": torch.ones(50_000)})
        with open_stream("s3://bucket/by-hand", "wb", **options) as stream:
            stream.write(b"content")
        assert sorted(store.objects) == ["/bucket/by-hand", "/bucket/in-parts"]
        assert len(store.of("UploadPart")) > 2


def test_an_aws_setting_that_names_no_certificates_is_an_error_that_names_it(monkeypatch, tmp_path):
    pytest.importorskip("boto3")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "absent"))
    with (
        S3Recorder(make_certificates(tmp_path).context()) as store,
        pytest.raises(StreamError, match=r"AWS_CA_BUNDLE or ca_bundle names .*absent"),
    ):
        TensorSerializer("s3://bucket/w", stream_options=store.arguments)


def test_what_needs_certificates_is_decided_by_the_address_and_by_proxies_of_https(monkeypatch, tmp_path):
    nothing_on_this_machine(monkeypatch)
    for name in ("http_proxy", "all_proxy", "ALL_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for proxy in ("https://127.0.0.1:1", "HTTPS://127.0.0.1:1"):  # before a server in clear, and named by the caller
        with pytest.raises(StreamError, match="no certificate to trust"):
            HTTPOptions(proxy=proxy)._native(secure=False)
    for proxy in ("", "http://127.0.0.1:1", None):
        native = HTTPOptions(proxy=proxy)._native(secure=False)
        assert (native.ca_file, native.ca_path) == ("", "")
        with pytest.raises(StreamError, match="no certificate to trust"):
            HTTPOptions(proxy=proxy)._native()
    monkeypatch.setenv("http_proxy", "https://127.0.0.1:1")  # one that `no_proxy` may keep out
    HTTPOptions()._native(secure=False)
    made = tmp_path / "made.pem"
    nothing_on_this_machine(monkeypatch, str(made))
    assert HTTPOptions()._native(secure=False).ca_file == str(made)


# -- in a mount namespace, with the files of other distributions -------------------------------------------------------

# The folder where this Python's OpenSSL looks for them; it is in /etc, or a link to there.
CAPATH = os.path.realpath(ssl.get_default_verify_paths().openssl_capath)
HASHED = f"mkdir -p {CAPATH}; cp $SINGLE/*.pem {CAPATH}; openssl rehash {CAPATH}"
# Red Hat's setting that other builds of OpenSSL refuse, and a provider that is not there.
HOSTILE = """openssl_conf = openssl_init
[openssl_init]
alg_section = evp_properties
ssl_conf = ssl_module
providers = providers
[evp_properties]
rh-allow-sha1-signatures = yes
[providers]
fips = fips_section
[fips_section]
activate = 1
[ssl_module]
system_default = tls
[tls]
Unknown = yes
"""
# Correct, and a policy that no server of today meets.
POLICY = """openssl_conf = openssl_init
[openssl_init]
ssl_conf = ssl_module
[ssl_module]
system_default = tls
[tls]
Ciphersuites = TLS_AES_128_CCM_8_SHA256
"""
PROGRAM = """
import os, sys
from tensorizer import stream_io
from tensorizer._io.redis import RedisStreamFile
https, proxy, redis = sys.argv[1:]
def attempt(name, read):
    try:
        print(name, read())
    except OSError as error:
        print(name, "untrusted" if "certificate" in str(error) else error)
options = stream_io.HTTPOptions(proxy="", retries=0)
attempt("https", lambda: stream_io.open_stream(https, http_options=options).read())
os.environ.pop("no_proxy", None)
options = stream_io.HTTPOptions(proxy=proxy, retries=0)
attempt("proxy", lambda: stream_io.open_stream(https, http_options=options).read())
attempt("rediss", lambda: RedisStreamFile(redis, retries=0).read())
"""
SETUP = """mount -t tmpfs none "$WORK"
mkdir "$WORK/upper" "$WORK/work"
mount -t overlay none -o "lowerdir=/etc,upperdir=$WORK/upper,workdir=$WORK/work" /etc
rm -rf /etc/ssl /etc/pki
"""


@pytest.fixture
def peers(tmp_path):
    """A function that runs PROGRAM against an https server, a proxy of https and Redis, and gives what it prints."""
    if not redis_is_installed():
        pytest.skip(needs("Redis"))
    certificates = make_certificates(tmp_path)
    with (
        FaultyServer(b"over https", tls=certificates.context()) as server,
        tls_proxy(certificates.context()) as proxy,
        RedisServer(tls=True) as redis,
    ):
        redis.client().set("model:0", b"over redis")
        authorities = tmp_path / "authorities.pem"
        authorities.write_bytes(certificates.authority.read_bytes() + redis.certificate.read_bytes())
        single = tmp_path / "single"
        single.mkdir()
        (single / "one.pem").write_bytes(certificates.authority.read_bytes())
        (single / "two.pem").write_bytes(redis.certificate.read_bytes())
        (tmp_path / "work").mkdir()
        paths = {"WORK": str(tmp_path / "work"), "CA": str(authorities), "SINGLE": str(single)}

        def run(*prefix, **variables):
            command = [*prefix, sys.executable, "-c", PROGRAM, server.url, proxy, redis.uri("model")]
            environment = {**os.environ, **paths, **variables}
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path
            )
            return done.stdout.splitlines() or [done.stderr]

        run.authorities = str(authorities)
        yield run


TRUSTED = ["https b'over https'", "proxy b'over https'", "rediss b'over redis'"]


@pytest.mark.slow
@pytest.mark.skipif(not CAPATH.startswith("/etc/"), reason="this Python has certificates outside of /etc")
def test_the_folder_of_the_system_serves_https_proxies_and_redis(peers):
    require_mounts()
    assert peers(*with_mounts(SETUP + HASHED)) == TRUSTED


# -- what the host says to OpenSSL -------------------------------------------------------------------------------------

# Which is the promise of wheels alone: other builds follow the host's openssl.cnf, as docs/install.md says.
needs_own_openssl = pytest.mark.skipif(
    _C.default_certificates() != ("", ""), reason="this build has the system's OpenSSL, which obeys the host's settings"
)
# Libraries under the names of the system's, whose functions end the process.
FAKE = """#include <stdlib.h>
void SSL_CTX_new(void) { abort(); }
void OPENSSL_init_crypto(void) { abort(); }
void curl_easy_init(void) { abort(); }
"""
FAKE_NAMES = ("libssl.so.3", "libcrypto.so.3", "libcurl.so.4", "libssl.so.1.1", "libcrypto.so.1.1")


def make_fakes(folder: Path) -> str:
    folder.mkdir()
    (folder / "fake.c").write_text(FAKE)
    # With a version of their own, so that Python's modules refuse them where they are loaded, and not later.
    (folder / "fake.map").write_text("FAKE_1 { global: SSL_*; OPENSSL_*; curl_*; local: *; };\n")
    for name in FAKE_NAMES:
        options = ["-shared", "-fPIC", f"-Wl,-soname,{name}", "-Wl,--version-script=fake.map"]
        subprocess.run(["cc", *options, "-o", name, "fake.c"], check=True, cwd=folder, capture_output=True)
    return str(folder)


def test_a_folder_of_hostile_modules_changes_nothing(peers, tmp_path):
    modules = tmp_path / "modules"
    modules.mkdir()
    for name in ("default.so", "legacy.so", "fips.so", "base.so"):
        (modules / name).write_bytes(b"no library")
    assert peers(SSL_CERT_FILE=peers.authorities, OPENSSL_MODULES=str(modules)) == TRUSTED
    assert peers(SSL_CERT_FILE=peers.authorities, OPENSSL_MODULES="/absent", OPENSSL_ENGINES="/absent") == TRUSTED


@needs_own_openssl
def test_a_wheel_reads_no_configuration_of_openssl_that_a_variable_names(peers, tmp_path):
    trusted = {"SSL_CERT_FILE": peers.authorities, "OPENSSL_MODULES": str(tmp_path)}
    for text in (POLICY, HOSTILE, "= no configuration ="):
        (tmp_path / "hostile.cnf").write_text(text)
        assert peers(OPENSSL_CONF=str(tmp_path / "hostile.cnf"), **trusted) == TRUSTED, text


@needs_own_openssl
def test_a_wheel_takes_no_library_of_openssl_or_curl_that_lies_in_the_path(peers, tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    assert peers(SSL_CERT_FILE=peers.authorities, LD_LIBRARY_PATH=make_fakes(tmp_path / "fakes")) == TRUSTED


@pytest.mark.slow
@needs_own_openssl
def test_a_wheel_reads_no_configuration_of_openssl_in_its_usual_place(peers, tmp_path):
    require_mounts()
    for text in (POLICY, HOSTILE):
        (tmp_path / "hostile.cnf").write_text(text)
        for folder in ("/etc/ssl", "/etc/pki/tls"):
            commands = f"{HASHED}; mkdir -p {folder}; cp {tmp_path}/hostile.cnf {folder}/openssl.cnf"
            assert peers(*with_mounts(SETUP + commands)) == TRUSTED, (folder, text)
