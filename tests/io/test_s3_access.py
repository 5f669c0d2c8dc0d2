"""S3 without a server: credentials, endpoints, schemes, presigned URLs, and what is never shown."""

from __future__ import annotations

import configparser
import logging
import pickle
import time
import traceback
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
from torch_versions import HAS_CHECKPOINTS

import tensorizer
from tensorizer import stream_io
from tensorizer._io.call_options import StreamOptions
from tensorizer._io.s3 import access
from tensorizer._io.s3.access import S3Location, S3Options, parse_s3_uri
from tensorizer.torch_compat import tensorizer_saving

botocore = pytest.importorskip("botocore")
boto3 = pytest.importorskip("boto3")

KEY, SECRET, TOKEN = "AKIDEXAMPLE", "topsecret/+key", "tokentokentoken"
WORD = "sEcReTw0rd"
LOCATION = S3Location("bucket", "some/key")
READ_DEFAULT, WRITE_DEFAULT = "accel-object.ord1.coreweave.com", "object.ord1.coreweave.com"


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """No credentials anywhere, except what a test puts somewhere."""
    import os

    for name in list(os.environ):
        if name.startswith("AWS_") or name in ("CURL_CA_BUNDLE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "aws-credentials"))
    monkeypatch.setattr(stream_io, "_s3_default_config_paths", (str(tmp_path / "s3cfg"),))
    monkeypatch.setattr("tensorizer._io.s3.access._announced", set())


def options_of(**arguments):
    return S3Options.of(StreamOptions(**arguments))


def resolved(write=False, location=LOCATION, **arguments):
    return access.resolve(location, options_of(**arguments), write=write)


def url_of(uri="s3://bucket/some/key", **settings):
    return resolved(**settings).signed(parse_s3_uri(uri), {}).url


def host_of(url):
    return urlsplit(url).netloc


def key_of(url):
    query = parse_qs(urlsplit(url).query)
    if "X-Amz-Credential" in query:
        return query["X-Amz-Credential"][0].split("/")[0]
    return query.get("AWSAccessKeyId", [None])[0]


def write_config(path, **values):
    path.write_text("[default]\n" + "".join(f"{name} = {value}\n" for name, value in values.items()))


class TestCredentials:
    def test_arguments_sign_the_url(self):
        assert key_of(url_of(s3_access_key_id=KEY, s3_secret_access_key=SECRET)) == KEY

    def test_both_arguments_leave_the_config_file_unread(self, tmp_path):
        (tmp_path / "s3cfg").write_text("no INI file")
        url = url_of(s3_access_key_id=KEY, s3_secret_access_key=SECRET, s3_config_path=str(tmp_path / "s3cfg"))
        assert host_of(url) == READ_DEFAULT

    @pytest.mark.parametrize("explicit", [False, True])
    def test_the_config_file_gives_what_is_missing(self, tmp_path, explicit):
        path = tmp_path / ("mine" if explicit else "s3cfg")
        write_config(path, access_key="FROMFILE", secret_key="s%ecret", host_base="store.example", use_https="True")
        settings = {"s3_config_path": str(path)} if explicit else {}
        url = url_of(**settings)
        assert key_of(url) == "FROMFILE"
        assert url.startswith("https://store.example/bucket/some/key?")
        assert key_of(url_of(s3_access_key_id=KEY, **settings)) == KEY

    def test_use_https_of_the_config_file_and_force_http_decide_the_scheme(self, tmp_path):
        write_config(tmp_path / "s3cfg", access_key="A", secret_key="B", host_base="store.example", use_https="False")
        assert url_of().startswith("http://store.example/")
        assert url_of(force_http=False).startswith("https://store.example/")
        write_config(tmp_path / "s3cfg", access_key="A", secret_key="B", host_base="store.example", use_https="no")
        assert url_of().startswith("https://store.example/")
        assert url_of(force_http=True).startswith("http://store.example/")

    def test_an_incomplete_config_file_counts_for_nothing(self, tmp_path, monkeypatch):
        write_config(tmp_path / "s3cfg", access_key="A", host_base="store.example", use_https="False")
        assert key_of(url_of()) is None
        assert host_of(url_of()) == READ_DEFAULT
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "CHAIN")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        assert key_of(url_of()) == "CHAIN"

    @pytest.mark.parametrize("write", [False, True])
    def test_a_config_file_that_was_named_and_gives_no_keys_is_a_value_error(self, tmp_path, monkeypatch, write):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "CHAIN")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        write_config(tmp_path / "half", access_key="A", host_base="store.example")
        (tmp_path / "other").write_text("[another]\naccess_key = A\nsecret_key = B\n")
        for name in ("nowhere", "half", "other"):
            for keys in ({}, {"s3_access_key_id": KEY}, {"s3_profile": "p"}):
                with pytest.raises(ValueError, match=f"s3_config_path.*{name}"):
                    resolved(write, s3_config_path=str(tmp_path / name), **keys)

    def test_no_config_file_is_passed_over_and_a_broken_one_is_an_error(self, tmp_path):
        assert key_of(url_of()) is None
        (tmp_path / "s3cfg").write_text("no INI file")
        with pytest.raises(configparser.MissingSectionHeaderError):
            url_of()

    def test_the_config_file_goes_before_the_aws_environment(self, tmp_path, monkeypatch):
        write_config(tmp_path / "s3cfg", access_key="FROMFILE", secret_key="s")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "CHAIN")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        assert key_of(url_of()) == "FROMFILE"
        assert host_of(url_of()) == READ_DEFAULT

    def test_session_tokens_come_from_the_chain_or_the_argument(self, monkeypatch):
        url = url_of(s3_access_key_id=KEY, s3_secret_access_key=SECRET, s3_session_token=TOKEN)
        assert parse_qs(urlsplit(url).query)["X-Amz-Security-Token"] == [TOKEN]
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "CHAIN")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("AWS_SESSION_TOKEN", "fromchain")
        assert parse_qs(urlsplit(url_of()).query)["X-Amz-Security-Token"] == ["fromchain"]
        with pytest.raises(ValueError, match="s3_session_token"):
            url_of(s3_session_token=TOKEN)

    def test_a_profile_is_used_with_its_keys_region_and_endpoint(self, tmp_path, monkeypatch):
        write_config(tmp_path / "s3cfg", access_key="FROMFILE", secret_key="s", host_base="store.example")
        (tmp_path / "aws-credentials").write_text("[work]\naws_access_key_id = WORK\naws_secret_access_key = x\n")
        (tmp_path / "aws-config").write_text("[profile work]\nregion = eu-1\nendpoint_url = http://work.example\n")
        url = url_of(s3_profile="work")
        assert (key_of(url), host_of(url)) == ("WORK", "work.example")
        assert "%2Feu-1%2Fs3" in url
        (tmp_path / "aws-config").write_text(
            "[profile work]\nservices = mine\n[services mine]\ns3 =\n  endpoint_url = https://services.example\n"
        )
        assert host_of(url_of(s3_profile="work")) == "services.example"

    def test_an_unknown_profile_is_botocores_error(self, monkeypatch):
        with pytest.raises(botocore.exceptions.ProfileNotFound):
            url_of(s3_profile="nobody")
        monkeypatch.setenv("AWS_PROFILE", "nobody")
        with pytest.raises(botocore.exceptions.ProfileNotFound):
            url_of()

    def test_without_credentials_reads_are_anonymous_and_writes_have_none(self):
        assert url_of() == f"https://{READ_DEFAULT}/bucket/some/key"
        assert url_of(s3_access_key_id="", s3_secret_access_key="").partition("?")[1] == ""
        found = resolved(write=True)
        with pytest.raises(botocore.exceptions.NoCredentialsError):
            found.client.generate_presigned_url("put_object", Params={"Bucket": "bucket", "Key": "k"})

    def test_half_of_the_credentials_is_botocores_error(self):
        for settings in ({"s3_access_key_id": KEY}, {"s3_secret_access_key": SECRET}):
            with pytest.raises(botocore.exceptions.PartialCredentialsError):
                url_of(**settings)

    def test_a_client_factory_replaces_everything_and_may_travel(self):
        factory = pickle.loads(pickle.dumps(made_client))
        url = url_of(s3_client_factory=factory, s3_access_key_id="ignored")
        assert (key_of(url), host_of(url)) == ("FACTORY", "factory.example")


