"""Every example runs, offline, on models made here."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from paths import EXAMPLES

from tensorizer import TensorDeserializer, TensorSerializer

# examples/demo.py and encrypt_existing.py have tests of their own
SCRIPTS = [
    "serialize.py",
    "deserialize-simple.py",
    "deserialize.py",
    "encryption.py",
    "hf_serialization.py",
    "torch_compat_training.py",
    "numpy_arrays.py",
    "subprocess_serialization.py",
    "benchmark.py",
]

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.xdist_group("transformers")]


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a script in this process: importing transformers once is slow enough."""

    def run(script, *arguments):
        path = EXAMPLES / script
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        monkeypatch.syspath_prepend(str(path.parent))
        capsys.readouterr()
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    import tiny_models

    return tiny_models.save_language_model(tmp_path_factory.mktemp("llama"))


def skip_without(script):
    for module in re.findall(r"^\s*(?:import|from) (\w+)", (EXAMPLES / script).read_text(), re.MULTILINE):
        if module in ("transformers", "diffusers", "safetensors", "matplotlib"):
            pytest.importorskip(module, reason=f"{module} is not installed")


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_explains_itself(script, run, capsys):
    skip_without(script)
    with pytest.raises(SystemExit) as end:
        run(script, "--help")
    assert end.value.code == 0
    usage = capsys.readouterr().out
    documentation = ast.get_docstring(ast.parse((EXAMPLES / script).read_text()))
    assert " ".join(documentation.split(".")[0].split()) in " ".join(usage.split())


@pytest.fixture
def tensors_folder(language_model, tmp_path, run):
    path = tmp_path / "out"
    output = run("serialize.py", "--model-ref", language_model, "--output", path, "--dtype", "float32")
    assert re.search(r"Wrote [\d.]+ KB in [\d.]+ s, [\d.]+ .B/s", output)
    return path


def test_a_model_is_written_loaded_and_speaks(tensors_folder, run):
    arguments = ("--source", tensors_folder / "model.tensors", "--model-ref", tensors_folder)
    output = run("deserialize-simple.py", *arguments, "--prompt", "abc", "--max-new-tokens", "4")
    assert re.search(r"Loaded [\d.]+ KB in", output)
    assert re.search(r"^Output: a b c", output, re.MULTILINE)
    for options in ((), ("--verify-hash", "--model-ref", tensors_folder)):
        output = run("deserialize.py", "--source", tensors_folder, *options, "--prompt", "ab")
        assert re.search(r"Loaded [\d.]+ KB in", output)
        assert re.search(r"^Output: a b", output, re.MULTILINE)


def test_loading_an_encrypted_model(tmp_path, run, monkeypatch):
    import tiny_models

    from tensorizer import EncryptionParams
    from tensorizer.integrations.huggingface import save_pretrained

    limits = EncryptionParams.OpsLimit.MIN, EncryptionParams.MemLimit.MIN
    encryption = EncryptionParams.from_string("open sesame", *limits)
    save_pretrained(tiny_models.llama(), tmp_path, tokenizer=tiny_models.tokenizer(), encryption=encryption)
    arguments = ("--source", tmp_path, "--encryption")
    monkeypatch.delenv("MODEL_PASSPHRASE", raising=False)
    with pytest.raises(SystemExit, match="MODEL_PASSPHRASE"):
        run("deserialize.py", *arguments)
    monkeypatch.setenv("MODEL_PASSPHRASE", "open sesame")
    output = run("deserialize.py", *arguments)
    assert "Output:" in output
    assert "sesame" not in output


