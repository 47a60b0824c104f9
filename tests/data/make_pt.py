#!/usr/bin/env python3
"""Writes layers.pt as torch.save does: a zip archive with a pickle and one file per storage.

torch is not needed. A stand-in for the functions that the pickle names is enough, as the
pickle only has their names. Run it in this directory after a change; the archive's
entries have no times, so that the same script gives the same file.
"""

import collections
import io
import pickle
import struct
import sys
import types
import zipfile

torch = types.ModuleType("torch")
utils = types.ModuleType("torch._utils")
sys.modules.update({"torch": torch, "torch._utils": utils})


def function(module, name):
    def stand_in(*_):
        raise NotImplementedError

    stand_in.__module__, stand_in.__qualname__, stand_in.__name__ = module.__name__, name, name
    setattr(module, name, stand_in)
    return stand_in


REBUILD = function(utils, "_rebuild_tensor_v2")
STORAGES = {"f": function(torch, "FloatStorage"), "q": function(torch, "LongStorage")}


class Storage:
    def __init__(self, code, values):
        self.code, self.values = code, values


class Tensor:
    def __init__(self, code, shape, values):
        assert len(values) == eval("*".join(map(str, shape)))
        self.storage, self.shape = Storage(code, values), shape

    def __reduce__(self):
        strides, stride = [], 1
        for dim in reversed(self.shape):
            strides.insert(0, stride)
            stride *= dim
        arguments = (self.storage, 0, self.shape, tuple(strides), False, collections.OrderedDict())
        return REBUILD, arguments


class Pickler(pickle.Pickler):
    def __init__(self, file):
        super().__init__(file, protocol=2)
        self.storages = []

    def persistent_id(self, value):
        if not isinstance(value, Storage):
            return None
        self.storages.append(value)
        key = str(len(self.storages) - 1)
        return ("storage", STORAGES[value.code], key, "cpu", len(value.values))


def main():
    state = collections.OrderedDict()
    # A linear layer from 3 to 2 values: torch has one row for each output.
    state["linear.weight"] = Tensor("f", (2, 3), [0.5, -1.25, 3.0, 1e-3, 7.75, -0.0])
    state["linear.bias"] = Tensor("f", (2,), [0.1, -2.5])
    state["steps"] = Tensor("q", (2,), [-(2**40), 7])
    pickled = io.BytesIO()
    pickler = Pickler(pickled)
    pickler.dump(state)
    entries = {"data.pkl": pickled.getvalue(), "byteorder": b"little", "version": b"3\n"}
    for key, storage in enumerate(pickler.storages):
        form = f"<{len(storage.values)}{storage.code}"
        entries[f"data/{key}"] = struct.pack(form, *storage.values)
    with zipfile.ZipFile("layers.pt", "w", zipfile.ZIP_STORED) as archive:
        for name, content in entries.items():
            archive.writestr(zipfile.ZipInfo(f"layers/{name}"), content)


main()
