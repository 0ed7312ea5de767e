"""What pip is told to install: the versions of a list of pins, with the SHA-256 of each file that it may take.

    python .ci/pins.py .ci/constraints.txt .venv     # write build.txt, torch.txt and pins.txt there, for the Makefile
    python .ci/pins.py --built .ci/constraints.txt .venv     # once torch is there: what else does its build need
    python .ci/pins.py --update                      # after a pin was changed: write .ci/hashes.txt anew, by uv

Digests are those of the package index, of all files for CPython 3.11 and 3.12 on Linux and macOS. Torch has none: each
index has builds of its own under the same version, for CPUs and for every CUDA.
"""

import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
HASHES = FOLDER / "hashes.txt"
BUILT_BY_INDEX = {"torch", "torchaudio", "torchvision"}
BUILDS_OTHERS = {"setuptools"}


def package_of(pin: str) -> str:
    """Its name, as indexes compare names."""
    return re.sub(r"[-_.]+", "-", pin.partition("==")[0]).lower()


def pins_of(path: Path) -> list[str]:
    """`name==version` of a list, and of those that it names."""
    lines = path.read_text().splitlines()
    named = [pin for line in lines if line.startswith("-c ") for pin in pins_of(path.parent / line[3:])]
    return named + [line for line in lines if line and not line.startswith(("#", "-c "))]


def hashes() -> dict[str, list[str]]:
    """Digests by pin, of .ci/hashes.txt: a line for each pin, and below it one for each of its files."""
    blocks = re.findall(r"^([\w.-]+==\S+)\n((?: +\w+\n)+)", HASHES.read_text(), re.MULTILINE)
    return {pin: digests.split() for pin, digests in blocks}


def hashed(pin: str, known: dict[str, list[str]]) -> str:
    """As pip's --require-hashes reads it. Ends the program where the pin has no digest."""
    if not known.get(pin):
        sys.exit(f"{pin} has no digest in {HASHES.name}: python .ci/pins.py --update")
    return " ".join([pin, *(f"--hash=sha256:{digest}" for digest in known[pin])])


def write_lists(pins: list[str], folder: Path) -> None:
    """What is installed in this order: what builds others, torch, all else."""
    known = hashes()
    lists: dict[str, list[str]] = {"build.txt": [], "torch.txt": [], "pins.txt": []}
    for pin in pins:
        package = package_of(pin)
        if package in BUILT_BY_INDEX:
            lists["torch.txt"].append(pin)
        else:
            lists["build.txt" if package in BUILDS_OTHERS else "pins.txt"].append(hashed(pin, known))
    for name, lines in lists.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines))


def add_libraries(path: Path, folder: Path) -> None:
    """Hold the torch that the index gave, which cannot be imported yet, against what a list is for.

    A build for CUDA runs without GPUs too, with its libraries, which the list for CUDA has: they are added to pins.txt.
    A build for CPUs where GPUs are ends the program.
    """
    (version,) = folder.glob("lib/python3*/site-packages/torch/version.py")
    torch = runpy.run_path(str(version))
    built = f"torch {torch['__version__']} in {folder} is a build for"
    if path.stem.endswith("-cuda") and not torch["cuda"]:
        where = "make again where pip finds none (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL), or WHEELS=cpu"
        sys.exit(f"{built} CPUs: make clean, and {where}")
    if torch["cuda"] and not path.stem.endswith("-cuda"):
        where = "where pip finds one for CPUs (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL) none are needed"
        print(f"{built} CUDA {torch['cuda']}, whose libraries are installed too, 3 GB; {where}", flush=True)
        known, listed = hashes(), {package_of(pin) for pin in pins_of(path)}
        missing = [pin for pin in pins_of(path.with_stem(f"{path.stem}-cuda")) if package_of(pin) not in listed]
        libraries = [pin for pin in missing if package_of(pin).startswith(("nvidia-", "cuda-", "triton"))]
        with (folder / "pins.txt").open("a") as file:
            file.writelines(f"{hashed(pin, known)}\n" for pin in libraries)


def fits(wheel: str) -> bool:
    """Whether a supported interpreter on a supported machine may take a file of this name."""
    from packaging.utils import parse_wheel_filename  # of the environment for development

    return any(
        re.fullmatch(r"py\d+|cp3[2-9]|cp31[012]", tag.interpreter)
        and (tag.abi in ("none", "abi3") or tag.interpreter in ("cp311", "cp312"))
        and re.search(r"^any$|^(many)?linux.*(x86_64|aarch64)$|^macosx.*(x86_64|arm64|universal2)$", tag.platform)
        for tag in parse_wheel_filename(wheel)[3]
    )


def digests_from_index(path: Path) -> dict[str, list[str]]:
    """By package and version, of a list's own pins; asks the index."""
    command = ["uv", "pip", "compile", "--quiet", "--universal", "--no-deps", "--python-version", "3.11.9"]
    told = subprocess.run([*command, "--format", "pylock.toml", str(path)], check=True, capture_output=True, text=True)
    found: dict[str, list[str]] = {}
    for package in tomllib.loads(told.stdout)["packages"]:
        files: list[dict[str, Any]] = [one for one in package.get("wheels", []) if fits(one["url"].rpartition("/")[2])]
        files += [package["sdist"]] if "sdist" in package else []
        found[f"{package['name']}=={package['version']}"] = sorted(one["hashes"]["sha256"] for one in files)
    return found


def update() -> None:
    """Write .ci/hashes.txt."""
    found: dict[str, list[str]] = {}
    pins = set[str]()
    for path in sorted(FOLDER.glob("constraints*.txt")):
        pins.update(pin for pin in pins_of(path) if package_of(pin) not in BUILT_BY_INDEX)
        found |= digests_from_index(path)
    with HASHES.open("w") as file:
        file.write("# SHA-256 of the files of each pin, by .ci/pins.py --update. Torch's are not here: see there.\n")
        for pin in sorted(pins, key=str.lower):
            digests = found.get(f"{package_of(pin)}=={pin.partition('==')[2]}")
            if not digests:
                sys.exit(f"{pin}: the index has no file of it that fits")
            file.write("".join([f"{pin}\n", *(f"    {digest}\n" for digest in digests)]))


if __name__ == "__main__":
    if sys.argv[1:] == ["--update"]:
        update()
    elif sys.argv[1] == "--built":
        add_libraries(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        write_lists(pins_of(Path(sys.argv[1])), Path(sys.argv[2]))