def made_client():
    return boto3.client(
        "s3",
        endpoint_url="https://factory.example",
        region_name="x",
        aws_access_key_id="FACTORY",
        aws_secret_access_key="s",
    )


class TestEndpoints:
    BOTH = {"s3_access_key_id": KEY, "s3_secret_access_key": SECRET}  # noqa: RUF012

    def test_the_argument_goes_first_then_the_environment_then_the_defaults(self, monkeypatch):
        assert host_of(url_of(**self.BOTH)) == READ_DEFAULT
        assert resolved(write=True, **self.BOTH).host == WRITE_DEFAULT
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://general.example:99")
        assert url_of(**self.BOTH).startswith("http://general.example:99/bucket/")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://special.example")
        assert host_of(url_of(**self.BOTH)) == "special.example"
        assert host_of(url_of(s3_endpoint="argument.example", **self.BOTH)) == "argument.example"
        assert host_of(url_of(s3_endpoint="", **self.BOTH)) == "special.example"

    def test_configured_endpoints_are_those_of_botocore(self, monkeypatch, tmp_path):
        config = tmp_path / "aws-config"
        config.write_text("[default]\nendpoint_url = https://profile.example\n")
        assert host_of(url_of(**self.BOTH)) == "profile.example"
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://special.example")
        monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
        assert host_of(url_of(**self.BOTH)) == READ_DEFAULT
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "CHAIN")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        assert host_of(url_of()) == "bucket.s3.amazonaws.com"
        assert host_of(url_of(s3_endpoint="argument.example")) == "argument.example"
        monkeypatch.delenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS")
        config.write_text("[default]\nignore_configured_endpoint_urls = true\nendpoint_url = https://x.example\n")
        assert host_of(url_of(**self.BOTH)) == READ_DEFAULT

    def test_a_default_host_that_gets_keys_is_named_once_and_loud(self, caplog, tmp_path):
        for _ in range(2):
            resolved(**self.BOTH)
            resolved(write=True, **self.BOTH)
        loud = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert [READ_DEFAULT in loud[0], WRITE_DEFAULT in loud[1], len(loud)] == [True, True, 2]
        assert KEY not in caplog.text
        assert SECRET not in caplog.text
        caplog.clear()
        resolved()  # nobody's keys
        resolved(s3_access_key_id="", s3_secret_access_key="")
        resolved(s3_endpoint=READ_DEFAULT, **self.BOTH)
        assert [record for record in caplog.records if record.levelno == logging.WARNING] == []

    def test_keys_of_a_configuration_file_without_a_host_are_told_of_too(self, caplog, tmp_path):
        write_config(tmp_path / "s3cfg", access_key="FROMFILE", secret_key="s")
        resolved()
        loud = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert [READ_DEFAULT in message for message in loud] == [True]

    def test_a_bucket_of_s3_express_is_at_aws_where_nobody_names_an_endpoint(self, caplog):
        express = S3Location("models--usw2-az1--x-s3", "key")
        assert resolved(location=express, **self.BOTH).endpoint is None
        assert resolved(location=express, s3_endpoint="store.example", **self.BOTH).host == "store.example"
        assert [record for record in caplog.records if record.levelno == logging.WARNING] == []

    @pytest.mark.parametrize(
        ("bucket", "host"),
        [
            ("arn:aws:s3:us-west-2:123456789012:accesspoint/models", "s3-accesspoint.us-west-2"),
            ("arn:aws:s3:us-west-2:123456789012:accesspoint:models", "s3-accesspoint.us-west-2"),
            ("arn:aws:s3-object-lambda:us-west-2:123456789012:accesspoint/models", "s3-object-lambda.us-west-2"),
        ],
    )
    def test_an_access_point_stands_in_place_of_a_bucket_as_for_the_aws_cli(self, bucket, host, caplog):
        location = parse_s3_uri(f"s3://{bucket}/a/b//m#1.tensors?versionId=3")
        assert location == S3Location(bucket, "a/b//m#1.tensors", "3")
        found = resolved(location=location, s3_region_name="us-west-2", **self.BOTH)
        assert found.endpoint is None
        url = urlsplit(found.client.generate_presigned_url("get_object", Params=location.params))
        assert url.hostname == f"models-123456789012.{host}.amazonaws.com"
        assert url.path.startswith("/a/b//m")
        assert [record for record in caplog.records if record.levelno == logging.WARNING] == []

    def test_an_outpost_has_an_access_point_in_its_name_and_other_arns_are_refused(self):
        outpost = "arn:aws:s3-outposts:us-west-2:123456789012:outpost/op-01/accesspoint/models"
        assert parse_s3_uri(f"s3://{outpost}/k") == S3Location(outpost, "k")
        for wrong in ("arn:aws:s3:us-west-2:12:accesspoint/models/k", "arn:aws:s3:::bucket/k", "arn:aws:s3/k"):
            with pytest.raises(ValueError, match="expected the ARN of an access point"):
                parse_s3_uri(f"s3://{wrong}")

    def test_the_validation_of_answers_is_what_the_aws_variable_says(self, monkeypatch):
        assert resolved(**self.BOTH).client.meta.config.response_checksum_validation == "when_required"
        monkeypatch.setenv("AWS_RESPONSE_CHECKSUM_VALIDATION", "when_supported")
        assert resolved(**self.BOTH).client.meta.config.response_checksum_validation == "when_supported"

    def test_the_defaults_are_looked_up_when_they_are_needed(self, monkeypatch):
        monkeypatch.setattr(stream_io, "default_s3_read_endpoint", "https://patched.example:4433")
        monkeypatch.setattr(stream_io, "default_s3_write_endpoint", "other.example:1")
        assert host_of(url_of()) == "patched.example:4433"
        assert resolved(write=True, **self.BOTH).endpoint == "https://other.example:1"

    def test_credentials_of_the_aws_chain_mean_aws_unless_an_endpoint_is_set(self, monkeypatch):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "CHAIN")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        assert host_of(url_of()) == "bucket.s3.amazonaws.com"
        assert resolved(write=True).host == "s3.amazonaws.com"
        monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
        assert host_of(url_of()).startswith("bucket.s3.")
        assert "eu-west-1" in url_of()
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://special.example")
        assert url_of().startswith("http://special.example/bucket/")

    def test_plain_http_has_to_be_asked_for(self):
        with pytest.raises(ValueError, match="Non-HTTPS"):
            url_of(s3_endpoint="http://store.example", **self.BOTH)
        assert url_of(s3_endpoint="http://store.example", force_http=True, **self.BOTH).startswith("http://store")
        assert url_of(s3_endpoint="https://store.example", force_http=True, **self.BOTH).startswith("http://store")
        with pytest.raises(ValueError, match="Non-HTTPS"):
            url_of(s3_endpoint="ftp://store.example", force_http=True, **self.BOTH)

    @pytest.mark.parametrize(
        ("endpoint", "expected"),
        [
            ("store.example", "https://store.example/bucket/some/key"),
            ("cwobject.com", "https://bucket.cwobject.com/some/key"),
            ("https://CWLOTA.com", "https://bucket.CWLOTA.com/some/key"),
            ("sub.cwobject.com", "https://sub.cwobject.com/bucket/some/key"),
            ("cwobject.com:443", "https://cwobject.com:443/bucket/some/key"),
        ],
    )
    def test_addressing_is_by_path_except_where_the_store_knows_hosts_only(self, endpoint, expected):
        assert url_of(s3_endpoint=endpoint, **self.BOTH).partition("?")[0] == expected

    def test_the_region_is_the_argument_or_configured_or_the_first(self, monkeypatch):
        assert "%2Fus-east-1%2Fs3" in url_of(**self.BOTH)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-2")
        assert "%2Feu-2%2Fs3" in url_of(s3_endpoint="store.example", **self.BOTH)
        assert "%2Fmine%2Fs3" in url_of(s3_endpoint="store.example", s3_region_name="mine", **self.BOTH)


