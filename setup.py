"""Builds the one compiled module, ``tensorizer._C``, with torch's extension builder.

The compiled file uses torch's copy of pybind11 but links nothing of torch, so one build serves every torch release.
The libraries it needs come from one of three places:

* the system, found with pkg-config: the default;
* ``TENSORIZER_DEPS_PREFIX``: a folder with include/ and lib/ (packages unpacked without root); the module remembers it;
* ``TENSORIZER_STATIC_DEPS``: a folder of static archives, and of the compiler that made them, from
  ``scripts/packaging/build_deps.py``; the module then needs only the C library, and is what wheels hold. Its debug
  information goes to ``TENSORIZER_DEBUG_FILES``.

``TENSORIZER_WERROR=1`` makes warnings errors, as ``make`` and continuous integration do.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NoReturn

import setuptools
from setuptools import Extension, setup

if int(setuptools.__version__.split(".")[0]) < 64:  # would build a package named UNKNOWN
    sys.exit(f"tensorizer: setuptools {setuptools.__version__} is too old; get 64 or later: pip install -U setuptools")

# Stock pip of RHEL 8 and Ubuntu 20.04 does not know the names of today's wheels and takes the sources.
PIP_HINT = "an up-to-date pip (20.3 or later: 'pip install -U pip') installs a wheel that needs no library"

try:
    from torch.utils.cpp_extension import BuildExtension, include_paths
except ModuleNotFoundError as error:
    sys.exit(
        f"tensorizer: {PIP_HINT}; this build from source needs the Python package {error.name}: "
        "pip install torch setuptools wheel ninja, then pip install --no-build-isolation"
    )

ROOT = Path(__file__).parent.resolve()

# pkg-config name, a header that proves it, link flag, and the package on Debian and Fedora
LIBRARIES = [
    ("libcurl", "curl/curl.h", "curl", "libcurl4-openssl-dev", "libcurl-devel"),
    ("libsodium", "sodium.h", "sodium", "libsodium-dev", "libsodium-devel"),
    ("libcrypto", "openssl/evp.h", "crypto", "libssl-dev", "openssl-devel"),
    ("libssl", "openssl/ssl.h", "ssl", "libssl-dev", "openssl-devel"),
    ("hiredis", "hiredis/hiredis.h", "hiredis", "libhiredis-dev", "hiredis-devel"),
    ("libisal", "isa-l.h", "isal", "libisal-dev", "isa-l-devel"),
]

OLDEST_CURL = 0x074400  # 7.68; scripts/old_curl_check.sh compiles as if it were that one

COMPILE_FLAGS = [
    "-std=c++20",
    "-O3",
    "-g1",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-fstack-protector-strong",
    "-fno-plt",
    "-Wall",
    "-Wextra",
    *(["-Werror"] if os.environ.get("TENSORIZER_WERROR") == "1" else []),  # not for users: later compilers warn of more
    "-Wno-missing-field-initializers",  # designated initializers leave the rest at its default
    "-fstack-clash-protection",
    "-U_FORTIFY_SOURCE",
    "-D_FORTIFY_SOURCE=2",
    "-D_GLIBCXX_ASSERTIONS",
]
LINK_FLAGS = [
    "-Wl,-z,relro,-z,now",
    "-Wl,-z,noexecstack",
    "-Wl,--as-needed",
    f"-Wl,--version-script={ROOT / 'csrc' / 'bind' / 'exports.map'}",
]

# Linked into wheels, in this order: an archive uses those behind it.
ARCHIVES = ["curl", "nghttp2", "ssl", "crypto", "hiredis", "sodium", "isal"]
LIBC_FAMILY = re.compile(r"(lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)|ld-linux[\w-]*)\.so")


def folder_of(variable: str) -> Path | None:
    folder = os.environ.get(variable)
    return Path(folder).resolve() if folder else None


def library_dirs_below(prefix: Path) -> list[Path]:
    lib = prefix / "lib"
    return [d for d in [lib, prefix / "lib64", *sorted(lib.glob("*-linux-gnu"))] if d.is_dir()]


def pkg_config(option: str, name: str) -> list[str] | None:
    """Flags from pkg-config, or None where it does not know the library (or is not installed)."""
    program = shutil.which(os.environ.get("PKG_CONFIG", "pkg-config"))
    if program is None:
        return None
    result = subprocess.run([program, option, name], capture_output=True, text=True, check=False)
    return result.stdout.split() if result.returncode == 0 else None


def run_compiler(arguments: list[str], text: str) -> subprocess.CompletedProcess[str]:
    """Gives the compiler a text to read; ends the build with one line if there is no compiler."""
    compiler = os.environ.get("CXX", "c++").split()
    try:
        return subprocess.run(
            [*compiler, "-std=c++20", *arguments, "-x", "c++", "-"],
            input=text,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        refuse_compiler(f"{compiler[0]}: {error.strerror}")


def refuse_compiler(found: str) -> NoReturn:
    sys.exit(
        f"tensorizer: {PIP_HINT}; this build from source needs a compiler of C++20 (gcc 10 or clang 16, or later): "
        f"install one with 'apt-get install g++' or 'dnf install gcc-c++', or name it with CXX; found {found}"
    )


def require_compiler() -> None:
    """Ends the build with one line where the compiler does not know C++20."""
    # zig's driver knows no -fsyntax-only
    probe = run_compiler(["-E", "-P"], "__cpp_concepts\n")
    if probe.returncode != 0 or "__cpp_concepts" in probe.stdout:
        said = (probe.stderr.strip().splitlines() or ["nothing"])[0]
        refuse_compiler(f"{os.environ.get('CXX', 'c++')}, which says: {said:.200}")


def compiler_has_header(header: str, flags: list[str]) -> bool:
    return run_compiler([*flags, "-fsyntax-only"], f"#include <{header}>\n").returncode == 0


def refuse_old_curl(flags: list[str]) -> None:
    """Ends the build with one line where libcurl is older than the sources can be compiled with."""
    text = "#include <curl/curl.h>\nLIBCURL_VERSION_NUM LIBCURL_VERSION\n"
    found = re.search(r'0x([0-9a-fA-F]{6}) "([^"]*)"\s*$', run_compiler([*flags, "-E", "-P"], text).stdout)
    if found and int(found[1], 16) < OLDEST_CURL:
        sys.exit(f"tensorizer: libcurl {found[2]} is too old: 7.68 or later is needed (that of Ubuntu 20.04, RHEL 9)")


def static_flags(prefix: Path) -> tuple[list[str], list[str]]:
    """Compile and link flags for the archives in ``prefix``; ends the build with one line if one is missing."""
    archives = [prefix / "lib" / f"lib{name}.a" for name in ARCHIVES]
    missing = [archive.name for archive in archives if not archive.is_file()]
    if missing:
        sys.exit(
            f"tensorizer: no {', '.join(missing)} in {prefix / 'lib'} (TENSORIZER_STATIC_DEPS): "
            "make them with scripts/packaging/build_deps.py"
        )
    sections = ["-ffunction-sections", "-fdata-sections"]
    # Texts of the build's folders would differ from one machine to the next.
    renamed = [f"-ffile-prefix-map={folder}={name}" for folder, name in [(ROOT, "."), (prefix, "/static")]]
    renamed += [f"-ffile-prefix-map={folder}=/torch" for folder in include_paths()]
    # What _GLIBCXX_ASSERTIONS is to the other C++ library; zig defines it too.
    checks = ["-U_LIBCPP_HARDENING_MODE", "-D_LIBCPP_HARDENING_MODE=_LIBCPP_HARDENING_MODE_FAST"]
    macros = ["-DCURL_STATICLIB", "-DNGHTTP2_STATICLIB"]
    link = ["-Wl,--gc-sections", *map(str, archives), "-lpthread", "-ldl", "-lm"]
    return [f"-I{prefix / 'include'}", *sections, *renamed, *checks, *macros], link


def use_compiler_of(prefix: Path) -> None:
    """Compiles and links with the compiler that made the archives, where it lies beside them."""
    if not (prefix / "toolchain").is_dir():
        return
    os.environ["PATH"] = f"{prefix / 'toolchain'}{os.pathsep}{os.environ['PATH']}"
    # An interpreter that was built with shared libraries of its own would add their folder to what it links.
    os.environ |= {"CC": "cc", "CXX": "c++", "LDSHARED": "cc -shared", "LDCXXSHARED": "c++ -shared"}
    # The script that is the compiler has its release in it: its content tells it from another one, its name does not.
    os.environ |= {"CCACHE_COMPILERCHECK": "content", "CCACHE_COMPILERTYPE": "clang", "CCACHE_NOHASHDIR": "1"}
    os.environ |= {"CCACHE_BASEDIR": str(ROOT), "TORCH_DONT_CHECK_COMPILER_ABI": "1"}
    headers = headers_of_machine(ROOT / "build" / "headers")
    if headers:
        os.environ["CPPFLAGS"] = f"{os.environ.get('CPPFLAGS', '')} -I{headers}"


def headers_of_machine(folder: Path) -> Path | None:
    """A folder with the one header that Debian's Python keeps in /usr/include; None for other Pythons.

    Its pyconfig.h includes ``<x86_64-linux-gnu/python3.11/pyconfig.h>``. The compiler of wheels must see no other
    header of this machine.
    """
    include, machine = Path(sysconfig.get_paths()["include"]), sysconfig.get_config_var("MULTIARCH") or "none"
    shutil.rmtree(folder, ignore_errors=True)
    if not (include.parent / machine / include.name / "pyconfig.h").is_file():
        return None
    (folder / machine).mkdir(parents=True)
    (folder / machine / include.name).symlink_to(include.parent / machine / include.name)
    return folder


def system_flags() -> tuple[list[str], list[str]]:
    """Compile and link flags of all system libraries; ends the build with one line if one is missing."""
    prefix = folder_of("TENSORIZER_DEPS_PREFIX")
    compile_flags: list[str] = []
    link_flags: list[str] = []
    if prefix is not None:
        if not (prefix / "include").is_dir() or not library_dirs_below(prefix):
            sys.exit(f"tensorizer: TENSORIZER_DEPS_PREFIX: no folders include/ and lib/ in {prefix}")
        compile_flags += [f"-I{d}" for d in [prefix / "include", *sorted((prefix / "include").glob("*-linux-gnu"))]]
        for folder in library_dirs_below(prefix):
            link_flags += [f"-L{folder}", f"-Wl,-rpath,{folder}"]
    missing = []
    for name, header, link_name, debian, fedora in LIBRARIES:
        own_compile: list[str] = []
        own_link = [f"-l{link_name}"]
        if prefix is None:
            own_compile = pkg_config("--cflags", name) or []
            own_link = pkg_config("--libs", name) or own_link
        if not compiler_has_header(header, compile_flags + own_compile):
            missing.append((link_name, debian, fedora))
            continue
        compile_flags += own_compile
        link_flags += own_link
    if missing:
        names, debian, fedora = (" ".join(dict.fromkeys(column)) for column in zip(*missing))
        sys.exit(
            f"tensorizer: {PIP_HINT}; this build from source misses system libraries ({names}): install them with "
            f"'apt-get install {debian}' or 'dnf install {fedora}', "
            "or point TENSORIZER_DEPS_PREFIX at a folder that has include/ and lib/"
        )
    refuse_old_curl(compile_flags)
    return compile_flags, link_flags


def sanitizer_flags() -> list[str]:
    """``TENSORIZER_SANITIZE=address,undefined`` builds the module for a run under sanitizers."""
    kinds = os.environ.get("TENSORIZER_SANITIZE")
    return [f"-fsanitize={kinds}", "-fno-omit-frame-pointer"] if kinds else []


# The kernels each ask for other instructions of the processor.
COMPILED_ALONE = ROOT / "csrc" / "crypto" / "kernels"
# Most of the time is pybind11's headers: parts of csrc/bind that several processors share.
PARTS_OF_BIND = 3


def groups_of_sources() -> dict[str, list[Path]]:
    """Files of csrc that are compiled as one, those of a folder: reading the headers takes longer than the rest."""
    groups: dict[str, list[Path]] = {}
    for folder in sorted({path.parent for path in (ROOT / "csrc").rglob("*.cpp")}):
        files = sorted(folder.glob("*.cpp"))
        name = folder.relative_to(ROOT / "csrc").as_posix().replace("/", "_")
        if folder == COMPILED_ALONE:
            groups |= {f"{name}_{path.stem}": [path] for path in files}
        elif name == "bind":
            groups |= {f"bind_{part}": files[part::PARTS_OF_BIND] for part in range(PARTS_OF_BIND)}
        else:
            groups[name] = files
    return groups


TOGETHER = ROOT / "build" / "together"
KERNELS_TEXT = ROOT / "csrc" / "device" / "cuda" / "kernels" / "kernels.ptx"


def write_if_changed(path: Path, text: str) -> None:
    """An untouched file is not compiled again."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def source_files() -> list[str]:
    """What the compiler is given: files below build/ that include those of csrc."""
    TOGETHER.mkdir(parents=True, exist_ok=True)
    # The committed text of the kernels as a string: no build needs nvcc, and all have the same one.
    write_if_changed(TOGETHER / "kernels_ptx.inc", f'R"PTX({KERNELS_TEXT.read_text()})PTX"\n')
    files = []
    for name, sources in groups_of_sources().items():
        first = [ROOT / "csrc" / "bind" / "private_pybind.h"] if name.startswith("bind_") else []
        text = "".join(f'#include "{path.relative_to(ROOT / "csrc").as_posix()}"\n' for path in [*first, *sources])
        path = TOGETHER / f"{name}.cpp"
        write_if_changed(path, text)
        files.append(str(path.relative_to(ROOT)))
    return files


