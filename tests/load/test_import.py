"""What ``import tensorizer`` gives: every public name, on demand, and a clear word where nothing was built."""

from __future__ import annotations

import ast
import importlib
import os
import pickle
import re
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch
from torch_versions import RELEASE

import tensorizer
from tensorizer import TensorDeserializer, TensorSerializer, errors

PACKAGE = Path(tensorizer.__file__).resolve().parent


def run(program: str, folder: Path, *flags: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-W", "error", *flags, "-c", program]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=environment, cwd=folder
    )


def succeed(program: str) -> str:
    result = run(program, PACKAGE.parent)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_the_package_imports_neither_torch_nor_numpy_nor_the_compiled_module():
    program = """
import sys
import typing
import tensorizer
from tensorizer import TensorizerError, StreamError, __version__
dir(tensorizer), hasattr(tensorizer, "no such name")
print(sorted({name.split(".")[0] for name in sys.modules} & {"torch", "numpy", "boto3", "google", "transformers"}),
      sorted({"tensorizer._C", "tensorizer.legacy", "tensorizer.tensors_pb2"} & set(sys.modules)))
from tensorizer import load_model, serialize_model
print("tensorizer.legacy" in sys.modules, "transformers" in sys.modules)
"""
    assert succeed(program) == "[] []\nTrue False\n"


def test_every_submodule_is_an_attribute_without_being_imported_first():
    public = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    public = {name for name in public if not name.startswith("_")}
    assert public == {name for name, origin in for_type_checkers("__init__.py").items() if origin == "tensorizer"}
    succeed(
        f"""
import tensorizer
for name in {sorted(public)}:
    module = getattr(tensorizer, name)
    assert module.__name__ == "tensorizer." + name, module
assert tensorizer.protobuf.serialize_model and tensorizer.cuda.pinned_memory and tensorizer.torch_compat
assert tensorizer.protobuf.serialize_tensor and tensorizer.tensors_pb2.Tensor
"""
    )


def test_every_name_is_listed_by_dir_and_a_star_import_brings_all_of_all():
    succeed(
        """
import tensorizer
listed = set(dir(tensorizer))
assert set(tensorizer.__all__) == listed and "load_model" in listed and "torch" not in listed
from tensorizer import *
missing = [name for name in tensorizer.__all__ if name not in globals()]
assert not missing, missing
assert TensorSerializer is tensorizer.serialization.TensorSerializer
assert TensorDeserializer is tensorizer.TensorDeserializer is tensorizer.deserializer.TensorDeserializer
assert isinstance(TensorType.PARAM, tensorizer.TensorType)
"""
    )


def test_the_page_of_the_reference_has_every_name_of_the_package():
    page = (Path(__file__).parents[2] / "docs" / "api" / "index.md").read_text(encoding="utf-8")
    section = page.partition("## Names in the package")[2].partition("## Examples")[0]
    listed = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", section, re.MULTILINE))
    assert listed.keys() == {*tensorizer.__all__}
    assert len(set(tensorizer.__all__)) <= 70


def test_every_exception_is_on_the_top_level():
    for name in errors.__all__:
        assert getattr(tensorizer, name) is getattr(errors, name)
        assert name in tensorizer.__all__
    raised = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == errors.__name__
    }
    assert raised == set(errors.__all__)


