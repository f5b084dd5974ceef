"""The table of releases, and conflicts of an environment with its pins."""

from __future__ import annotations

import pytest

from lib.deploy import releases


def installed(**versions: str) -> list[dict[str, str]]:
    """An environment that fits SGLang 0.5.16, with these changes (None takes one out)."""
    fits = {"sglang": "0.5.16", "torchvision": "0.26.0"}
    for name, wanted in releases.pins("0.5.16").items():
        specifier = next(iter(wanted.specifier), None)
        fits.setdefault(name, specifier.version if specifier else "1.0")
    fits |= {k.replace("_", "-"): v for k, v in versions.items()}
    return [{"name": k, "version": v} for k, v in fits.items() if v]


@pytest.mark.parametrize(
    ("release", "torch", "cuda", "kernel", "flashinfer"),
    [
        ("0.5.10.post1", "2.9.1", "12.8", "0.4.1", "0.6.7.post3"),
        ("0.5.11", "2.11.0", "13.0", "0.4.2", None),
        ("0.5.16", "2.11.0", "13.0", "0.4.5", "0.6.14"),
        ("0.5.18", "2.13.0", "13.0", "0.4.6.post1", None),
        ("0.5.23", "2.14.1", "13.0", "0.4.10", "0.7.2"),
    ],
)
def test_which_release_goes_with_what(release: str, torch: str, cuda: str, kernel: str, flashinfer: str | None) -> None:
    """torch, its CUDA, sglang-kernel and FlashInfer of a release are what its wheel's metadata says."""
    row = next(r for r in releases.rows() if r["sglang"] == release)
    assert (row["torch"], row["CUDA of that torch"], row["sglang-kernel"]) == (torch, cuda, kernel)
    if flashinfer:
        assert row["flashinfer-python"] == flashinfer


@pytest.mark.parametrize("release", list(releases.table()["sglang"]))
def test_every_row_has_a_source(release: str) -> None:
    """Each release names its wheel and the wheel's SHA-256, and pins torch."""
    row = releases.table()["sglang"][release]
    assert len(row["sha256"]) == 64 and row["wheel"].startswith(f"sglang-{release}-") and "torch" in releases.pins(release)


def test_a_fitting_environment_has_no_conflict() -> None:
    """Every pin met: no row."""
    assert releases.conflicts(installed(), "13.0") == []


def test_each_broken_pin_is_named_at_once() -> None:
    """A newer transformers, a missing sglang-kernel and a torch of CUDA 12 are three rows."""
    found = releases.conflicts(installed(transformers="5.17.0", sglang_kernel=""), "12.9")
    assert [(r["package"], r["wanted"], r["found"]) for r in found] == [
        ("sglang-kernel", "==0.4.5", "not installed"),
        ("transformers", "==5.12.1", "5.17.0"),
        ("torch's CUDA", "13.0", "12.9"),
    ]


def test_a_cpu_build_counts_as_its_public_version() -> None:
    """torch 2.11.0+cpu meets torch==2.11.0."""
    assert releases.conflicts(installed(torch="2.11.0+cpu"), None) == []


def test_a_nightly_is_told_from_a_release() -> None:
    """2.12.0.dev20260307+cu130 is a pre-release with a local label."""
    rows = releases.channel([{"name": "torch", "version": "2.12.0.dev20260307+cu130"}, {"name": "sglang", "version": "0.5.16"}])
    assert [r["channel"] for r in rows] == ["nightly or pre-release, local label cu130", "release"]
