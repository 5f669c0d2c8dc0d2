"""The demo: the network it shows, and the tour over a user's own files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paths import ROOT

sys.path.append(str(ROOT / "examples"))

from crepe import CENTS_OF_BIN_0, CENTS_PER_BIN, SAMPLE_RATE, WINDOW, Crepe, pitch_of, tone, windows_of


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


class TestNetwork:
    def test_it_has_the_published_size(self) -> None:
        with torch.device("meta"):
            network = Crepe()
        assert sum(parameter.numel() for parameter in network.parameters()) == 22_239_976
        assert len(network.state_dict()) == 44

    def test_a_window_is_centred_and_scaled(self) -> None:
        windows = windows_of(3 + tone(440.0))
        assert windows.shape == (4, WINDOW)
        assert windows.mean(dim=1).abs().max() < 1e-5
        assert torch.allclose(windows.std(dim=1), torch.ones(4), atol=1e-4)

    def test_a_tone_repeats_with_its_frequency(self) -> None:
        wave = tone(400.0)
        period = SAMPLE_RATE // 400
        assert torch.allclose(wave[:-period], wave[period:], atol=1e-4)

    @pytest.mark.parametrize("peak", [0, 180, 359])
    def test_the_strongest_output_names_the_pitch(self, peak: int) -> None:
        confidences = torch.zeros(2, 360)
        confidences[:, peak] = 0.75
        hertz, confidence = pitch_of(confidences)
        assert hertz == pytest.approx(10 * 2 ** ((CENTS_OF_BIN_0 + CENTS_PER_BIN * peak) / 1200))
        assert confidence == 0.75


def save_torch(folder: Path) -> Path:
    torch.save({"state_dict": {"a": torch.arange(9.0), "b": [torch.ones(3, dtype=torch.int8)]}}, folder / "model.pt")
    return folder / "model.pt"


def save_safetensors(folder: Path) -> Path:
    from safetensors.torch import save_file

    save_file({"a": torch.arange(9.0), "b": torch.ones(3, dtype=torch.bfloat16)}, folder / "model.safetensors")
    return folder / "model.safetensors"


def save_directory(folder: Path) -> Path:
    from safetensors.torch import save_file

    save_file({"a": torch.arange(9.0)}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": torch.tensor([float("nan"), -0.0])}, folder / "model-00002-of-00002.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


class TestOwnModel:
    @pytest.mark.parametrize("save", [save_torch, save_safetensors, save_directory])
    def test_every_kind_of_input_comes_back_bit_identical(self, save, tmp_path: Path) -> None:
        result = demo("--model", str(save(tmp_path)), "--cache", str(tmp_path / "cache"))
        assert result.returncode == 0, result.stderr
        assert "2 of 2 tensors bit-identical" in result.stdout
        assert result.stdout.count(" ms ") >= 4
        assert list((tmp_path / "cache").iterdir()) == []

    @pytest.mark.parametrize("what", ["nothing", "empty"])
    def test_a_path_without_weights_ends_with_one_line(self, what: str, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        result = demo("--model", str(tmp_path / what), "--cache", str(tmp_path / "cache"))
        assert result.returncode == 1
        assert len(result.stderr.strip().splitlines()) == 1
        assert str(tmp_path / what) in result.stderr


@pytest.mark.slow
@pytest.mark.network
def test_the_trained_network_hears_every_tone(tmp_path: Path) -> None:
    result = demo("--cache", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "44 of 44 tensors bit-identical" in result.stdout
    assert "every tone recognised" in result.stdout
    assert "outputs bit-identical" in result.stdout
