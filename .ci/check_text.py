#!/usr/bin/env python3
"""Checks what neither the compiler nor the linter reads.

- Paths and names in backticks in the documents exist.
- Words that were replaced by a field's term stay out of the sources.

Also reports the largest files and functions, which fail nothing.
"""

import collections
import pathlib
import re
import subprocess
import sys

# Words of a private vocabulary, as words in comments or as parts of identifiers.
RETIRED = set(
    "told said say says tell tells heard hear hears spoke speak news asks asked asking "
    "outgo intake aside lending roster whoever".split()
)
# How many of them there may be in all: some are the right word in their place.
RETIRED_MOST = 60

CRATES = "proto channel session transport client backend worker scheduler demo server serve".split()

# From these sizes on, files and functions are reported, in lines.
FILE_LINES = 450
FUNCTION_LINES = 70

# Names in the documents that are not this project's.
FOREIGN = set("try_ burn.toml cubecl.toml timeout_ms DEADLINE_EXCEEDED RESOURCE_EXHAUSTED INVALID_ARGUMENT UNAUTHENTICATED NOT_FOUND".split())


def tracked():
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
    )
    return [pathlib.Path(f) for f in files.stdout.split("\n") if f and pathlib.Path(f).is_file()]


def words(text):
    """The words of `text`, with those that identifiers are made of."""
    for token in re.findall(r"[A-Za-z_][A-Za-z_0-9]*", text):
        yield from re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", token).lower().split("_")


def without_tests(path, text):
    if "tests" in path.parts or path.stem in ("tests", "testing", "conformance"):
        return ""
    return re.split(r"\n#\[cfg\(test\)\]\nmod \w+ \{", text)[0]


def retired(sources):
    """Returns complaints about retired words, if there are too many."""
    found = collections.Counter()
    for path, text in sources.items():
        if path.parts[0] in CRATES and path.parts[1] == "src":
            for number, line in enumerate(without_tests(path, text).split("\n"), 1):
                hits = [word for word in words(line) if word in RETIRED]
                found.update({f"{path}:{number}: {word}": 1 for word in hits})
    print(f"{len(found)} retired words ({RETIRED_MOST} are the limit)")
    return sorted(found) if len(found) > RETIRED_MOST else []


def missing_names(files, sources):
    """Returns complaints about names in the documents that do not exist."""
    known = set()
    for path in files:
        if path.suffix in (".rs", ".toml", ".proto", ".py", ".sh", ".yml", ".service", ".html", "") or (
            path.parts[0] == ".ci"
        ):
            try:
                known.update(re.findall(r"[A-Za-z_][A-Za-z_0-9]*", sources.get(path) or path.read_text()))
            except UnicodeDecodeError:
                pass
    # Documents shorten the names of an enum's values, which protobuf gives a common prefix.
    for path in files:
        if path.suffix == ".proto":
            for name in re.findall(r"\b[A-Z][A-Z_0-9]+\b", path.read_text()):
                parts = name.split("_")
                known.update("_".join(parts[n:]) for n in range(1, len(parts)))
    places = {"/".join(path.parts[i:]) for path in files for i in range(len(path.parts))}
    folders = {place.rsplit("/", n)[0] for place in places for n in range(1, place.count("/") + 1)}
    complaints = []
    for path in files:
        if path.suffix != ".md":
            continue
        text = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), path.read_text(), flags=re.M | re.S)
        for number, line in enumerate(text.split("\n"), 1):
            for quoted in re.findall(r"`([^`]+)`", line):
                why = complaint(quoted, places, folders, known)
                if why:
                    complaints.append(f"{path}:{number}: `{quoted}`: {why}")
    return complaints


def complaint(quoted, places, folders, known):
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", quoted) and (
        re.search(r"\.(rs|md|toml|proto|py|yml|html)$", quoted) or ("/" in quoted and quoted.endswith("/"))
    ):
        name = quoted.rstrip("/")
        found = name in places or name in folders or name in FOREIGN or name.startswith(".")
        return None if found else "no such file or folder"
    name = re.fullmatch(r"((?:\w+(?:::|\.))*\w+)(?:<.*>)?(?:\(.*\))?!?", quoted)
    if name and re.search(r"[A-Z_]|::|\(", quoted) and quoted not in FOREIGN:
        unknown = [part for part in re.split(r"::|\.", name[1]) if part not in known]
        return f"no such name in the sources: {', '.join(unknown)}" if unknown else None
    return None


def functions(text):
    """Yields the name and the lines of each function; rustfmt's layout is assumed."""
    lines = text.split("\n")
    for start, line in enumerate(lines):
        head = re.match(r"( *)(?:pub(?:\(.*?\))? )?(?:const )?(?:async )?(?:unsafe )?fn (\w+)", line)
        if head:
            for end in range(start, len(lines)):
                is_signature = lines[end].endswith(";") and (
                    end == start or lines[end].startswith(head[1] + ")")
                )
                if is_signature or lines[end].startswith(head[1] + "}"):
                    yield head[2], end - start + 1
                    break


def report_sizes(sources):
    for path, text in sorted(sources.items()):
        count = text.count("\n")
        if count > FILE_LINES:
            print(f"{path}: {count} lines")
        for name, count in functions(text):
            if count > FUNCTION_LINES:
                print(f"{path}: fn {name}: {count} lines")


def main():
    files = tracked()
    sources = {path: path.read_text() for path in files if path.suffix == ".rs"}
    report_sizes(sources)
    complaints = retired(sources) + missing_names(files, sources)
    for line in complaints:
        print(line, file=sys.stderr)
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main())