@pytest.mark.skipif(
    "torch.uint8" not in torch._weights_only_unpickler._get_allowed_globals(),
    reason="weights_only=True of this torch takes no uint8, as the state of the random generator is",
)
@pytest.mark.parametrize("background", [(), ("--background",)], ids=["inline", "background"])
def test_training_resumes_where_it_stopped(tmp_path, background, run):
    def final_step(folder):
        from tensorizer.torch_compat import tensorizer_loading

        with tensorizer_loading(device="cpu"):
            return torch.load(folder / "step-8.pt", weights_only=True)

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run("torch_compat_training.py", "--out-dir", whole, "--steps", 8, "--save-every", 4)
    run("torch_compat_training.py", "--out-dir", parts, "--steps", 4, "--save-every", 4, *background)
    output = run(
        "torch_compat_training.py", "--out-dir", parts, "--steps", 8, "--save-every", 4, "--resume", *background
    )
    assert "Resumed from step-4.pt" in output
    assert sorted(file.name for file in parts.iterdir()) == sorted(file.name for file in whole.iterdir())
    left, right = final_step(whole), final_step(parts)
    assert left["step"] == right["step"] == 8
    assert left["scheduler"] == right["scheduler"]
    for name, tensor in left["model"].items():
        assert torch.equal(tensor, right["model"][name]), name


def test_saving_every_zero_steps_is_a_usage_error(tmp_path, run, capsys):
    with pytest.raises(SystemExit) as end:
        run("torch_compat_training.py", "--out-dir", tmp_path / "none", "--save-every", 0)
    assert end.value.code == 2
    assert "--save-every" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_resuming_from_nothing_is_a_usage_error(tmp_path, run, capsys):
    with pytest.raises(SystemExit) as end:
        run("torch_compat_training.py", "--out-dir", tmp_path, "--resume")
    assert end.value.code == 2
    assert "no checkpoint" in capsys.readouterr().err


def test_arrays_are_shown_with_their_values(run, tmp_path):
    output = run("numpy_arrays.py")
    assert re.search(r"PARAM +counts: int64 \(2, 3\) \[0 1 2 3 4 5\]", output)
    assert re.search(r"PARAM +weights: torch\.bfloat16 \(5,\) \[-1\. +-0\.5 +0\. +0\.5 +1\. *\]", output)
    assert re.search(r"BUFFER +mask: bool \(2,\) \[ True False\]", output)
    with TensorSerializer(tmp_path / "own.tensors") as serializer:
        serializer.write_state_dict({"layer": {"weight": torch.ones(3)}})
    assert "('layer', 'weight'): float32 (3,) [1. 1. 1.]" in run("numpy_arrays.py", tmp_path / "own.tensors")


