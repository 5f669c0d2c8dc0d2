"""Encrypts a model with a passphrase, decrypts it again, and says how long both took.

    python encryption.py                       # a small random model, made here, offline
    python encryption.py --model-ref org/name  # from the hub, or a local folder

The passphrase comes from the environment variable MODEL_PASSPHRASE, or is asked for. Needs ``transformers``.
"""

from __future__ import annotations

import argparse
import getpass
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from small_model import make_model
from transformers import AutoModelForCausalLM

from tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer
from tensorizer.utils import no_init_or_tensor


def get_passphrase() -> str:
    return os.environ.get("MODEL_PASSPHRASE") or getpass.getpass("Passphrase: ")


def save_encrypted(model: torch.nn.Module, path: Path, passphrase: str) -> None:
    # The file stores the cost and the salt of the derivation; only the passphrase opens it.
    encryption = EncryptionParams.from_string(
        passphrase,
        opslimit=EncryptionParams.OpsLimit.MODERATE,
        memlimit=EncryptionParams.MemLimit.MODERATE,
    )
    start = time.perf_counter()
    with TensorSerializer(path, encryption=encryption) as serializer:
        serializer.write_module(model)
    show("encrypted and wrote", serializer.total_tensor_bytes, start)


def load_encrypted(model: torch.nn.Module, path: Path, passphrase: str) -> None:
    decryption = DecryptionParams.from_string(passphrase)
    start = time.perf_counter()
    with TensorDeserializer(path, encryption=decryption, plaid_mode=True) as deserializer:
        deserializer.load_into_module(model)
        show("read and decrypted", deserializer.total_tensor_bytes, start)


def show(what: str, nbytes: int, start: float) -> None:
    seconds = time.perf_counter() - start
    print(f"{what} {nbytes / 1e9:.2f} GB in {seconds:.2f} s: {nbytes / 1e9 / seconds:.2f} GB/s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-ref", help="name on the hub or local folder; default: a small random model")
    model_ref = parser.parse_args().model_ref
    passphrase = get_passphrase()
    original = AutoModelForCausalLM.from_pretrained(model_ref) if model_ref else make_model()
    with no_init_or_tensor():
        restored = AutoModelForCausalLM.from_config(original.config)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "encrypted.tensors"
        save_encrypted(original, path, passphrase)
        load_encrypted(restored, path, passphrase)
    expected = original.state_dict()
    same = all(torch.equal(value.cpu(), expected[name].cpu()) for name, value in restored.state_dict().items())
    print("the decrypted model is identical" if same else "the decrypted model DIFFERS")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
