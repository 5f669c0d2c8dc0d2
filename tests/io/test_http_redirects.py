"""Redirects and proxies, and the secrets that neither they nor errors get to see."""

from __future__ import annotations

import base64
import functools
import itertools
import logging
import traceback

import pytest
from http_tools import (
    CONTENT,
    HEAD,
    open_faulty,
    quick,
    read_faulty,
    within,
)
from servers.http_faults import GOOD, FaultyServer, Reply, Request

from tensorizer import _C
from tensorizer.errors import StreamError
from tensorizer.stream_io import CURLStreamFile, HTTPOptions, open_stream

# -- redirects --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_followed_and_remembered(status):
    with FaultyServer(CONTENT) as target:
        leads = Reply(status=status, headers={"Location": target.url + "?Signature=s3cret"})
        with FaultyServer(default=leads) as server:
            assert read_faulty(server) == CONTENT
            assert len(server.requests) == 1
            assert target.requests[0].range == (0, HEAD - 1)


def test_secrets_do_not_follow_to_another_host():
    with FaultyServer(CONTENT) as target, FaultyServer() as server:
        server.default = Reply(status=302, headers={"Location": target.url})
        headers = {"Authorization": "Bearer s3cret", "X-Api-Key": "s3cret", "Cookie": "s3cret"}
        url = server.url.replace("http://", "http://user:s3cret@")
        with CURLStreamFile(url, headers=headers, http_options=quick()) as stream:
            assert stream.read() == CONTENT
        assert "s3cret" in server.requests[0].headers["x-api-key"]
        for request in target.requests:
            assert "s3cret" not in str(request.headers)
            assert request.headers["user-agent"].startswith("Tensorizer/")


@pytest.mark.parametrize("user", ["", "user:s3cret@"])
@pytest.mark.parametrize(("asked", "named"), [("localhost", "LOCALHOST"), ("LocalHost", "localhost")])
def test_secrets_follow_to_the_same_host_in_another_case_and_to_no_other_port(asked, named, user):
    for is_home in (True, False):
        with FaultyServer(CONTENT) as home, FaultyServer(CONTENT) as other:
            port = (home if is_home else other).port
            home.script.append(Reply(status=302, headers={"Location": f"http://{named}:{port}/x"}))
            headers = {"X-Key": "s3cret"}
            url = f"http://{user}{asked}:{home.port}/x"
            with CURLStreamFile(url, headers=headers, http_options=quick()) as stream:
                assert stream.read() == CONTENT
            found = home.requests[1:] + other.requests
            assert len(found) > 1
            for request in found:
                assert ("x-key" in request.headers) == is_home
                assert ("authorization" in request.headers) == (is_home and user != "")


def test_secrets_are_sent_again_where_another_host_leads_back():
    with FaultyServer(CONTENT) as home, FaultyServer() as other:
        home.script.append(Reply(status=302, headers={"Location": other.url}))
        other.default = Reply(status=302, headers={"Location": home.url})
        url = home.url.replace("http://", "http://user:s3cret@")
        with CURLStreamFile(url, headers={"X-Key": "s3cret"}, http_options=quick()) as stream:
            assert stream.read() == CONTENT
        assert len(home.requests) > 2
        for request in home.requests:
            assert request.headers["x-key"] == "s3cret"
            assert request.headers["authorization"].startswith("Basic ")
        assert "authorization" not in other.requests[0].headers


def test_a_redirect_of_s3_without_a_target_names_its_code():
    body = b"<Error><Code>PermanentRedirect</Code><Message>s3cret</Message></Error>"
    with FaultyServer(CONTENT, [GOOD], default=Reply(status=301, body=body)) as server:
        for opening in (False, True):
            with pytest.raises(StreamError, match=r"301.*\[PermanentRedirect\]; .*s3_region_name") as caught:
                read_faulty(server) if opening else open_faulty(server).read(100_000, 10)
            assert "s3cret" not in str(caught.value)


def test_headers_follow_within_a_host():
    with FaultyServer(CONTENT, [Reply(status=302, headers={"Location": "/elsewhere?x=1"})]) as server:
        with CURLStreamFile(server.url, headers={"X-Api-Key": "s3cret"}, http_options=quick()) as stream:
            assert stream.read() == CONTENT
        assert server.requests[1].target == "/elsewhere?x=1"
        assert server.requests[1].headers["x-api-key"] == "s3cret"


def test_a_remembered_redirect_that_expires_is_asked_for_again():
    with FaultyServer(CONTENT) as target:
        numbers = iter(range(100))
        with FaultyServer(
            default=lambda r: Reply(status=302, headers={"Location": f"{target.url}?{next(numbers)}"})
        ) as server:
            source = open_faulty(server)
            target.default = lambda r: Reply(status=403) if r.target.endswith("?0") else GOOD
            assert source.read(100_000, 10) == CONTENT[100_000:100_010]
            assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("location", "text"),
    [
        ("/loop", "more than 10 redirects"),
        (None, "without a target"),
        ("file:///etc/passwd", "not followed"),
        ("ftp://127.0.0.1/x", "not followed"),
        ("http://", "not followed"),
    ],
)
def test_bad_redirects_are_errors(location, text):
    with FaultyServer(default=Reply(status=302, headers={"Location": location})) as server, within(10):
        with pytest.raises(StreamError, match=text):
            read_faulty(server)
        assert len(server.requests) <= 11