def for_type_checkers(path: str) -> dict[str, str]:
    """From the names that a file offers below ``if TYPE_CHECKING:`` to the modules they come from."""
    tree = ast.parse((PACKAGE / path).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    return {alias.name: node.module for node in block.body for alias in node.names if alias.asname == alias.name}


@pytest.mark.parametrize("path", ["__init__.py", "distributed/__init__.py", "stream_io.py"])
def test_names_that_are_resolved_on_demand_are_those_that_type_checkers_see(path):
    module = importlib.import_module(
        ".".join(["tensorizer", *Path(path).with_suffix("").parts]).removesuffix(".__init__")
    )
    names = for_type_checkers(path)
    assert names
    if RELEASE < (2, 3):
        names.pop("dcp_default", None)
    for name, origin in names.items():
        value = getattr(module, name)
        assert value is getattr(importlib.import_module(origin), name)
    for name, origin in module._ORIGINS.items():
        assert for_type_checkers(path)[name] == origin, name
    assert {*module.__all__, *dir(module)} <= {*for_type_checkers(path), *vars(module)}


def test_dcp_default_says_which_torch_it_wants():
    program = """
import sys, warnings
warnings.simplefilter("ignore")
import torch.distributed.checkpoint as dcp
vars(dcp).pop("_storage_utils", None)
sys.modules[f"{dcp.__name__}._storage_utils"] = None
import tensorizer.distributed
try:
    tensorizer.distributed.dcp_default
except ImportError as error:
    print(error)
print(tensorizer.distributed.TensorizerWriter.__name__)
"""
    assert (
        succeed(program)
        == f"dcp_default: expected torch 2.3 or later, got torch {torch.__version__}\nTensorizerWriter\n"
    )


def test_objects_of_the_package_survive_pickling(tmp_path):
    entry = tensorizer.serialization.TensorHash(tensorizer.serialization.HashType.CRC32, b"abcd")
    for value in (tensorizer.TensorType.BUFFER, entry, tensorizer.TensorDeserializer, tensorizer.FormatError("x")):
        again = pickle.loads(pickle.dumps(value))
        assert type(again) is type(value)
        assert str(again) == str(value)
    stored = tmp_path / "values.pkl"
    stored.write_bytes(pickle.dumps([tensorizer.TensorSerializer, torch.ones(1), tensorizer.HashMismatchError("y")]))
    succeed(
        f"""
import pickle
cls, tensor, error = pickle.load(open({str(stored)!r}, "rb"))
import tensorizer
assert cls is tensorizer.TensorSerializer and isinstance(error, tensorizer.HashMismatchError)
"""
    )


def test_unknown_names_are_attribute_and_import_errors():
    for error, program in (
        (AttributeError, "tensorizer.TensorDeserialiser"),
        (ImportError, "from tensorizer import TensorDeserialiser"),
    ):
        with pytest.raises(error, match="TensorDeserialiser"):
            exec(program)


def copy_without_module(folder: Path) -> Path:
    ignore = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(PACKAGE, folder / "tensorizer", ignore=ignore)
    return folder


def last_line(program: str, folder: Path) -> str:
    result = run(program, folder)
    assert result.returncode == 1
    assert "circular" not in result.stderr
    return result.stderr.strip().splitlines()[-1]


def test_sources_without_a_build_say_how_to_build_and_name_a_build_for_another_python(tmp_path):
    folder = copy_without_module(tmp_path)
    for program in ("import tensorizer", "from tensorizer import TensorSerializer", "import tensorizer.stream_io"):
        last = last_line(program, folder)
        for wanted in ("ImportError", "not built", "pip install -e .", "make build", str(folder / "tensorizer")):
            assert wanted in last, last
    (folder / "tensorizer" / "_C.cpython-36m-x86_64-linux-gnu.so").touch()
    last = last_line("import tensorizer", folder)
    assert "_C.cpython-36m-x86_64-linux-gnu.so" in last
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in last


def test_the_arguments_of_both_classes_have_types():
    hints = {kind: typing.get_type_hints(kind.__init__) for kind in (TensorDeserializer, TensorSerializer)}
    assert hints[TensorDeserializer]["encryption"] == typing.Optional[tensorizer.DecryptionParams]
    assert hints[TensorSerializer]["encryption"] == typing.Optional[tensorizer.EncryptionParams]
    for kind, own in hints.items():
        accepted = typing.get_args(own["file_obj"])
        assert {str, bytes, int} <= set(accepted), kind
        assert not [name for name, hint in own.items() if hint is typing.Any], kind


@pytest.mark.slow
def test_a_type_checker_accepts_what_works_and_refuses_what_does_not(tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed")
    wrong = {
        "TensorDeserializer(1.5)": "file_obj",
        "TensorDeserializer(open('f'))": "file_obj",
        "TensorDeserializer('f', encryption='secret')": "encryption",
        "TensorSerializer(torch.nn.Linear(1, 1))": "file_obj",
        "TensorSerializer('f', encryption=DecryptionParams.from_string('x'))": "encryption",
        "TensorSerializer('f').write_module({})": "write_module",
    }
    right = [
        "TensorDeserializer('f', device={'': 'cpu'}, encryption=DecryptionParams.from_string('x'))",
        "TensorDeserializer(pathlib.Path('f'))",
        "TensorDeserializer(open('f', 'rb'))",
        "TensorDeserializer(io.BytesIO())",
        "TensorDeserializer(tempfile.TemporaryFile())",
        "TensorDeserializer(stream_io.open_stream('f'))",
        "TensorDeserializer(stream_io.CURLStreamFile('http://127.0.0.1'))",
        "TensorSerializer(io.BytesIO(), encryption=EncryptionParams.random())",
        "TensorSerializer(open('f', 'wb+'))",
        "TensorSerializer(tempfile.NamedTemporaryFile())",
        "TensorSerializer(stream_io.open_stream('f', 'wb+'))",
        "tensorizer.serialization.TensorDeserializer('f')",
        "tensorizer.cuda.pinned_memory()",
    ]
    head = [
        "import io, pathlib, tempfile",
        "import torch",
        "import tensorizer",
        "from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer, stream_io",
    ]
    (tmp_path / "program.py").write_text("\n".join([*head, *wrong, *right]) + "\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "program.py"]
    environment = {**os.environ, "MYPYPATH": str(PACKAGE.parent), "MYPY_CACHE_DIR": str(tmp_path / "cache")}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path, env=environment
    )
    found = {int(line.split(":")[1]): line for line in result.stdout.splitlines() if ": error:" in line}
    assert sorted(found) == list(range(len(head) + 1, len(head) + 1 + len(wrong))), result.stdout + result.stderr
    for line, word in zip(sorted(found), wrong.values()):
        assert word in found[line] or "Argument" in found[line], found[line]


def test_nothing_is_said_at_exit_where_dill_is_installed(tmp_path):
    """dill keeps references to frames and modules, so that finalisers run when the names of modules are gone."""
    pytest.importorskip("dill")
    program = """
import dill, sys, torch
from tensorizer import TensorDeserializer, TensorSerializer
path = sys.argv[1]
serializer = TensorSerializer(path)
serializer.write_state_dict({"a": torch.ones(3)})
serializer.close()
lazy = TensorDeserializer(path, device="cpu", lazy_load=True)
eager = TensorDeserializer(path, device="cpu")
closed = TensorDeserializer(path, device="cpu")
closed.close()
unfinished = TensorSerializer(path + ".other")
unfinished.write_state_dict({"a": torch.ones(3)})
begun = TensorSerializer(path + ".third")
"""
    command = [sys.executable, "-c", program, str(tmp_path / "f")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