def make_extension() -> Extension:
    static = folder_of("TENSORIZER_STATIC_DEPS")
    if static:
        use_compiler_of(static)
    require_compiler()
    compile_flags, link_flags = static_flags(static) if static else system_flags()
    archives = [str(static / "lib" / f"lib{name}.a") for name in ARCHIVES] if static else []
    return Extension(
        "tensorizer._C",
        sources=source_files(),
        include_dirs=[str(ROOT / "csrc"), str(TOGETHER), *include_paths()],
        depends=[*sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*.h")), *archives],
        extra_compile_args=[*COMPILE_FLAGS, *compile_flags, *sanitizer_flags()],
        extra_link_args=[*LINK_FLAGS, *link_flags, *sanitizer_flags()],
        language="c++",
    )


class Build(BuildExtension):
    """Checks and strips the module where its libraries are static."""

    def build_extensions(self) -> None:
        super().build_extensions()
        if folder_of("TENSORIZER_STATIC_DEPS"):
            for extension in self.extensions:
                finish_static(Path(self.get_ext_fullpath(extension.name)))


def finish_static(module: Path) -> None:
    """Checks that no shared library slipped in, and splits off the debug information."""
    listed = subprocess.run(["readelf", "--dynamic", str(module)], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", listed)
    wrong = [name for name in needed if not LIBC_FAMILY.match(name)]
    if wrong:
        sys.exit(f"tensorizer: {module.name} needs {', '.join(wrong)}: expected the C and C++ libraries alone")
    symbols = folder_of("TENSORIZER_DEBUG_FILES")
    if symbols:
        symbols.mkdir(parents=True, exist_ok=True)
        subprocess.run(["objcopy", "--only-keep-debug", module, symbols / f"{module.name}.debug"], check=True)
    subprocess.run(["strip", "--strip-unneeded", str(module)], check=True)


# Who builds a release says where the repository is, as GitHub's workflows do; a fork's wheels point at the fork.
REPOSITORY = os.environ.get("GITHUB_REPOSITORY")
ADDRESS = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{REPOSITORY}"


def project_urls() -> dict[str, str]:
    paths = {"Source": "", "Changelog": "/blob/main/CHANGELOG.md", "Documentation": "/blob/main/docs/index.md"}
    return {name: f"{ADDRESS}{path}" for name, path in {**paths, "Issues": "/issues"}.items()} if REPOSITORY else {}


def readme() -> str:
    """README.md, whose links lead into the repository also from the page of a package index."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if not REPOSITORY:
        return text
    place = os.environ.get("GITHUB_REF_NAME", "main")
    text = re.sub(r"\]\((?!https?://|#)", f"]({ADDRESS}/blob/{place}/", text)
    return re.sub(r'(src|srcset)="(?!https?://)', rf'\1="{ADDRESS}/raw/{place}/', text)


setup(
    license="MIT",
    long_description=readme(),
    long_description_content_type="text/markdown",
    project_urls=project_urls(),
    ext_modules=[make_extension()],
    cmdclass={"build_ext": Build.with_options(use_ninja=True, no_python_abi_suffix=False)},
)
