"""Read one .tensors file from every kind of source with growing buffers, and say how fast each was.

python benchmark.py model.tensors --file-prefix ./models --local-only --iterations 3 --json
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tensorizer import TensorDeserializer
from tensorizer.stream_io import open_stream
from tensorizer.utils import convert_bytes

READ_SIZE = 16 << 20


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="name of the .tensors file below the prefix and the bucket")
    parser.add_argument("--file-prefix", type=Path, default=Path(), help="local folder of the file")
    parser.add_argument("--local-only", action="store_true", help="only the local file")
    parser.add_argument("--s3-endpoint", default=None, help="host of the bucket, with http:// if need be")
    parser.add_argument("--bucket", default="tensorized", help="bucket of the file")
    parser.add_argument("--test-https", action="store_true", help="read from https:// as well")
    parser.add_argument("--test-s3", action="store_true", help="read from s3:// as well")
    parser.add_argument("--redis", default=None, metavar="URI", help="read from Redis as well: redis://host:port")
    parser.add_argument("--no-load-redis", action="store_true", help="the file is in Redis already")
    parser.add_argument("--start-buffer-size", type=int, default=256 << 10, help="bytes")
    parser.add_argument("--end-buffer-size", type=int, default=16 << 20, help="bytes; sizes double from start to end")
    parser.add_argument("--start-plaid-buffers", type=int, default=1, help="accepted for old scripts, without effect")
    parser.add_argument("--end-plaid-buffers", type=int, default=1, help="accepted for old scripts, without effect")
    parser.add_argument("--iterations", type=int, default=3, help="runs per source and size")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument(
        "--convert-json", type=Path, metavar="FILE", help="print a file of such lines as one JSON array"
    )
    args = parser.parse_args()
    if args.start_buffer_size < 1:
        parser.error("--start-buffer-size: wanted 1 or more")
    if args.convert_json is None and args.model is None:
        parser.error("name a model, or a file with --convert-json")
    if (args.test_https or args.test_s3) and args.s3_endpoint is None:
        parser.error("--test-https and --test-s3 need --s3-endpoint")
    return args


def sources(args: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Kind, URI and options of each source to read."""
    yield "file", str(args.file_prefix / args.model), {}
    if args.local_only:
        return
    if args.s3_endpoint is not None:
        host = urlsplit(args.s3_endpoint).netloc or args.s3_endpoint
        yield "http", f"http://{host}/{args.bucket}/{args.model}", {}
        if args.test_https:
            yield "https", f"https://{host}/{args.bucket}/{args.model}", {}
        if args.test_s3:
            options = {"s3_endpoint": args.s3_endpoint, "force_http": args.s3_endpoint.startswith("http://")}
            yield "s3", f"s3://{args.bucket}/{args.model}", options
    if args.redis is not None:
        yield "redis", f"{args.redis.rstrip('/')}/{args.model}", {}


def store_in_redis(args: argparse.Namespace) -> None:
    import redis

    client = redis.Redis.from_url(args.redis)
    with TensorDeserializer(args.file_prefix / args.model, device="cpu", lazy_load=True) as deserializer:
        deserializer.to_redis(client, args.model)
    client.close()


def read_raw(uri: str, options: dict[str, Any]) -> dict[str, Any]:
    """All bytes of the stream, nothing done with them."""
    buffer = bytearray(READ_SIZE)
    nbytes = 0
    start = time.perf_counter()
    with open_stream(uri, **options) as stream:
        first_byte = time.perf_counter() - start
        while True:
            count = stream.readinto(buffer)
            if not count:
                break
            nbytes += count
        headers = getattr(stream, "response_headers", None) or {}
        cached = headers.get("x-cache-status")
    return {"kind": "raw", "bytes": nbytes, "open_seconds": first_byte, "cache": cached}


def load(uri: str, options: dict[str, Any]) -> dict[str, Any]:
    """All tensors, on the CPU."""
    with open_stream(uri, **options) as stream:
        deserializer = TensorDeserializer(stream, device="cpu")
        tensors = dict(deserializer)
    return {"kind": "load", "bytes": deserializer.total_tensor_bytes, "tensors": len(tensors)}


def main() -> None:
    args = parse_args()
    if args.convert_json is not None:
        json.dump(
            [json.loads(line) for line in args.convert_json.read_text().splitlines() if line], sys.stdout, indent=2
        )
        print()
        return
    if args.redis is not None and not args.no_load_redis and not args.local_only:
        store_in_redis(args)

    buffer_size = args.start_buffer_size
    while buffer_size <= args.end_buffer_size:
        for scheme, uri, options in sources(args):
            for iteration in range(args.iterations):
                for function in (read_raw, load):
                    start = time.perf_counter()
                    result = function(uri, {**options, "buffer_size": buffer_size})
                    result["seconds"] = time.perf_counter() - start
                    report(args, {"scheme": scheme, "buffer_size": buffer_size, "iteration": iteration, **result})
        buffer_size *= 2


def report(args: argparse.Namespace, result: dict[str, Any]) -> None:
    rate = result["bytes"] / result["seconds"]
    if args.json:
        print(
            json.dumps({"node": platform.node(), "model": args.model, "bytes_per_second": rate, **result}), flush=True
        )
        return
    size = convert_bytes(result["buffer_size"], decimal=False)
    print(f"{result['scheme']:6} {result['kind']:4} buffer {size:>10}: {convert_bytes(rate)}/s", flush=True)


if __name__ == "__main__":
    main()