def test_another_process_writes_the_checkpoint(tmp_path):
    """As a program of its own: the child process imports the main module."""
    script, output = EXAMPLES / "subprocess_serialization.py", tmp_path / "out.tensors"
    paths = os.pathsep.join(path for path in sys.path if path)
    arguments = [sys.executable, str(script), "--output", str(output), "--width", "16"]
    result = subprocess.run(
        arguments,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "Training goes on after" in result.stdout
    tensors = TensorDeserializer(output, device="cpu")
    assert list(tensors) == [f"{i}.{name}" for i in range(4) for name in ("weight", "bias")]


# --- without a model of the reader's -------------------------------------------------------------------------------


def test_the_examples_of_language_models_need_no_argument_and_no_network(tmp_path, run, monkeypatch):
    skip_without("serialize.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODEL_PASSPHRASE", "open sesame")
    assert "Wrote" in run("serialize.py")
    for script in ("deserialize.py", "deserialize-simple.py"):
        assert re.search(r"^Output: ", run(script), re.MULTILINE)
    run("hf_serialization.py", "--validate")
    assert (tmp_path / "out" / "model.tensors").is_file()
    with pytest.raises(SystemExit) as end:
        run("encryption.py")
    assert end.value.code == 0


def test_the_cache_is_filled_and_read_without_a_network(run):
    assert "2 tensors" in run("node_cache.py")


# --- the benchmark --------------------------------------------------------------------------------------------------


def test_the_benchmark_measures_every_library_on_the_same_model(language_model, tmp_path, run, monkeypatch):
    skip_without("benchmark.py")
    pytest.importorskip("safetensors")
    code = runpy.run_path(str(EXAMPLES / "benchmark.py"))
    code["write_forms"](str(language_model), tmp_path, torch.float32)
    measured = {
        loader: json.loads(run("benchmark.py", "--measure", loader, tmp_path).splitlines()[-1])
        for loader in ("transformers", "safetensors", "tensorizer")
    }
    assert all(result["seconds"] > 0 for result in measured.values())
    assert len({result["bytes"] for result in measured.values()}) == 1

    # the whole program, with one library: each measurement is a process that imports transformers
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    assert "medians: tensorizer" in run("benchmark.py", "--trials", 1, "--loaders", "tensorizer")


def test_the_benchmark_reads_sources_with_growing_buffers(tmp_path, run):
    path = tmp_path / "model.tensors"
    with TensorSerializer(path) as serializer:
        serializer.write_state_dict({"weight": torch.randn(1000)})
    arguments = ("--sources", path, "--buffer-sizes", 4096, 8192, "--trials", 2)
    text = run("benchmark.py", *arguments)
    assert len(re.findall(r"^(raw|load) +buffer +[48]\.0 KiB: ", text, re.MULTILINE)) == 8
    runs = [json.loads(line) for line in run("benchmark.py", *arguments, "--json").splitlines()]
    assert {(r["kind"], r["buffer_size"]) for r in runs} == {(k, n) for k in ("raw", "load") for n in (4096, 8192)}
    assert {r["bytes"] for r in runs if r["kind"] == "raw"} == {path.stat().st_size}


def test_the_benchmark_refuses_numbers_below_one(run, capsys):
    for arguments in (("--trials", "0"), ("--sources", "x", "--buffer-sizes", "0")):
        with pytest.raises(SystemExit) as end:
            run("benchmark.py", *arguments)
        assert end.value.code == 2
        assert "expected 1 or more" in capsys.readouterr().err


# --- the notebook --------------------------------------------------------------------------------------------------


def execute_notebook(path: Path) -> list:
    """Runs the code cells in order and gives the value of each cell's last expression, as Jupyter would show it."""
    namespace, values = {}, []
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, str(path), "exec"), namespace)
        values.append(eval(compile(ast.Expression(last.value), str(path), "eval"), namespace) if last else None)
        if hasattr(values[-1], "_repr_html_"):
            values[-1] = values[-1]._repr_html_()
    return values


def test_the_notebook_runs_and_shows_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where it leaves its file
    shown = [value for value in execute_notebook(EXAMPLES / "inspect.ipynb") if isinstance(value, str)]
    assert len(shown) == 2
    assert all("<summary>8 tensors</summary>" in html for html in shown)
    assert "bfloat16" in shown[0]
    assert "SHA256:" not in shown[0]
    assert shown[1].count(" SHA256:") == 2  # of one tensor: as text and as what to sort by


def test_the_notebook_is_stored_without_output():
    cells = json.loads((EXAMPLES / "inspect.ipynb").read_text())["cells"]
    assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in cells)


def test_the_notebook_about_hugging_face_runs_and_shows_what_was_loaded(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.chdir(tmp_path)
    path = EXAMPLES / "huggingface.ipynb"
    assert all(not c.get("outputs") and not c.get("execution_count") for c in json.loads(path.read_text())["cells"])
    shown = execute_notebook(path)
    (table,) = [value for value in shown if isinstance(value, str) and "<table" in value]
    assert "LoadReport" not in table
    assert "<td>loaded</td>" in table
    assert True in shown  # the loaded model says what the written one says


def test_weight_sync_follows_a_training_to_its_last_version():
    result = subprocess.run(
        [sys.executable, EXAMPLES / "weight_sync.py"], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "version 19 (step 19) is equal" in result.stdout
