"""Includes and imports point one way, the environment is read in one place, and importing stays light."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paths import ROOT

import tensorizer
from tensorizer.torch import save_file

PACKAGE = Path(tensorizer.__file__).resolve().parent
CSRC = ROOT / "csrc"

# From a folder of csrc/ to the folders that it may include, itself left out.
LAYERS = {
    "core": set(),
    "digest": {"core"},
    "format": {"core", "digest"},
    "crypto": {"core"},
    "io": {"core"},
    "device": {"core"},
    "load": {"core", "format", "crypto", "io", "device", "digest"},
    "save": {"core", "format", "crypto", "io", "device", "digest"},
    "sign": {"core", "digest", "format", "crypto", "io", "load"},
    "sync": {"core"},
    "bind": {"core", "digest", "format", "crypto", "io", "device", "load", "save", "sign", "sync"},
}
PYTHON_HEADERS = re.compile(r"^(Python\.h|pybind11/|torch/|ATen/|c10/|numpy/)")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)

sources = pytest.mark.skipif(not CSRC.is_dir(), reason="the sources are not here")


def native_files():
    return sorted(path for path in CSRC.rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh", ".inc"))


@sources
def test_every_native_file_is_in_a_known_folder():
    assert {path.relative_to(CSRC).parts[0] for path in native_files()} <= set(LAYERS)


@sources
def test_includes_between_folders_of_csrc_point_one_way():
    wrong = []
    for path in native_files():
        folder = path.relative_to(CSRC).parts[0]
        for bracket, name in INCLUDE.findall(path.read_text(encoding="utf-8")):
            target = name.split("/")[0] if "/" in name else None
            if target in LAYERS and target != folder and target not in LAYERS[folder]:
                wrong.append(f"{path.relative_to(ROOT)} includes {name}")
            generated = name.endswith(".inc")  # written by the build
            if bracket == '"' and target not in LAYERS and not generated:
                wrong.append(f"{path.relative_to(ROOT)} includes {name} without its folder")
    assert not wrong, "\n".join(wrong)


@sources
def test_the_folders_of_io_know_only_io_itself_and_core_and_all_of_them_curl_and_the_cache_local_files():
    folders = {path.name for path in (CSRC / "io").iterdir() if path.is_dir()}
    assert folders == {"local", "curl", "http", "redis", "upload", "cache"}
    wrong = []
    for path in native_files():
        here = path.relative_to(CSRC).parts
        if here[0] != "io":
            continue
        for _, name in INCLUDE.findall(path.read_text(encoding="utf-8")):
            target = name.split("/")
            known = {"curl", here[1]} | ({"local"} if here[1] == "cache" else set())
            if target[0] == "io" and len(target) == 3 and target[1] in folders - known:
                wrong.append(f"{path.relative_to(ROOT)} includes {name}")
    assert not wrong, "\n".join(wrong)


@sources
def test_only_bind_knows_python_and_torch():
    wrong = [
        f"{path.relative_to(ROOT)} includes {name}"
        for path in native_files()
        for _, name in INCLUDE.findall(path.read_text(encoding="utf-8"))
        if PYTHON_HEADERS.match(name) and path.relative_to(CSRC).parts[0] != "bind"
    ]
    assert not wrong, "\n".join(wrong)


@sources
def test_native_code_asks_the_processor_itself_what_it_can_do():
    """The run-time library of zig, which wheels are built with, answers every ``__builtin_cpu_supports`` with no."""
    wrong = [path for path in native_files() if "__builtin_cpu_supports(" in path.read_text(encoding="utf-8")]
    assert wrong == [], "csrc/core/cpu_features.h has the answers"


@sources
def test_native_code_never_prints_or_aborts():
    forbidden = re.compile(r"\b(std::cout|std::cerr|printf\s*\(|puts\s*\(|std::abort|std::terminate|exit\s*\()")
    allowed = re.compile(r"\bsn?printf\s*\(|\bvsnprintf\s*\(|\b_exit\s*\(")
    wrong = []
    for path in native_files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            code = allowed.sub("", line.split("//")[0])
            if forbidden.search(code):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not wrong, "\n".join(wrong)


# --- Python ---------------------------------------------------------------------------------------------------------


def modules():
    return sorted(path for path in PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "__init__"


def package_of(path: Path) -> list:
    return list(path.relative_to(PACKAGE).parent.parts)


def imports(path: Path, top_level_only: bool):
    """Names below ``tensorizer`` that a module imports, and foreign top-level packages."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own, foreign = set(), set()

    def visit(node, inside_function):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            inside = inside_function or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            if isinstance(child, (ast.Import, ast.ImportFrom)) and not (top_level_only and inside_function):
                note(child)
            visit(child, inside)

    def note(node):
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                (own if parts[0] == "tensorizer" else foreign).add(".".join(parts[1:]) or alias.name)
            return
        if node.level:
            base = package_of(path)[: len(package_of(path)) - node.level + 1]
        elif (node.module or "").split(".")[0] == "tensorizer":
            base = []
        else:
            foreign.add(node.module.split(".")[0])
            return
        module = (node.module or "").split(".") if node.module else []
        if not node.level:
            module = module[1:]
        for alias in node.names:
            full = [*base, *module]
            target = PACKAGE.joinpath(*full, alias.name)
            is_module = target.is_dir() or target.with_suffix(".py").exists() or alias.name == "_C"
            own.add(".".join([*full, alias.name] if is_module or not full else full))

    visit(tree, False)
    return own, foreign


