"""Builds kdtree/_C.so with ninja: torch face, CPU kernels and, where nvcc is, CUDA kernels.

torch's stable ABI makes one build serve every torch >= 2.11, CPU-only or CUDA, on every Python, so
neither a GPU nor a CUDA build of torch is needed to build the CUDA kernels.

Where nvcc is, kdtree/_graph.*.so too: it knows nothing of torch, but one Python alone. Another
Python needs only this one again:

    python setup.py build_ext --inplace --only _graph

    KDTREE_CUDA=0       leave the CUDA kernels out; =1 makes a missing nvcc an error
    KDTREE_CUDA_ARCHS   GPU targets, "90a;120f" by default
    MAX_JOBS            compilers at a time, one per core by default
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import ninja
import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from torch.utils.cpp_extension import include_paths, library_paths

ROOT = Path(__file__).parent.resolve()
TORCH_TARGET = "0x020b000000000000"  # 2.11, the oldest torch we run on
# A product and a sum are fused only where the source says fma: the same expression must have the
# same bits in every instantiation and instruction set (row invariance).
CXX = (
    "-std=c++20 -O3 -fPIC -Wall -fvisibility=hidden -ffp-contract=off -fno-math-errno"
    f" -fno-trapping-math -DTORCH_TARGET_VERSION={TORCH_TARGET} -DUSE_CUDA"
)
NVCC = (
    "-std=c++20 -O3 -lineinfo --compress-mode=size --fmad=false"
    " -Xcompiler -fPIC,-fvisibility=hidden"
    " -Xptxas=--warn-on-spills"
)


def nvcc_or_none() -> str | None:
    wanted = os.environ.get("KDTREE_CUDA", "auto")
    if wanted == "0":
        return None
    nvcc = shutil.which("nvcc")
    if nvcc is None and wanted == "1":
        raise SystemExit("KDTREE_CUDA=1, but there is no nvcc on PATH")
    return nvcc


def ninja_file(build: Path, libraries: dict[str, Path], nvcc: str | None) -> str:
    """libraries: where they go, `_C` and `_graph`"""
    archs = os.environ.get("KDTREE_CUDA_ARCHS", "90a;120f").split(";")
    gencode = " ".join(f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs)
    define = "-DKDTREE_CUDA" if nvcc else ""
    cxx = f"{CXX} {os.environ.get('CFLAGS', '')}"
    link = f"{nvcc} -shared -cudart static" if nvcc else "c++ -shared"
    rules = [
        f"rule cxx\n  command = c++ -MMD -MF $out.d {cxx} {define} $includes -c $in -o $out",
        "  depfile = $out.d\n  deps = gcc",
        f"rule nvcc\n  command = {nvcc} -MD -MF $out.d {NVCC} {gencode} -c $in -o $out",
        "  depfile = $out.d\n  deps = gcc",
        f"rule link\n  command = {link} -o $out $in $libraries",
    ]
    csrc = ROOT / "csrc"
    sources = [*sorted(csrc.glob("*.cpp")), *sorted((csrc / "cpu").glob("*.cpp"))]
    sources += sorted((csrc / "cuda").glob("**/*.cu")) if nvcc else []
    # libtorch pulls in libtorch_cuda where there is one; both are found in the process, not by
    # path.
    torch_libs = f"-L{library_paths()[0]} -Xlinker --no-as-needed -ltorch -ltorch_cpu"
    builds = edges(build, libraries["_C"], sources, include_paths(), torch_libs)
    if nvcc:
        includes = [pybind11.get_include(), sysconfig.get_path("include")]
        sources = sorted(p for p in (csrc / "graph").iterdir() if p.suffix in (".cpp", ".cu"))
        builds += edges(build, libraries["_graph"], sources, includes)
    return "\n".join([*rules, *builds, ""])


def edges(
    build: Path, library: Path, sources: list[Path], includes: list[str], libs: str = ""
) -> list[str]:
    """What ninja is to do for a library."""
    objects = [build / f"{s.parent.name}_{s.name}.o" for s in sources]
    variables = f"  includes = {' '.join(f'-isystem {p}' for p in includes)}\n  libraries = {libs}"
    return [
        f"build {obj}: {'nvcc' if source.suffix == '.cu' else 'cxx'} {source}\n{variables}"
        for source, obj in zip(sources, objects, strict=True)
    ] + [f"build {library}: link {' '.join(map(str, objects))}\n{variables}"]


class BuildWithNinja(build_ext):
    user_options = [*build_ext.user_options, ("only=", None, "one library: _C or _graph")]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.only = None

    def finalize_options(self) -> None:
        super().finalize_options()
        names = [ext.name.removeprefix("kdtree.") for ext in self.extensions]
        if self.only not in (None, *names):
            raise SystemExit(f"--only is {self.only}, wants one of {', '.join(names)}")
        self.extensions = [e for e in self.extensions if e.name.endswith(self.only or "")]

    def get_ext_filename(self, fullname: str) -> str:
        if fullname.endswith("_C"):
            return fullname.replace(".", "/") + ".so"  # one name for every Python
        return super().get_ext_filename(fullname)

    def build_extension(self, ext: Extension) -> None:
        nvcc = nvcc_or_none()
        kind = f"with {nvcc}" if nvcc else "CPU kernels only (no nvcc)"
        print(f"kdtree: building {ext.name}, {kind}", file=sys.stderr)
        build = Path(self.build_temp).resolve()
        libraries = {
            name: Path(self.get_ext_fullpath(f"kdtree.{name}")).resolve()
            for name in ("_C", "_graph")
        }
        library = libraries[ext.name.removeprefix("kdtree.")]
        build.mkdir(parents=True, exist_ok=True)
        library.parent.mkdir(parents=True, exist_ok=True)
        (build / "build.ninja").write_text(ninja_file(build, libraries, nvcc))
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count()))
        command = [Path(ninja.BIN_DIR) / "ninja", "--quiet", "-C", build, "-j", jobs, library]
        subprocess.run(command, check=True)


setup(
    ext_modules=[
        Extension("kdtree._C", sources=[]),
        *([Extension("kdtree._graph", sources=[])] if nvcc_or_none() else []),
    ],
    cmdclass={"build_ext": BuildWithNinja},
)