class TestUrls:
    BOTH = TestEndpoints.BOTH

    def test_signatures_are_version_4_unless_version_2_is_asked_for(self):
        query = parse_qs(urlsplit(url_of(**self.BOTH)).query)
        assert query["X-Amz-Algorithm"] == ["AWS4-HMAC-SHA256"]
        assert 86400 <= int(query["X-Amz-Expires"][0]) <= 2 * 86400
        old = parse_qs(urlsplit(url_of(s3_signature_version="s3", **self.BOTH)).query)
        assert old["AWSAccessKeyId"] == [KEY]
        assert int(old["Expires"][0]) - time.time() > 86000
        assert int(old["Expires"][0]) % 86400 in (0, 1)

    def test_no_signature_is_asked_for_in_the_words_of_botocore(self):
        assert urlsplit(url_of(s3_signature_version=botocore.UNSIGNED, **self.BOTH)).query == ""

    def test_endpoints_may_have_an_address_with_a_zone_and_an_empty_port(self):
        for endpoint in ("https://[fe80::1%25eth0]:9000", "https://store.example:"):
            assert url_of(**{**self.BOTH, "s3_endpoint": endpoint}).startswith(endpoint)

    def test_keys_are_taken_as_they_stand_and_quoted(self):
        url = url_of("s3://bucket//dir/a b%20ü?x#y", **self.BOTH)
        assert urlsplit(url).path == "/bucket//dir/a%20b%2520%C3%BC%3Fx%23y"
        assert urlsplit(url_of("s3://bucket/a\nb\t\r", **self.BOTH)).path == "/bucket/a%0Ab%09%0D"

    def test_only_a_version_at_the_end_is_no_part_of_the_key(self):
        for rest, key, version in (
            ("a?versionId=x%2By", "a", "x+y"), ("a#1?versionId=2", "a#1", "2"), ("a?b=1", "a?b=1", None),
            ("a?versionId=1/b", "a?versionId=1/b", None), ("a?versionId=1?versionId=2", "a?versionId=1", "2"),
            ("a?x=1&versionId=2", "a?x=1&versionId=2", None), ("a?versionId=1#b", "a?versionId=1#b", None),
        ):  # fmt: skip
            assert parse_s3_uri(f"S3://bucket/{rest}") == S3Location("bucket", key, version), rest

    def test_an_empty_key_or_another_scheme_is_refused(self):
        for uri in ("http://bucket/key", "s3:///key", "bucket/key", "s3://bucket/", "s3://bucket"):
            with pytest.raises(ValueError, match="Invalid S3 URI"):
                stream_io._s3_download_url(uri, KEY, SECRET, "https://h")

    def test_the_helper_signs_what_it_is_given(self):
        url = stream_io._s3_download_url("s3://bucket/k", KEY, SECRET, "https://h.example", "r", "s3v4")
        assert url.startswith("https://h.example/bucket/k?")
        assert "%2Fr%2Fs3" in url
        assert (
            stream_io._s3_download_url("s3://bucket/k", None, None, "https://h.example") == "https://h.example/bucket/k"
        )
        assert host_of(stream_io._s3_download_url("s3://bucket/k", KEY, SECRET)) == READ_DEFAULT


