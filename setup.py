"""Builds kdtree/_C.so with ninja: torch face, CPU kernels and, where nvcc is, CUDA kernels.

torch's stable ABI makes one build serve every torch >= 2.11, CPU-only or CUDA, on every Python, so
neither a GPU nor a CUDA build of torch is needed to build the CUDA kernels.

    KDTREE_CUDA=0       leave the CUDA kernels out; =1 makes a missing nvcc an error
    KDTREE_CUDA_ARCHS   GPU targets, "90a;120f" by default
    MAX_JOBS            compilers at a time, one per core by default
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import ninja
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


def ninja_file(build: Path, library: Path, nvcc: str | None) -> str:
    includes = " ".join(f"-isystem {p}" for p in include_paths())
    archs = os.environ.get("KDTREE_CUDA_ARCHS", "90a;120f").split(";")
    gencode = " ".join(f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs)
    define = "-DKDTREE_CUDA" if nvcc else ""
    cxx = f"{CXX} {os.environ.get('CFLAGS', '')}"
    # libtorch pulls in libtorch_cuda where there is one; both are found in the process, not by
    # path.
    link = f"{nvcc} -shared -cudart static" if nvcc else "c++ -shared"
    torch_libs = f"-L{library_paths()[0]} -Xlinker --no-as-needed -ltorch -ltorch_cpu"
    sources = [*sorted((ROOT / "csrc").glob("*.cpp")), *sorted((ROOT / "csrc/cpu").glob("*.cpp"))]
    sources += sorted((ROOT / "csrc/cuda").glob("**/*.cu")) if nvcc else []
    objects = [build / f"{s.parent.name}_{s.name}.o" for s in sources]
    rules = [
        f"rule cxx\n  command = c++ -MMD -MF $out.d {cxx} {define} {includes} -c $in -o $out",
        "  depfile = $out.d\n  deps = gcc",
        f"rule nvcc\n  command = {nvcc} -MD -MF $out.d {NVCC} {gencode} -c $in -o $out",
        "  depfile = $out.d\n  deps = gcc",
        f"rule link\n  command = {link} -o $out $in {torch_libs}",
    ]
    builds = [
        f"build {obj}: {'nvcc' if source.suffix == '.cu' else 'cxx'} {source}"
        for source, obj in zip(sources, objects, strict=True)
    ]
    return "\n".join([*rules, *builds, f"build {library}: link {' '.join(map(str, objects))}", ""])


class BuildWithNinja(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"  # one name for every Python

    def build_extension(self, ext: Extension) -> None:
        nvcc = nvcc_or_none()
        kind = f"CPU and CUDA kernels with {nvcc}" if nvcc else "CPU kernels only (no nvcc)"
        print(f"kdtree: building {kind}", file=sys.stderr)
        build = Path(self.build_temp).resolve()
        library = Path(self.get_ext_fullpath(ext.name)).resolve()
        build.mkdir(parents=True, exist_ok=True)
        library.parent.mkdir(parents=True, exist_ok=True)
        (build / "build.ninja").write_text(ninja_file(build, library, nvcc))
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count()))
        command = [Path(ninja.BIN_DIR) / "ninja", "--quiet", "-C", build, "-j", jobs]
        subprocess.run(command, check=True)


setup(
    ext_modules=[Extension("kdtree._C", sources=[])],
    cmdclass={"build_ext": BuildWithNinja},
)
