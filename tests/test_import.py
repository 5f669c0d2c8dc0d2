"""What ``import tensorizer`` gives: every public name, on demand, and a clear word where nothing was built."""

from __future__ import annotations

import ast
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import torch

import tensorizer
from tensorizer import errors

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
import tensorizer
from tensorizer import TensorizerError, StreamError, __version__
dir(tensorizer), hasattr(tensorizer, "no such name")
print(sorted({name.split(".")[0] for name in sys.modules} & {"torch", "numpy", "boto3", "google"}),
      "tensorizer._C" in sys.modules)
"""
    assert succeed(program) == "[] False\n"


def test_every_submodule_is_an_attribute_without_being_imported_first():
    public = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    public = {name for name in public if not name.startswith("_")}
    assert public == set(tensorizer._SUBMODULES)
    succeed(
        f"""
import tensorizer
for name in {sorted(public)}:
    module = getattr(tensorizer, name)
    assert module.__name__ == "tensorizer." + name, module
assert tensorizer.protobuf.serialize_model and tensorizer.cuda.pinned_memory and tensorizer.torch_compat
"""
    )


def test_every_name_is_listed_by_dir_and_a_star_import_brings_all_of_all():
    succeed(
        """
import tensorizer
listed = set(dir(tensorizer))
assert set(tensorizer.__all__) <= listed and "load_model" in listed and "cuda" in listed
from tensorizer import *
missing = [name for name in tensorizer.__all__ if name not in globals()]
assert not missing, missing
assert TensorSerializer is tensorizer.serialization.TensorSerializer
assert TensorDeserializer is tensorizer.TensorDeserializer is tensorizer.deserializer.TensorDeserializer
assert isinstance(TensorType.PARAM, tensorizer.TensorType)
"""
    )


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


def test_type_checkers_see_the_names_that_are_resolved_on_demand():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname: node.module for node in block.body for alias in node.names}
    resolved = {name: f"tensorizer.{module}" for name, module in tensorizer._DEFINED_IN.items()}
    assert seen == {**resolved, **dict.fromkeys(tensorizer._SUBMODULES, "tensorizer")}


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
    program = """
import tensorizer
try:
    tensorizer.TensorDeserialiser
except AttributeError as error:
    assert "TensorDeserialiser" in str(error)
else:
    raise SystemExit("found")
try:
    from tensorizer import TensorDeserialiser
except ImportError as error:
    assert "TensorDeserialiser" in str(error)
else:
    raise SystemExit("found")
"""
    succeed(program)


def copy_without_module(folder: Path) -> Path:
    ignore = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(PACKAGE, folder / "tensorizer", ignore=ignore)
    return folder


def test_sources_without_a_build_say_how_to_build(tmp_path):
    folder = copy_without_module(tmp_path)
    for program in ("import tensorizer", "from tensorizer import TensorSerializer", "import tensorizer.stream_io"):
        result = run(program, folder)
        assert result.returncode == 1
        last = result.stderr.strip().splitlines()[-1]
        for wanted in ("ImportError", "not built", "pip install -e .", "make build", str(folder / "tensorizer")):
            assert wanted in last, last
        assert "circular" not in result.stderr


def test_a_build_for_another_python_is_named(tmp_path):
    folder = copy_without_module(tmp_path)
    (folder / "tensorizer" / "_C.cpython-36m-x86_64-linux-gnu.so").touch()
    result = run("import tensorizer", folder)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    wanted = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert "_C.cpython-36m-x86_64-linux-gnu.so" in last
    assert wanted in last
