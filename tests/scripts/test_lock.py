"""requirements/ against pyproject.toml: what setup_env.sh installs is what the project asks for, by hash."""

import re
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETS = {"cpu": (("torch-cpu", "cpu"), ("quantize", "dev")), "gpu": (("gpu",), ("gpu", "quantize", "dev"))}
MACHINES = [  # vllm needs Linux
    (name, {"python_version": f"3.{minor}", "python_full_version": f"3.{minor}.9", "sys_platform": platform})
    for minor in (11, 12, 13)
    for name, platform in (("cpu", "linux"), ("cpu", "darwin"), ("gpu", "linux"))
]


def entries(name):
    """(requirement, hashes) for each entry of a file in requirements/."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        if line and not line.startswith("#"):
            required, *hashes = line.split("--hash=")
            yield Requirement(required), [value.strip() for value in hashes]


def locked(name, machine):
    """Package -> version on one machine."""
    found = {}
    for file in SETS[name][0]:
        for entry, _ in entries(file):
            if entry.marker is None or entry.marker.evaluate(machine):
                assert canonicalize_name(entry.name) not in found, f"{entry.name} twice"
                found[canonicalize_name(entry.name)] = str(entry.specifier).removeprefix("==")
    return found


def asked(extras):
    """The requirements of the project with these extras and those that they name."""
    optional = PROJECT["project"]["optional-dependencies"]
    for text in [*PROJECT["project"]["dependencies"], *(line for extra in extras for line in optional[extra])]:
        required = Requirement(text)
        if required.name == "qerl":
            yield from (Requirement(line) for extra in sorted(required.extras) for line in optional[extra])
        else:
            yield required


def overrides():
    return {
        canonicalize_name(each.name): each for each in map(Requirement, PROJECT["tool"]["uv"]["override-dependencies"])
    }


@pytest.mark.parametrize(
    ("name", "machine"), MACHINES, ids=lambda it: it if isinstance(it, str) else " ".join(it.values())
)
def test_the_lock_has_what_pyproject_asks_for(name, machine):
    versions = locked(name, {**default_environment(), **machine})
    wanted = {canonicalize_name(each.name): each for each in asked(SETS[name][1])} | overrides()
    assert {
        str(each) for key, each in wanted.items() if key not in versions or versions[key] not in each.specifier
    } == set()


def test_the_lock_has_what_its_packages_ask_for():
    """Of the packages that are installed here in the locked version: each of their requirements is locked too."""
    here = default_environment()
    versions = locked("cpu", here)
    installed = {canonicalize_name(each.metadata["Name"]): each for each in distributions()}
    checked, missing = 0, []
    for name, version in versions.items():
        if name not in installed or installed[name].version != version:
            continue
        checked += 1
        for each in map(Requirement, installed[name].requires or []):
            key = canonicalize_name(each.name)
            if key in overrides() or (each.marker is not None and not each.marker.evaluate({**here, "extra": ""})):
                continue
            if key not in versions or not each.specifier.contains(versions[key], prereleases=True):
                missing.append(f"{name}: {each}, locked: {versions.get(key)}")
    assert checked > 150
    assert missing == []


@pytest.mark.parametrize("name", ["cpu", "gpu", "torch-cpu", "uv"])
def test_each_package_is_pinned_by_hash_and_from_no_place(name):
    found = list(entries(name))
    for entry, hashes in found:
        assert re.fullmatch(r"==[\w.+]+", str(entry.specifier)), entry
        assert entry.url is None
        assert hashes, entry
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", value) for value in hashes), entry
    assert found


def test_torch_is_the_cpu_build_without_a_gpu_and_vllm_s_with_one():
    linux, mac = ({**default_environment(), "sys_platform": name} for name in ("linux", "darwin"))
    assert (locked("cpu", linux)["torch"], locked("cpu", mac)["torch"]) == ("2.13.0+cpu", "2.13.0")
    assert locked("gpu", linux)["torch"] == "2.11.0"
    # One wheel for each of three Pythons, on Linux for two processors.
    assert [len(hashes) for _, hashes in entries("torch-cpu")] == [6, 3]
    assert not any(name.startswith("nvidia-cu") or name == "triton" for name in locked("cpu", linux))
