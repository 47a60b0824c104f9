#!/usr/bin/env python3
"""Lets a fresh checkout use the crates that another checkout has compiled.

Cargo compiles a crate again if one of its files is newer than the crate's last build, and
in a fresh checkout all files are new. So a file with the content that was built last gets
the time that it had then:

    source_times.py restore FOLDER      before a build
    source_times.py record FOLDER       after it has succeeded

FOLDER is the target folder. If anything of the workspace was built there since, by
another run of Cargo, the files keep their times.
"""

import hashlib
import json
import os
import pathlib
import subprocess
import sys


def tracked():
    """Returns the hash and the time, in ns, of each file and folder of the checkout."""
    files = subprocess.run(
        ["git", "ls-files", "-z"], capture_output=True, check=True, text=True
    ).stdout.split("\0")
    found = {}
    folders = {}
    for file in filter(os.path.isfile, files):
        content = hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest()
        found[file] = [content, os.stat(file).st_mtime_ns]
        # Build scripts name folders, too.
        for folder in pathlib.Path(file).parents:
            folders.setdefault(str(folder), hashlib.sha256()).update(f"{file} {content}\n".encode())
    for folder, contents in folders.items():
        found[folder] = [contents.hexdigest(), os.stat(folder).st_mtime_ns]
    return found


def last_build_ns(folder):
    """Returns when a crate of the workspace was built last, in ns."""
    built = folder.glob("*/.fingerprint/tensord*/*")
    return max((file.stat().st_mtime_ns for file in built), default=0)


def restore(folder):
    known = folder / "source-times.json"
    times = {}
    if known.exists() and last_build_ns(folder) <= known.stat().st_mtime_ns:
        times = json.loads(known.read_text())
    known.unlink(missing_ok=True)
    found = tracked()
    unchanged = [file for file, (content, _) in found.items() if times.get(file, [None])[0] == content]
    for file in unchanged:
        found[file] = times[file]
        _, time_ns = times[file]
        os.utime(file, ns=(time_ns, time_ns))
    print(f"{len(unchanged)} files and folders are as they were built last")
    # Taken before the build: what changes during it may not be part of it.
    (folder / "source-times.new.json").write_text(json.dumps(found))


def record(folder):
    new = folder / "source-times.new.json"
    before, now = json.loads(new.read_text()), tracked()
    new.unlink()
    same = {file: state for file, state in before.items() if now.get(file) == state}
    (folder / "source-times.json").write_text(json.dumps(same))


def main():
    if len(sys.argv) != 3 or sys.argv[1] not in ("restore", "record"):
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    {"restore": restore, "record": record}[sys.argv[1]](folder)


if __name__ == "__main__":
    main()
