"""Files go to and fro between this project and the installed releases of the reference, without a difference.

Each release runs in a virtual environment of its own, in one process for all files of a direction (conftest.py).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import reference_format as fmt
import reference_worker as worker
import samples
import torch
from conftest import REFERENCE_RELEASES

from tensorizer import TensorDeserializer, TensorSerializer

pytestmark = [pytest.mark.network, pytest.mark.slow]

WORKER = Path(worker.__file__)


def run_worker(python: Path, action: str, folder: Path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(
        [str(python), "-I", str(WORKER), action, str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def described(source, **options):
    with TensorDeserializer(source, device="cpu", **options) as deserializer:
        return worker.describe(deserializer.read_tensors())


# --- from the reference to us ---------------------------------------------------------------------------------------

CASES = worker.cases(long_dimensions=True)


def in_one_worker(release):
    """What one release wrote is used by several tests."""
    return pytest.param(release, marks=pytest.mark.xdist_group(f"interchange {release}"))


@pytest.fixture(scope="module", params=[in_one_worker(release) for release in REFERENCE_RELEASES])
def written_there(request, reference_python, tmp_path_factory):
    """A folder with the cases, written by a release."""
    python = reference_python(request.param)
    folder = tmp_path_factory.mktemp(f"from-{request.param}")
    written = run_worker(python, "write", folder)
    assert set(written.values()) == {request.param}
    return folder


def wanted_rows(content):
    """What a case holds, from the case itself."""
    if isinstance(content, torch.nn.Module):
        modules = [path for path, _ in content.named_modules()]
        for name in samples.module_names(content):
            path, attribute = name.rsplit(".", 1)
            kind = 0 if attribute in content.get_submodule(path)._parameters else 1
            yield modules.index(path), kind, name, samples.named_tensor(content, name)
        return

    def walk(value, path):
        if isinstance(value, torch.Tensor):
            yield 0, 2, path[0] if len(path) == 1 and isinstance(path[0], str) else path, value
            return
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from walk(inner, (*path, key))

    for idx, kind, name, value in walk(content, ()):
        yield idx, kind, name, torch.zeros(value.shape, dtype=value.dtype) if value.is_meta else value


def test_what_a_release_writes_loads_here_in_every_way(written_there):
    paths = sorted(written_there.glob("*.tensors"))
    assert {path.stem for path in paths} >= set(CASES) - {"long"}
    for path in paths:
        wanted = worker.describe(wanted_rows(CASES[path.stem]))
        for options in ({}, {"verify_hash": True}, {"lazy_load": True}, {"num_readers": 1}, {"mmap": True}):
            assert described(path, **options) == wanted, (path.stem, options)


@pytest.mark.usefixtures("eager_and_lazy")
def test_a_module_that_a_release_wrote_goes_into_a_module_here(written_there):
    target = worker.Net()
    with torch.no_grad():
        for value in target.parameters():
            value.zero_()
    with TensorDeserializer(written_there / "module.tensors", device="cpu", verify_hash=True) as deserializer:
        deserializer.load_into_module(target)
        assert deserializer.verify_module(target)[0] is True
    samples.assert_same(dict(target.state_dict()), dict(worker.Net().state_dict()))


# --- from us to the reference ---------------------------------------------------------------------------------------


def ours() -> dict:
    """Cases beyond those that the reference can write itself, all readable by it."""
    values = dict(CASES)
    values["odd names"] = {
        "": worker.make("empty name", "uint8", (3,)),
        "\x1eabc": worker.make("marker", "uint8", (3,)),
    }
    values["meta scalars"] = {
        "a": torch.empty((), device="meta"),
        "b": torch.empty((), device="meta", dtype=torch.bfloat16),
        "c": worker.make("c", "float32", (2,)),
    }
    values["opaque without data"] = {
        "meta": torch.empty((3, 2), device="meta", dtype=torch.bfloat16),
        "empty": torch.empty((0, 2), dtype=torch.bfloat16),
        "real": worker.make("real", "bfloat16", (4,)),
    }
    values["index beyond 256 KiB"] = {f"{'n' * 90}.{i}": worker.make(f"i{i}", "uint8", (1,)) for i in range(2200)}
    return values


@pytest.fixture(scope="module")
def written_here(tmp_path_factory):
    """A folder with our files, and what they hold."""
    folder = tmp_path_factory.mktemp("ours")
    wanted = {}

    def keep(name, serializer, *calls):
        for call in calls:
            if isinstance(call, torch.nn.Module):
                serializer.write_module(call)
            else:
                serializer.write_state_dict(call)
        serializer.close()
        wanted[name] = [row for call in calls for row in worker.describe(wanted_rows(call))]

    for name, content in ours().items():
        keep(name, TensorSerializer(folder / f"{name}.tensors", fsync=False), content)
    for hashes in ("crc32", "sha256", ()):
        name = f"hashes {'+'.join(hashes) if isinstance(hashes, tuple) else hashes}"
        keep(
            name,
            TensorSerializer(folder / f"{name}.tensors", hashes=hashes, fsync=False),
            CASES["large"],
            CASES["dtypes"],
        )
    parts = [
        {f"{'p' * 80}.{step}.{i}": worker.make(f"{step}.{i}", "uint8", (3,)) for i in range(600)} for step in range(4)
    ]
    keep("outgrown", TensorSerializer(folder / "outgrown.tensors", fsync=False), *parts)
    keep(
        "calls",
        TensorSerializer(folder / "calls.tensors", fsync=False),
        CASES["module"],
        CASES["names"],
        CASES["nested"],
    )
    return folder, wanted


@pytest.mark.parametrize("release", REFERENCE_RELEASES)
def test_what_we_write_loads_in_a_release_with_hashes_verified(release, reference_python, written_here):
    folder, wanted = written_here
    found = run_worker(reference_python(release), "read", folder)
    assert set(found) == set(wanted)
    for name, ways in found.items():
        if name == "long" and release < "2.12":
            assert all("Version" in rows for rows in ways.values()), ways  # version 5: refused, as such
            continue
        for way in ("one reader", "verified"):
            assert ways[way] == wanted[name], (name, way)
        assert isinstance(ways["eager"], int), (name, ways["eager"])


def test_only_long_dimensions_need_a_version_that_older_releases_refuse(written_here):
    folder, _ = written_here
    versions = {path.stem: fmt.read_file(path.read_bytes()).version for path in folder.glob("*.tensors")}
    assert [name for name, version in versions.items() if version > 4] == ["long"]


def test_the_worker_describes_our_own_reading_alike(written_here):
    folder, wanted = written_here
    for name, rows in wanted.items():
        found = described(folder / f"{name}.tensors", verify_hash=True, allow_missing_hashes=name == "hashes ")
        assert found == rows


@pytest.mark.parametrize("release", REFERENCE_RELEASES)
def test_extra_state_does_not_disturb_a_release_that_loads_into_a_module(release, reference_python, tmp_path):
    state = {"amax": worker.make("amax", "float32", (70_000,)), "deep": {"scale": worker.make("scale", "float16", ())}}
    samples.write_module(tmp_path / "with.tensors", worker.StatefulNet(state), include_extra_state=True)
    samples.write_module(tmp_path / "without.tensors", worker.Net())
    found = run_worker(reference_python(release), "place", tmp_path)
    assert found["with"] == found["without"]
    count, rest, rows = found["with"]
    assert count == len(samples.module_names(worker.Net()))
    assert rest == "untouched"
    target = worker.StatefulNet()
    with TensorDeserializer(tmp_path / "with.tensors", device="cpu") as deserializer:
        deserializer.load_into_module(target)
    samples.assert_same(target.state, state)
    own = target.state_dict()
    del own["_extra_state"]
    wanted = worker.describe((0, 0, name, value) for name, value in own.items())
    assert [row for row in rows if row[2] != ["cache"]] == wanted  # the releases make every buffer persistent