def test_foundations_import_nothing_of_the_package():
    for name in ("errors", "_system/config", "_system/cgroup", "_version"):
        own, _ = imports(PACKAGE / f"{name}.py", top_level_only=False)
        assert own == set(), name


# From a folder of the package to what it may import of the package, itself left out.
FOLDERS = {
    "_system": {"_C", "errors"},
    "_format": {"_C", "_system", "errors"},
    "_io": {"_C", "_version", "_system", "_keys", "errors"},
    "_load": {"_C", "_system", "_keys", "_format", "_io", "errors", "_progress"},
    "_files": {
        "_C",
        "_system",
        "_keys",
        "_format",
        "_io",
        "_load",
        "_save",
        "errors",
        "_encryption",
        "_progress",
        "_signing",
    },
    "_save": {"_C", "_system", "_keys", "_format", "_io", "errors", "_progress"},
    "_sync": {"_C", "_system", "_keys", "_format", "_io", "_load", "_save", "errors", "_encryption", "_signing"},
}


def test_folders_of_the_package_import_what_is_below_them():
    found = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name.startswith("_")} - {"__pycache__"}
    assert found == set(FOLDERS)
    wrong = []
    for path in modules():
        folder = (package_of(path) or [""])[0]
        if folder in FOLDERS:
            own, _ = imports(path, top_level_only=True)
            wrong += [f"{name_of(path)}: {t}" for t in own if t.split(".")[0] not in FOLDERS[folder] | {folder}]
    assert not wrong


def test_one_module_knows_how_indexes_and_files_of_models_are_called():
    """Others ask it; they may name such files in their documentation."""
    wrong = set()
    for path in modules():
        if name_of(path) == "_io.model_files":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
                wrong |= {(name_of(path), node.value)} if ".index." in node.value else set()
    assert not wrong


def test_no_private_folder_imports_a_public_module():
    """At run time or for types; they are below what users import. Errors are of all."""
    public = {path.stem for path in PACKAGE.glob("[!_]*.py")} | {"cli", "integrations"} - {"errors"}
    upward = []
    for path in modules():
        folder, *_ = package_of(path) or [""]
        is_public = path.name == "__init__.py" and folder == "distributed"
        if (
            folder in ("_io", "_load", "_files", "_save", "_sync", "_format", "_system", "distributed")
            and not is_public
        ):
            text = path.read_text(encoding="utf-8")
            found = re.findall(r"^ *from tensorizer\.(\w+)|^ *from tensorizer import (.+)$", text, re.MULTILINE)
            names = {name for one, several in found for name in (one, *re.findall(r"\w+", several))}
            upward += [f"{name_of(path)}: {name}" for name in names & (public - {"errors"})]
    assert not upward


def test_file_names_that_say_little_are_there_once():
    for name in ("access", "cache", "names", "options"):
        assert len(list(PACKAGE.rglob(f"{name}.py"))) == 1, name


def test_s3_imports_nothing_above_it():
    for path in (PACKAGE / "_io" / "s3").glob("*.py"):
        own, _ = imports(path, top_level_only=False)
        assert {target.split(".")[0] for target in own} <= {"_C", "_io", "_system", "_version", "errors"}, name_of(path)


def import_graph():
    """From each module of the package to those that it imports, inside of functions too."""
    names = {name_of(path) for path in modules()}

    def module_of(target):
        while target not in names and "." in target:
            target = target.rpartition(".")[0]
        return target

    graph = {name_of(path): imports(path, top_level_only=False)[0] for path in modules()}
    return {name: {module_of(t) for t in own} & names - {name} for name, own in graph.items()}