# -- secrets ----------------------------------------------------------------------------------------------------------

SECRET = "".join(["s3", "cr3t"])  # in two pieces: tracebacks show lines of this file

_FAULTS_WITH_SECRETS = [
    Reply(status=403), Reply(status=404), Reply(status=503), Reply(drop=True), Reply(cut_after=10), Reply(raw=b"junk"),
    Reply(headers={"Content-Range": "junk"}), Reply(status=302, headers={"Location": f"/loop?Signature={SECRET}"}),
    Reply(status=302, headers={"Location": f"ftp://user:{SECRET}@h/?{SECRET}"}), Reply(stall_after=0),
    Reply(status=400, body=f"<Error><Code>{SECRET} is wrong</Code>{SECRET}</Error>".encode()),
    lambda request: quoting(403, request), lambda request: quoting(206, request),
]  # fmt: skip


def quoting(status: int, request: Request) -> Reply:
    """A status line with all that was sent."""
    words = f"{request.target} {request.target.partition('=')[2]} {list(request.headers.values())}"
    return Reply(raw=f"HTTP/1.1 {status} {words}\r\nContent-Length: 0\r\n\r\n".encode())


def test_a_status_line_that_quotes_the_request_is_told_without_its_secrets():
    token = f"{SECRET}5".encode().hex()
    basic = base64.b64encode(f"user:{SECRET}1".encode()).decode()
    logins = (("", {"Authorization": f"Bearer {token}"}), (f"user:{SECRET}1@", {}))
    for (login, headers), at_request in itertools.product(logins, (0, 1)):
        for status in (206, 403):
            default = functools.partial(quoting, status)
            with FaultyServer(CONTENT, [GOOD] * at_request, default=default) as server:
                url = server.url.replace("http://", f"http://{login}") + f"?X-Amz-Signature={SECRET}2"
                options = quick(retries=0, headers=headers)
                with pytest.raises(StreamError, match=f"HTTP/1.1 {status}") as caught:
                    _C.HttpSource.open(url, options._native()).read(100_000, 10)
            for secret in (SECRET, token, basic):
                assert secret not in str(caught.value)


def read_with_secrets(url: str, options: HTTPOptions) -> None:
    with CURLStreamFile(url, headers={"Authorization": f"{SECRET}4"}, http_options=options) as stream:
        print(repr(stream), repr(stream._tensorizer_source()))
        stream.seek(100_000)
        stream.read(10)


@pytest.mark.parametrize("number", range(len(_FAULTS_WITH_SECRETS)))
@pytest.mark.parametrize("at_request", [0, 1])
def test_no_secret_is_in_errors_tracebacks_reprs_or_logs(number, at_request, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    with FaultyServer(CONTENT, [GOOD] * at_request, default=_FAULTS_WITH_SECRETS[number]) as server:
        url = server.url.replace("http://", f"http://user:{SECRET}1@") + f"?X-Amz-Signature={SECRET}2"
        options = quick(retries=1, stall_timeout=0.3, headers={"X-Key": f"{SECRET}3"})
        told = repr(options)
        with pytest.raises(OSError) as caught:
            read_with_secrets(url, options)
        told += "".join(traceback.format_exception(caught.type, caught.value, caught.tb)) + repr(caught.value)
        told += str(vars(caught.value)) + caplog.text + "".join(capfd.readouterr())
        assert server.url in told
        assert SECRET not in told
        assert f"{SECRET}2" in server.requests[0].target  # it was there to be told


@pytest.mark.parametrize("proxy", ["http://user:{}@[:x", "user:{}@[:x", "other://user:{}@127.0.0.1:1"])
def test_a_proxy_that_cannot_be_used_is_an_error_without_its_password(proxy, monkeypatch):
    monkeypatch.setenv("http_proxy", proxy.format(SECRET))
    monkeypatch.delenv("no_proxy", raising=False)
    with FaultyServer(CONTENT) as server:
        with pytest.raises(StreamError, match=r"Unsupported proxy .*; check proxy, http_proxy") as caught:
            open_stream(server.url, http_options=quick(proxy=None))
        assert SECRET not in "".join(traceback.format_exception(caught.type, caught.value, caught.tb))
        assert server.requests == []


@pytest.mark.parametrize(
    ("status", "text", "tries"),
    [(407, "the proxy wants credentials", 1), (403, "the proxy does not connect", 1), (502, "after 4 tries", 4)],
)
def test_a_proxy_that_refuses_a_tunnel_is_named(status, text, tries, monkeypatch):
    monkeypatch.delenv("no_proxy", raising=False)
    with FaultyServer(CONTENT, default=Reply(status=status)) as proxy:
        with pytest.raises(StreamError, match=text):
            open_stream("https://127.0.0.1:1/x", http_options=quick(proxy=proxy.url))
        assert [request.method for request in proxy.requests] == ["CONNECT"] * tries
