#!/usr/bin/env python3
"""Packages every crate that is published, and checks that each package is complete.

A package has the files of its crate's folder only. So each file that the code includes at
compile time must be in the package, beside the README and the licences. Nothing is
compiled: .github/workflows/ci.yml has `cargo package` build the packages.
"""

import pathlib
import re
import subprocess
import sys
import tarfile
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r"include_(?:bytes|str)!\(\s*\"([^\"]+)\"\s*\)")
REQUIRED = ("Cargo.toml", "README.md", "LICENSE-MIT", "LICENSE-APACHE")


def published():
    """Returns the names of the crates that are published, in no particular order."""
    workspace = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]
    for member in workspace["members"]:
        package = tomllib.loads((ROOT / member / "Cargo.toml").read_text())["package"]
        if package.get("publish", True):
            yield package["name"]


def check(archive):
    """Returns what is missing in a package."""
    with tarfile.open(archive) as package:
        files = {member.name: member for member in package.getmembers()}
        top = archive.name.removesuffix(".crate")
        missing = [name for name in REQUIRED if f"{top}/{name}" not in files]
        for name in files:
            if not name.endswith(".rs"):
                continue
            text = package.extractfile(name).read().decode()
            for included in INCLUDE.findall(text):
                path = pathlib.PurePosixPath(name).parent
                for part in pathlib.PurePosixPath(included).parts:
                    path = path.parent if part == ".." else path / part
                if str(path) not in files:
                    missing.append(f"{included}, which {name} includes")
    return missing


def main():
    names = sorted(published())
    target = pathlib.Path(sys.argv[1])
    command = ["cargo", "package", "--locked", "--no-verify", "--allow-dirty", "--quiet"]
    command += [f"--package={name}" for name in names]
    command += ["--target-dir", str(target)]
    subprocess.run(command, cwd=ROOT, check=True)
    failed = False
    for name in names:
        (archive,) = (target / "package").glob(f"{name}-[0-9]*.crate")
        missing = check(archive)
        failed |= bool(missing)
        size = archive.stat().st_size / 1000
        print(f"{archive.name:<34} {size:7.0f} kB", *(f"\n  lacks {what}" for what in missing))
    sys.exit(failed)


main()