def find_circle(graph):
    """Modules that import each other in a circle; empty where there is none."""
    done = set()

    def visit(name, way):
        if name in way:
            return way[way.index(name) :]
        if name in done:
            return []
        for target in sorted(graph[name]):
            circle = visit(target, [*way, name])
            if circle:
                return circle
        done.add(name)
        return []

    return next(filter(None, (visit(name, []) for name in sorted(graph))), [])


def test_modules_do_not_import_each_other_in_circles():
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert not find_circle(import_graph())


def test_reading_and_writing_are_one_class_each():
    for name in ("serializer", "deserializer"):
        tree = ast.parse((PACKAGE / f"{name}.py").read_text(encoding="utf-8"))
        assert len([node for node in tree.body if isinstance(node, ast.ClassDef)]) == 1, name


def test_the_core_does_not_import_what_is_built_on_it():
    above = ("integrations", "torch_compat", "protobuf", "tensors_pb2", "serialization")
    for name in ("serializer", "deserializer", "errors", "encryption"):
        own, _ = imports(PACKAGE / f"{name}.py", top_level_only=False)
        assert not [target for target in own if target.split(".")[0] in above], name


def test_nothing_imports_the_integrations_but_themselves_and_the_old_names():
    for path in modules():
        if package_of(path)[:1] != ["integrations"] and path.name != "legacy.py":
            own, _ = imports(path, top_level_only=False)
            assert not [t for t in own if t.split(".")[0] == "integrations"], name_of(path)


LIGHT = {
    "boto3",
    "botocore",
    "redis",
    "transformers",
    "diffusers",
    "safetensors",
    "fsspec",
    "google",
    "lightning",
    "psutil",
}
LIGHT |= {"pynvml", "requests", "urllib3", "tqdm", "accelerate", "huggingface_hub", "yaml"}


def test_optional_packages_are_imported_when_first_needed():
    for path in modules():
        if package_of(path)[:1] == ["integrations"]:
            continue
        _, foreign = imports(path, top_level_only=True)
        if path.name not in ("protobuf.py", "tensors_pb2.py"):
            assert not foreign & LIGHT, name_of(path)


def test_environment_variables_are_read_in_one_place():
    wrong = []
    for path in modules():
        text = path.read_text(encoding="utf-8")
        if name_of(path) != "_system.config" and re.search(r"os\.environ|os\.getenv|\bgetenv\(|\benviron\b", text):
            wrong.append(name_of(path))
    assert not wrong
    if CSRC.is_dir():
        native = [path for path in native_files() if re.search(r"\bgetenv\s*\(", path.read_text(encoding="utf-8"))]
        assert not native


def test_the_package_prints_nothing_outside_of_its_commands():
    printing = ("print", "sys.stdout.write", "sys.stderr.write")
    wrong = [
        f"{name_of(path)}:{node.lineno}"
        for path in modules()
        if package_of(path)[:1] != ["cli"]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in printing
    ]
    assert not wrong


