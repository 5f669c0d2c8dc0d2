"""The tables of docs/remote.md, docs/remote_stores.md and docs/environment.md say what the code does."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re

import pytest
from paths import ROOT

import tensorizer.serialization
from tensorizer._io.redis import parse_redis_address
from tensorizer.stream_io import HTTPOptions, RedisStreamFile, open_stream

REMOTE = (ROOT / "docs" / "remote.md").read_text()
ENVIRONMENT = (ROOT / "docs" / "environment.md").read_text()
STORES = (ROOT / "docs" / "remote_stores.md").read_text()
UNITS = {"": 1, "s": 1, "KiB": 1 << 10, "MiB": 1 << 20}
#: Fields whose default is described in words.
WORDS = {
    "connections": ("16 or 64", None),
    "retries": ("none", None),
    "headers": ("none", {}),
    "certificate_handling": ("system", None),
    "proxy": ("libcurl's", None),
    "http_version": ('`"auto"`', "auto"),
}


def table_rows(text: str, heading: str) -> list[list[str]]:
    """Cells of the first table whose head begins with these words."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line[1:-1].split("|")])
    return rows


def number(text: str) -> float:
    """The number of ``10 s``, ``1 MiB``, ``64``."""
    value, _, unit = text.partition(" ")
    return float(value) * UNITS[unit]


def settings() -> dict[str, tuple[str, str]]:
    """Default and environment variables of each field, as the table has them."""
    found = {}
    for names, default, environment, _ in table_rows(REMOTE, "field"):
        fields = re.findall(r"`(\w+)`", names)
        defaults = default.split(", ") if len(default.split(", ")) == len(fields) else [default] * len(fields)
        found.update({field: (value, environment) for field, value in zip(fields, defaults)})
    return found


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch):
    for name in re.findall(r"TENSORIZER_\w+", REMOTE):
        monkeypatch.delenv(name, raising=False)


def test_the_table_of_settings_has_every_field_and_no_other():
    assert set(settings()) == {field.name for field in dataclasses.fields(HTTPOptions)}


def test_the_table_of_settings_has_the_defaults_of_the_code():
    for field, (text, _) in settings().items():
        value = getattr(HTTPOptions(), field)
        if field in WORDS:
            assert (text, value) == WORDS[field]
        else:
            assert number(text) == value, field


def test_the_variables_of_the_table_change_their_fields(monkeypatch):
    variables = {field: re.findall(r"TENSORIZER_\w+", text) for field, (_, text) in settings().items()}
    assert sum(map(len, variables.values())) == 4
    for field, names in variables.items():
        for name in names:
            monkeypatch.setenv(name, "7")
            assert getattr(HTTPOptions(), field) == 7, name
            monkeypatch.delenv(name)


def test_the_native_side_has_the_same_defaults():
    from tensorizer import _C

    ours, native = HTTPOptions()._native(), _C.HttpOptions()
    for field in dataclasses.fields(HTTPOptions):
        if hasattr(native, field.name) and field.name not in ("headers", "proxy"):
            assert getattr(ours, field.name) == getattr(native, field.name), field.name


def test_the_table_of_redis_settings_has_every_argument_and_its_default():
    arguments = inspect.signature(RedisStreamFile).parameters
    described = {name.strip("`"): text for name, text, _ in table_rows(STORES, "argument | default")}
    assert set(described) == set(arguments) - {"uri", "begin", "end"}
    for name, text in described.items():
        default = arguments[name].default
        if default is None:
            assert (name, text) in {
                ("connections", "4"),
                ("certificate_handling", "system"),
                ("buffer_size", "the kernel's"),
                ("retries", "none"),
            }
        else:
            assert number(text) == default, name


def test_the_examples_of_redis_uris_mean_what_the_table_says():
    rows = table_rows(STORES, "URI")
    assert len(rows) == 5
    for uri, meaning in rows:
        address = parse_redis_address(uri.strip("`"))
        server = f"`{address.host}:{address.port}`, {address.database}, `{address.prefix}`"
        assert server in meaning
        assert address.tls == meaning.startswith("TLS")
        assert (not address.user) or f"`{address.user}` with `{address.password}`" in meaning


def test_every_s3_argument_is_described():
    names = {
        name for name in inspect.signature(open_stream).parameters if name.startswith("s3_") or name == "force_http"
    }
    described = {name for row in table_rows(STORES, "argument | meaning") for name in re.findall(r"`(\w+)`", row[0])}
    assert described == names | {"memory_budget"}


def test_the_page_of_environment_variables_lists_those_that_the_code_reads_and_at_most_twelve():
    names = re.compile(r"TENSORIZER_[A-Z_]+")
    read = set()
    for path in sorted((ROOT / "tensorizer").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        assert not re.search(r"os\.environ|getenv", source) or path.name == "config.py", path
        read |= {
            node.value
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and names.fullmatch(node.value)
        }
    read -= set(tensorizer.serialization.__all__)
    listed = [re.findall(names, name) for name, _, _ in table_rows(ENVIRONMENT, "variable | default")]
    assert sorted(read) == sorted(name for (name,) in listed)
    assert len(listed) <= 12
    for path in sorted((ROOT / "csrc").rglob("*.*")):
        assert "getenv" not in path.read_text(encoding="utf-8"), path