class TestSecrets:
    def test_no_repr_log_or_error_shows_a_secret(self, caplog):
        caplog.set_level(logging.DEBUG, "tensorizer")
        settings = options_of(s3_access_key_id=KEY, s3_secret_access_key=SECRET, s3_session_token=TOKEN)
        found = resolved(s3_access_key_id=KEY, s3_secret_access_key=SECRET, s3_session_token=TOKEN)
        parsed = stream_io._infer_credentials(KEY, SECRET)
        assert (parsed.s3_access_key, parsed.s3_secret_key, parsed.config_file) == (KEY, SECRET, None)
        with pytest.raises(OSError) as caught:
            stream_io.open_stream(
                "s3://b/k",
                s3_endpoint="http://127.0.0.1:1",
                force_http=True,
                http_options=stream_io.HTTPOptions(retries=0),
                **TestEndpoints.BOTH,
            )
        text = repr(settings) + repr(found) + repr(parsed) + caplog.text + str(caught.value) + repr(caught.value)
        assert KEY not in text
        assert SECRET not in text
        assert TOKEN not in text
        assert "X-Amz" not in text
        assert "s3://b/k" in str(caught.value)
        assert "127.0.0.1:1" in str(caught.value)

    @pytest.mark.parametrize("keys", ["arguments", "file", "parameters"])
    def test_no_object_of_ours_in_a_traceback_shows_a_secret(self, tmp_path, keys):
        arguments = {"s3_access_key_id": KEY, "s3_secret_access_key": SECRET, "s3_session_token": TOKEN}
        options = {"s3_endpoint": "127.0.0.1:1", "force_http": True, "http_options": stream_io.HTTPOptions(retries=0)}
        if keys == "file":
            file = tmp_path / "s3cfg"
            file.write_text(f"[default]\naccess_key = {KEY}\nsecret_key = {SECRET}\n")
            options["s3_config_path"] = str(file)
        else:
            options.update(arguments)
        if keys == "parameters":
            customer = {"SSECustomerKey": SECRET, "SSECustomerAlgorithm": "AES256"}
            options["s3_extra_args"] = {"get": customer, "put": customer}
        state = {"a": torch.ones(2)}

        def save(uri):
            with tensorizer.TensorSerializer(uri, stream_options=options) as file:
                file.write_state_dict(state)

        def save_beside_a_pickle(uri):
            with tensorizer_saving(lambda _: uri, stream_options=options):
                torch.save(state, tmp_path / "x.pt")

        def checkpoint(uri):
            from tensorizer.distributed import TensorizerWriter

            writer = TensorizerWriter(uri, stream_options=options)
            torch.distributed.checkpoint.save(state, storage_writer=writer)

        def sharded(uri):
            tensorizer.TensorDeserializer(f"{uri}/model.safetensors.index.json", stream_options=options)

        def signed(uri):
            arguments = {"public_key": tensorizer.SigningKey.generate().public_key, "stream_options": options}
            tensorizer.TensorDeserializer(uri, **arguments)

        doors = [
            lambda uri: stream_io.open_stream(uri, **options),
            lambda uri: tensorizer.TensorDeserializer(uri, stream_options=options),
            lambda uri: tensorizer.load_file(f"{uri}/", stream_options=options),
            *(save, save_beside_a_pickle, sharded, signed),
            *([checkpoint] if HAS_CHECKPOINTS else []),
        ]
        for door in doors:
            self.assert_ours_show_no_secret(lambda door=door: door("s3://b/k"))

    def test_no_object_of_ours_in_a_traceback_shows_the_password_of_a_url_or_server(self, monkeypatch):
        monkeypatch.setenv("TENSORIZER_HTTP_RETRIES", "0")
        monkeypatch.setitem(stream_io.RedisStreamFile.__init__.__kwdefaults__, "retries", 0)
        for uri in (f"http://u:{WORD}@127.0.0.1:1/m?sig={WORD}", f"redis://:{WORD}@127.0.0.1:1/p"):
            for door in (stream_io.open_stream, tensorizer.TensorDeserializer, tensorizer.load_file, tensorizer.verify):
                self.assert_ours_show_no_secret(lambda door=door, uri=uri: door(uri))

    def test_no_object_of_ours_in_a_traceback_shows_a_token_of_the_hub(self, monkeypatch, tmp_path):
        pytest.importorskip("transformers")
        hub = pytest.importorskip("huggingface_hub")
        from tensorizer.integrations.huggingface import from_pretrained

        monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
        kwargs = {"use_auth_token": SECRET}
        self.assert_ours_show_no_secret(lambda: from_pretrained("org/none", token=SECRET, **kwargs))

    def assert_ours_show_no_secret(self, call):
        with pytest.raises(BaseException) as caught:  # as checkpoints raise
            call()
        error = caught.value
        error = next(iter([failure[0] for failure in getattr(error, "failures", {}).values()] or [error]))
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        ours = [frame for frame in frames if frame.f_globals.get("__name__", "").startswith("tensorizer")]
        assert ours
        for frame in ours:
            for name, value in frame.f_locals.items():
                if type(value).__module__.startswith("tensorizer"):
                    for secret in (SECRET, TOKEN, WORD, "X-Amz-Signature"):
                        assert secret not in repr(value), (frame.f_code.co_name, name)
        assert SECRET not in str(error)
        assert WORD not in str(error)

    def test_endpoint_and_source_are_logged_once(self, caplog):
        caplog.set_level(logging.INFO, "tensorizer")
        for _ in range(3):
            resolved(s3_access_key_id=KEY, s3_secret_access_key=SECRET, s3_endpoint="once.example")
        lines = [record.getMessage() for record in caplog.records]
        assert lines == ["S3 endpoint once.example, credentials from the arguments"]


def test_sessions_of_a_process_share_what_botocore_knows_of_services_and_nothing_else(monkeypatch, tmp_path):
    pytest.importorskip("boto3")
    from tensorizer._io.s3.client import make_client, make_session

    def client(name):
        session = make_session(None)
        return session, make_client(session, "http://127.0.0.1:9", (name, "secret", None), None, None, None)

    (first, one), (second, two) = client("a"), client("b")
    assert first.get_component("data_loader") is second.get_component("data_loader")
    assert one.meta.config is not two.meta.config
    keys = [each._request_signer._credentials.access_key for each in (one, two)]
    assert keys == ["a", "b"]
    monkeypatch.setenv("AWS_DATA_PATH", str(tmp_path))
    assert str(tmp_path) in make_session(None).get_component("data_loader").search_paths
