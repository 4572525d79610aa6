"""Versions of packages, and what a processor can do for int8."""

from __future__ import annotations

import tomllib

import checkout
import pytest
import torch

from compresskit.export.check.environment import (
    ALTERNATIVES,
    OPTIONAL,
    REQUIRED,
    Package,
    environment,
    int8_kernels,
    packages,
    processor_features,
)
from compresskit.export.check.oldest_runtime import RUNTIMES
from compresskit.quant import X86, quantize_dynamic


def test_the_packages_are_those_of_the_project() -> None:
    wanted = tomllib.loads((checkout.ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert sorted(f"{name}>={oldest}" for name, (_, oldest) in REQUIRED.items()) == sorted(wanted)
    assert set(ALTERNATIVES) <= set(REQUIRED)
    found = {package.name: package for package in packages()}
    assert found["torch"].version == torch.__version__.partition("+")[0]
    assert all(package.fits for package in found.values())
    assert found["transformers"].purpose == "models of Hugging Face"
    extra = tomllib.loads((checkout.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["search"]
    assert [f"optuna>={OPTIONAL['optuna'][2]},<6"] == extra
    assert found["optuna"].purpose == "compress"
    assert found["openvino"].purpose == "timing and verifying files in OpenVINO"


@pytest.mark.parametrize(
    ("version", "fits"),
    [("2.11.0+cpu", True), ("2.9", False), ("3.0rc1", True), ("2.11", True), ("2.10.9.dev1", False), (None, False)],
)
def test_old_and_missing_packages_do_not_fit(version, fits) -> None:
    assert Package(name="torch", version=version, wanted="2.11").fits is fits
    assert Package(name="torch", version=version, purpose="plots").fits


@pytest.mark.parametrize(
    ("package", "advice"),
    [
        ({"version": "5.1", "wanted": "5.0", "purpose": "compress"}, ""),
        (
            {"version": "4.1", "wanted": "5.0", "purpose": "compress"},
            "only for compress: wanted 5.0 or newer: pip install 'p>=5.0'",
        ),
        ({"version": None, "wanted": "5.0", "purpose": "compress"}, "only for compress: pip install 'p>=5.0'"),
        ({"version": None, "purpose": "plots"}, "only for plots: pip install p"),
        ({"version": None, "wanted": "2.0"}, "wanted 2.0 or newer: pip install 'p>=2.0'"),
    ],
)
def test_what_to_install_is_said(package, advice) -> None:
    assert Package(name="p", **package).advice == advice


@pytest.mark.parametrize(
    ("text", "machine", "system", "wanted", "said"),
    [
        ("flags\t: sse avx2 avx512bw avx512_vnni", "x86_64", "Linux", (True, True, True, False), "VNNI: four products"),
        ("flags\t: avx2 avx_vnni", "x86_64", "Linux", (True, False, True, False), "VNNI: four products"),
        ("flags\t: avx2 avx512bw avx512_vnni amx_int8", "x86_64", "Linux", (True, True, True, True), "AMX: whole tiles"),
        ("flags\t: sse avx2", "x86_64", "Linux", (True, False, False, False), "no VNNI: two products"),
        ("flags\t: sse", "x86_64", "Linux", (False, False, False, False), "no integer products in vectors"),
        ("Features\t: fp asimd asimddp", "aarch64", "Linux", (True, True, False), "NEON dot products"),
        ("Features\t: fp asimd", "aarch64", "Linux", (True, False, False), "no integer products in vectors"),
        ("", "arm64", "Darwin", (True, True, None), "NEON dot products"),
        ("", "AMD64", "Windows", (None, None, None, None), "this system does not say"),
    ],
)
def test_what_a_processor_can_do(text, machine, system, wanted, said) -> None:
    features = processor_features(f"processor\t: 0\n{text}\n", machine, system)
    assert tuple(features.values()) == wanted
    assert int8_kernels(features).startswith(said)


def test_the_environment_of_this_process() -> None:
    here = environment()
    assert here["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert here["threads"] == torch.get_num_threads()
    assert here["processor"]


def test_the_oldest_runtime_reads_every_opset_that_is_written_without_being_asked_for() -> None:
    model, x = torch.nn.Linear(4, 4).eval(), torch.randn(2, 4)
    opsets = [X86.opset, quantize_dynamic(model, [x]).opset]
    needed = [min(release for (opset, _), release in RUNTIMES.items() if opset >= written) for written in opsets]
    assert max(needed) == tuple(map(int, REQUIRED["onnxruntime"][1].split(".")))
