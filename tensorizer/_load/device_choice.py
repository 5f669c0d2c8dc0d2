"""The names of ``_load/arguments.py``, while other branches import them from here."""

from tensorizer._load.arguments import DeviceArgument, DeviceChooser, as_device, target_device

__all__ = ["DeviceArgument", "DeviceChooser", "as_device", "target_device"]
