"""Prints the licence of every installed package, as its metadata has it. Exit code 1 where one names none."""

import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

_SHORT = 60  # of a field that holds the licence's whole text, its first line


def licence_of(package: Distribution) -> str:
    """Its SPDX expression, else what its classifiers name, else its own words; "" for none."""
    told = package.metadata
    if expression := told.get("License-Expression"):
        return str(expression)
    named = [one.rpartition(" :: ")[2] for one in told.get_all("Classifier", []) if one.startswith("License ::")]
    named = [one for one in named if one != "OSI Approved"]
    words = str(told.get("License") or "").strip()
    if named:
        return ", ".join(named)
    if words and words != "UNKNOWN":
        return words.splitlines()[0][:_SHORT]
    files = [path for path in package.files or () if "licen" in path.name.lower() and Path(path.locate()).is_file()]
    return files[0].read_text().strip().splitlines()[0].strip()[:_SHORT] if files else ""


def main() -> int:
    found = {one.metadata["Name"]: (one.version, licence_of(one)) for one in distributions()}
    for name in sorted(found, key=str.lower):
        version, licence = found[name]
        print(f"{name:<42}{version:<20}{licence or 'NONE NAMED'}")
    return 1 if any(not licence for _, licence in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
