"""The cache of the node: what its settings mean."""

from __future__ import annotations

import subprocess
import sys

import cache_tools
import pytest

from tensorizer import stream_io
from tensorizer.stream_io import CacheOptions, open_stream

environment, folder, site = cache_tools.environment, cache_tools.folder, cache_tools.site


@pytest.mark.parametrize("value", [True, b"folder", 3, ["x"]])
def test_another_type_is_a_mistake(value):
    with pytest.raises(TypeError, match="cache"):
        open_stream("http://127.0.0.1:9/x", cache=value)


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [("max_size", -1, ValueError), ("max_size", "much", ValueError), ("max_size", "10%", ValueError),
     ("min_free", "101%", ValueError), ("min_free", -5, ValueError), ("max_size", 1.5, TypeError),
     ("offline", 1, TypeError)],
)  # fmt: skip
def test_a_setting_that_is_none_is_named(field, value, kind):
    with pytest.raises(kind, match=field):
        CacheOptions("x", **{field: value})


def test_a_variable_that_is_none_is_named(monkeypatch, folder):
    for name, value in (("SIZE", "much"), ("MIN_FREE", "-1"), ("OFFLINE", "perhaps")):
        monkeypatch.setenv(f"TENSORIZER_CACHE_{name}", value)
        with pytest.raises(ValueError, match=f"TENSORIZER_CACHE_{name}"):
            open_stream("http://127.0.0.1:9/x", cache=folder)
        monkeypatch.delenv(f"TENSORIZER_CACHE_{name}")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("500GB", 500 * 10**9), ("200GiB", 200 << 30), ("1.5k", 1500), ("7", 7), ("2 MiB", 2 << 20), (12, 12)],
)
def test_sizes_are_numbers_or_text(text, nbytes):
    from tensorizer._system.sizes import parse_size

    assert parse_size("max_size", text) == nbytes


def test_without_a_cache_nothing_of_it_is_imported(site, tmp_path):
    (site.root / "a").write_bytes(b"x")
    program = f"""
import sys
from tensorizer.stream_io import open_stream
open_stream("{site.url}/a").read()
assert not [name for name in sys.modules if name.startswith("tensorizer") and name.endswith("cache")]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_options_are_those_of_stream_io_and_of_the_module():
    from tensorizer import cache

    assert stream_io.CacheOptions is CacheOptions is cache.CacheOptions
