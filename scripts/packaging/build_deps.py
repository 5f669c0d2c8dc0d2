#!/usr/bin/env python3
"""Builds the libraries of the lock file, as static archives that know nothing of this machine, into one prefix.

    build_deps.py --prefix DIR [--machine NAME] [--jobs N] [--check]

The Python that runs this has the packages of requirements/packaging.txt. Each library is built once: the prefix
remembers by which sources, flags and compiler, and the next call does what is missing. ``setup.py`` takes the prefix,
with the compiler in it, as ``TENSORIZER_STATIC_DEPS``.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import zig
from sources import Library, read_libraries, unpack

TREES = Path(__file__).resolve().parents[2] / "build" / "libraries"  # where sources are unpacked
# Exists on no machine: the static OpenSSL must not read the host's openssl.cnf, certificates or modules.
NOWHERE = "/nonexistent/tensorizer"
FLAGS = ["-O3", "-fPIC", "-fvisibility=hidden", "-ffunction-sections", "-fdata-sections", "-fstack-protector-strong"]


class Builder:
    """Runs the build steps of one library, with one toolchain, into one prefix.

    Attributes:
        machine: The processor that it builds for, as ``platform.machine()`` names it.
        crosses: It is another one than this machine's: nothing that is built can run.
    """

    def __init__(self, prefix: Path, machine: str, tree: Path, log: Path, jobs: int, check: bool) -> None:
        self.environment = zig.environment(prefix / "toolchain")
        self.prefix = prefix
        self.machine = machine
        self.crosses = machine != platform.machine()
        self.tree = tree
        self.log = log
        self.jobs = jobs
        self.check = check and not self.crosses

    @property
    def flags(self) -> list[str]:
        return [*FLAGS, f"-ffile-prefix-map={self.tree}=."]

    def run(self, *command: str, cwd: Path | None = None, **environment: str) -> None:
        clean = {name: value for name, value in os.environ.items() if name not in ("CFLAGS", "LDFLAGS", "CPPFLAGS")}
        clean |= {**self.environment, "PKG_CONFIG_LIBDIR": str(self.prefix / "lib" / "pkgconfig")}
        # The prefix serves wheels of many commits, so the time of none of them may be in it.
        clean |= {"SOURCE_DATE_EPOCH": "0", "LC_ALL": "C", "TZ": "UTC", **environment}
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            result = subprocess.run(command, cwd=cwd or self.tree, env=clean, stdout=log, stderr=log, check=False)
        if result.returncode != 0:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])
            sys.exit(f"{tail}\n{self.log}: {command[0]} ended with {result.returncode}")

    def make(self, *arguments: str, **environment: str) -> None:
        self.run("make", f"-j{self.jobs}", *arguments, **environment)

    def copy(self, *pairs: tuple[str, str]) -> None:
        for source, target in pairs:
            path = self.prefix / target
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self.tree / source, path)

    def cmake(self, options: dict[str, str]) -> None:
        programs = {"C_COMPILER": "cc", "CXX_COMPILER": "c++", "AR": "ar", "RANLIB": "ranlib"}
        settings = {
            "CMAKE_BUILD_TYPE": "None",
            "CMAKE_INSTALL_PREFIX": str(self.prefix),
            "CMAKE_INSTALL_LIBDIR": "lib",
            "CMAKE_PREFIX_PATH": str(self.prefix),
            "CMAKE_MAKE_PROGRAM": shutil.which("make") or "make",
            "CMAKE_FIND_USE_SYSTEM_ENVIRONMENT_PATH": "OFF",
            "CMAKE_FIND_USE_CMAKE_SYSTEM_PATH": "OFF",
            "CMAKE_POSITION_INDEPENDENT_CODE": "ON",
            "CMAKE_C_FLAGS": " ".join(self.flags),
            **{f"CMAKE_{key}": str(self.prefix / "toolchain" / tool) for key, tool in programs.items()},
            **({"CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": self.machine} if self.crosses else {}),
            **options,
        }
        arguments = [f"-D{name}={value}" for name, value in settings.items()]
        self.run("cmake", "-S", ".", "-B", "out", "-G", "Unix Makefiles", *arguments)
        self.run("cmake", "--build", "out", "--parallel", str(self.jobs))
        self.run("cmake", "--install", "out")


OPENSSL_WITHOUT = (
    "shared pinshared module legacy engine dso apps docs tests comp zlib afalgeng ssl-trace atexit autoload-config "
    "quic dtls"
)


def build_openssl(builder: Builder) -> None:
    options = [f"no-{name}" for name in OPENSSL_WITHOUT.split()] + ["enable-ec_nistp_64_gcc_128"]
    folders = ["--libdir=lib", f"--prefix={NOWHERE}", f"--openssldir={NOWHERE}"]
    # Its sources are compiled by relative names, and a folder named here would stay in the library as a text.
    builder.run("perl", "Configure", f"linux-{builder.machine}", *options, *folders, *FLAGS)
    builder.make("build_libs")
    staged = builder.tree / "staged"
    builder.run("make", "install_dev", f"DESTDIR={staged}")
    built = staged / NOWHERE.lstrip("/")
    shutil.copytree(built / "include", builder.prefix / "include", dirs_exist_ok=True)
    builder.copy(("libssl.a", "lib/libssl.a"), ("libcrypto.a", "lib/libcrypto.a"))


def build_nghttp2(builder: Builder) -> None:
    off = "BUILD_SHARED_LIBS ENABLE_APP ENABLE_HPACK_TOOLS ENABLE_EXAMPLES ENABLE_DOC BUILD_TESTING ENABLE_FAILMALLOC"
    builder.cmake({"ENABLE_LIB_ONLY": "ON", "BUILD_STATIC_LIBS": "ON", **dict.fromkeys(off.split(), "OFF")})


CURL_ON = (
    "BUILD_STATIC_LIBS HTTP_ONLY CURL_USE_OPENSSL OPENSSL_USE_STATIC_LIBS CURL_DISABLE_OPENSSL_AUTO_LOAD_CONFIG "
    "USE_NGHTTP2 ENABLE_THREADED_RESOLVER ENABLE_IPV6"
)
# Of the protocols and options of libcurl this package uses proxies, Basic, curl_getdate and the error texts.
CURL_OFF = (
    "BUILD_SHARED_LIBS BUILD_CURL_EXE BUILD_TESTING BUILD_EXAMPLES BUILD_LIBCURL_DOCS BUILD_MISC_DOCS "
    "ENABLE_CURL_MANUAL CURL_ZLIB CURL_BROTLI CURL_ZSTD USE_LIBIDN2 CURL_USE_LIBPSL CURL_USE_LIBSSH2 CURL_USE_GSSAPI "
    "ENABLE_ARES CURL_CA_FALLBACK"
)
CURL_DISABLED = (
    "ALTSVC AWS COOKIES DOH FORM_API GETOPTIONS HEADERS_API HSTS IPFS KERBEROS_AUTH LIBCURL_OPTION MIME "
    "NEGOTIATE_AUTH NETRC NTLM PROGRESS_METER SHUFFLE_DNS WEBSOCKETS"
)


def build_curl(builder: Builder) -> None:
    # Without these the paths of this machine's certificates would be built in.
    options = {"CURL_CA_BUNDLE": "none", "CURL_CA_PATH": "none"}
    options |= {"OPENSSL_ROOT_DIR": str(builder.prefix), "NGHTTP2_INCLUDE_DIR": str(builder.prefix / "include")}
    options |= {"NGHTTP2_LIBRARY": str(builder.prefix / "lib" / "libnghttp2.a")}
    options |= dict.fromkeys(CURL_ON.split(), "ON") | dict.fromkeys(CURL_OFF.split(), "OFF")
    options |= {f"CURL_DISABLE_{name}": "ON" for name in CURL_DISABLED.split()}
    builder.cmake({**options, "CMAKE_C_FLAGS": " ".join([*builder.flags, "-DNGHTTP2_STATICLIB"])})


def build_libsodium(builder: Builder) -> None:
    # CFLAGS also reach the assembler files; a stack protector of its own would be a second one.
    flags = [flag for flag in builder.flags if flag != "-fstack-protector-strong"]
    options = ["--disable-shared", "--enable-static", "--with-pic", "--disable-debug", "--disable-dependency-tracking"]
    options += [f"--host={builder.machine}-linux-gnu"] if builder.crosses else []
    builder.run("./configure", f"--prefix={builder.prefix}", *options, CFLAGS=" ".join(flags))
    builder.make()
    if builder.check:
        builder.make("check")
    builder.make("install")


def build_hiredis(builder: Builder) -> None:
    builder.make("libhiredis.a", CFLAGS=" ".join(builder.flags), DEBUG_FLAGS="", WARNINGS="")
    names = ["alloc", "async", "hiredis", "read", "sds", "sockcompat"]
    builder.copy(("libhiredis.a", "lib/libhiredis.a"), *((f"{n}.h", f"include/hiredis/{n}.h") for n in names))


def build_isal(builder: Builder) -> None:
    arguments = ["-f", "Makefile.unx", "units=crc", f"host_cpu={builder.machine}", "CC=cc", "AR=ar"]
    # Its CFLAGS are put together while make runs, and reach no compiler if the command line sets them.
    arguments += ["DEBUG_nasm=", f"DEBUG={' '.join(builder.flags)}"]
    builder.make(*arguments, "bin/isa-l.a", "isa-l.h")
    headers = [(f"include/{name}", f"include/isa-l/{name}") for name in ("crc.h", "crc64.h")]
    builder.copy(("bin/isa-l.a", "lib/libisal.a"), ("isa-l.h", "include/isa-l.h"), *headers)


RECIPES: dict[str, Callable[[Builder], None]] = {
    "openssl": build_openssl,
    "nghttp2": build_nghttp2,
    "curl": build_curl,
    "libsodium": build_libsodium,
    "hiredis": build_hiredis,
    "isa-l": build_isal,
}


NEEDS = {"curl": ("openssl", "nghttp2")}


def key_of(library: Library, compiler: str, done: dict[str, str]) -> str:
    """What a library is built from: its sources, its recipe, the compiler and the libraries that it needs."""
    constants = [OPENSSL_WITHOUT] if library.name == "openssl" else []
    constants += [CURL_ON, CURL_OFF, CURL_DISABLED] if library.name == "curl" else []
    parts = [library.sha256, library.debian.get("sha256", ""), compiler, *FLAGS, *constants]
    parts += [inspect.getsource(RECIPES[library.name]), *(done.get(name, "") for name in NEEDS.get(library.name, ()))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def build_all(prefix: Path, machine: str, cache: Path, jobs: int, check: bool) -> None:
    """The compiler for ``machine``, and every library of the lock file that the stamp in ``prefix`` lacks."""
    program, stamp = zig.zig_program(), prefix / "stamp.json"
    zig.write_tools(program, prefix / "toolchain", machine)
    (prefix / "licences").mkdir(exist_ok=True)
    compiler = (prefix / "toolchain" / "c++").read_text().replace(str(program), "zig").replace(str(prefix), "prefix")
    done: dict[str, str] = json.loads(stamp.read_text()) if stamp.exists() else {}
    for library in read_libraries():
        key = key_of(library, compiler, done)
        if done.get(library.name) == key:
            continue
        print(f"== {library.name} {library.version}", flush=True)
        log = cache / "logs" / machine / f"{library.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        tree = unpack(library, cache / "sources", TREES / library.name)
        RECIPES[library.name](Builder(prefix, machine, tree, log, jobs, check))
        shutil.copy2(tree / library.licence_file, prefix / "licences" / f"{library.name}.txt")
        shutil.rmtree(tree.parent)
        done[library.name] = key
        stamp.write_text(json.dumps(done, indent=2) + "\n")
    zig.write_runtimes(program, prefix)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", type=Path, required=True, help="where headers and archives go")
    parser.add_argument(
        "--machine", default=platform.machine(), choices=zig.BASELINE, help="the processor; default: this"
    )
    parser.add_argument("--cache", type=Path, default=Path(".cache/packaging"), help="downloads, logs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--check", action="store_true", help="run the libraries' own quick tests too")
    options = parser.parse_args()
    build_all(options.prefix.resolve(), options.machine, options.cache.resolve(), options.jobs, options.check)


if __name__ == "__main__":
    main()