def run(program: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_the_package_stays_light_quiet_and_free_of_side_effects():
    program = """
import json, os, sys, threading
import torch, numpy
before, tasks = set(sys.modules), len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0
import logging
import tensorizer
from tensorizer import TensorSerializer, TensorDeserializer, stream_io, utils, serialization, torch_compat
after = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0
new = sorted(set(sys.modules) - before)
handlers = [n for n, l in logging.Logger.manager.loggerDict.items()
            if n.startswith("tensorizer") and isinstance(l, logging.Logger) and (l.handlers or l.level)]
print(json.dumps([new, after - tasks, torch.cuda.is_initialized(), handlers]))
"""
    new, threads, cuda, handlers = json.loads(run(program))
    assert not {name.split(".")[0] for name in new} & (LIGHT - {"google"})
    assert "google.protobuf" not in new
    assert threads == 0
    assert cuda is False
    assert handlers == []


def test_the_public_names_are_those_of_the_api():
    assert tensorizer.__all__[:12] == [
        "TensorSerializer", "TensorDeserializer", "TensorType", "CryptographyError", "EncryptionParams",
        "DecryptionParams", "FilterFuncType", "stream_io", "torch_compat", "utils", "protobuf", "tensors_pb2",
    ]  # fmt: skip
    program = """
import tensorizer
assert tensorizer.serialization and tensorizer.stream_io and tensorizer.utils and tensorizer.torch_compat
from tensorizer import (TensorSerializer, TensorDeserializer, TensorType, EncryptionParams, DecryptionParams,
                        CryptographyError, FilterFuncType)
from tensorizer.serialization import HashMismatchError, TensorHash, HashType, TensorEntry
assert tensorizer.__version__ == tensorizer._version.__version__
"""
    run(program)


def test_the_constants_of_serialization_are_those_of_the_api():
    from tensorizer import serialization

    wanted = {
        "TENSORIZER_VERSION": 5,
        "LONG_TENSOR_TENSORIZER_VERSION": 5,
        "META_TENSOR_TENSORIZER_VERSION": 4,
        "ENCRYPTION_TENSORIZER_VERSION": 3,
        "OPAQUE_TENSORIZER_VERSION": 2,
        "NON_OPAQUE_TENSORIZER_VERSION": 1,
        "TENSORIZER_MAGIC": b"|TZR|",
        "OPAQUE_DTYPE_SEP": "\0",
    }
    assert {name: getattr(serialization, name) for name in wanted} == wanted
    assert [(kind.name, int(kind)) for kind in serialization.TensorType] == [
        ("PARAM", 0),
        ("BUFFER", 1),
        ("STATE_DICT", 2),
    ]
    assert [(kind.name, int(kind)) for kind in serialization.HashType] == [("CRC32", 0), ("SHA256", 1)]
    assert serialization.logger.name == "tensorizer.serialization"
    assert serialization.__all__ == tensorizer.__all__[:7]


def test_the_records_of_serialization_are_those_of_the_api():
    from tensorizer.serialization import HashType, TensorEntry, TensorHash, TensorType

    one, other = TensorHash(HashType.CRC32, b"abcd"), TensorHash(HashType.SHA256, bytes(32))
    assert one < other
    assert one == TensorHash(type=HashType.CRC32, hash=b"abcd")
    assert not hasattr(one, "__dict__")

    def entry(**changes):
        fields = {
            "metadata_version": 1,
            "name": "a",
            "type": TensorType.PARAM,
            "dtype": "<f4",
            "shape": (2, 3),
            "offset": 73,
            "data_offset": 160,
            "data_length": 24,
            "hashes": None,
            "header_hashes": None,
        }
        assert list(fields) == list(TensorEntry.__annotations__)
        return TensorEntry(**{**fields, **changes})

    assert not hasattr(entry(), "__dict__")
    assert entry() == entry()
    assert entry() < entry(name="b")
    assert entry().deserialized_length == 24
    assert not entry().is_long_tensor
    assert entry(metadata_version=5).is_long_tensor
    assert entry(data_length=0).deserialized_length == 24
    assert entry(data_length=0, dtype="<V2\0torch.bfloat16").deserialized_length == 12
    assert entry(data_length=0, dtype="<f8", shape=()).deserialized_length == 8
    assert entry(data_length=0, shape=(0, 3)).deserialized_length == 0


def test_performance_counters_are_off_unless_asked_for():
    program = """
import io, sys
from tensorizer import TensorDeserializer, TensorSerializer, serialization
import torch
class Kept(io.BytesIO):
    def close(self): pass
stream = Kept()
TensorSerializer(stream).write_state_dict({"a": torch.zeros(1 << 18)})
stream.seek(0)
TensorDeserializer(stream, device="cpu").close()
print(serialization._enable_perf_stats)
try:
    stats = serialization._get_perf_stats()
except RuntimeError:
    print("off")
else:
    print(sorted(stats), stats["file_readinto_bytes"] >= 1 << 20)
"""
    names = ["file_readinto_bytes", "file_readinto_secs", "tensor_to_device_bytes", "tensor_to_device_secs"]
    assert run(program) == "False\noff\n"
    assert run(program, TENSORIZER_ENABLE_PERF_STATS="1") == f"True\n{names} True\n"


def test_performance_counters_count_the_files_of_a_sharded_model(tmp_path):
    tensors = {name: torch.zeros(1 << 12) for name in "abc"}
    save_file(tensors, tmp_path / "model.tensors", max_shard_size=1 << 14)
    program = f"""
from tensorizer import TensorDeserializer, serialization
TensorDeserializer({str(tmp_path)!r}, device="cpu").close()
print(serialization._get_perf_stats()["file_readinto_bytes"])
"""
    assert run(program, TENSORIZER_ENABLE_PERF_STATS="1") == f"{3 << 14}\n"
