#!/usr/bin/env python3
"""Makes the ONNX models of this example, and what they give for some inputs.

    pip install onnx==1.23.2 numpy==2.4.6
    python3 make.py

`cnn.onnx` is trained here on the digits of data/; `encoder.onnx` has random weights. The
outputs in expected.json are those of ONNX's own reference implementation, which computes
with numpy. The other models are for tests: they have casts of integers, some of which a
leased device does not have.
"""

import gzip
import json
import pathlib

import numpy as np
import onnx
from numpy.lib.stride_tricks import sliding_window_view
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

HERE = pathlib.Path(__file__).resolve().parent
OPSET = 20
# Digits for training, as in the other examples; the other 389 are for tests.
TRAIN = 1_408
# Digits and sequences in expected.json.
DIGITS, SEQUENCES = 16, 4

# The encoder: tokens that it knows, tokens in a sequence, width, heads, layers.
VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 64, 16, 32, 4, 2


class Graph:
    """Collects the nodes and weights of a model. Each node is named after its output."""

    def __init__(self):
        self.nodes, self.weights = [], []

    def weight(self, name, values):
        self.weights.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def node(self, op, inputs, output, **attributes):
        self.nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output

    def save(self, name, inputs, outputs):
        """Writes and checks a model; inputs and outputs are (name, element type, shape)."""
        describe = lambda values: [helper.make_tensor_value_info(*value) for value in values]
        graph = helper.make_graph(
            self.nodes, name, describe(inputs), describe(outputs), self.weights
        )
        opset = helper.make_opsetid("", OPSET)
        # A version of the file format that tools of 2024 read.
        model = helper.make_model(graph, opset_imports=[opset], ir_version=9)
        onnx.checker.check_model(model, full_check=True)
        onnx.save(model, HERE / f"{name}.onnx")
        return model


def digits():
    """Returns images of shape [n, 1, 8, 8], from 0 to 1, and labels; training digits first."""
    with gzip.open(HERE / "../../../data/digits.csv.gz", "rt") as file:
        lines = file.read().split()
    # The file is sorted by writer; taking every seventh line mixes the writers.
    lines = [line for first in range(7) for line in lines[first::7]]
    table = np.array([line.split(",") for line in lines], dtype=np.int64)
    images = (table[:, :64] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    return images, table[:, 64]


def patches(x):
    """Returns the 3×3 surroundings of each pixel: [n, channels, height, width, 3, 3]."""
    return sliding_window_view(np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))), (3, 3), (2, 3))


def convolve(x, weight, bias):
    out = np.einsum("nchwij,ocij->nohw", patches(x), weight, optimize=True)
    return out + bias[:, None, None]


def convolve_backward(x, weight, gradient):
    """Returns the gradients of the input, the weight and the bias of `convolve`."""
    of_weight = np.einsum("nchwij,nohw->ocij", patches(x), gradient, optimize=True)
    turned = weight[:, :, ::-1, ::-1]
    of_input = np.einsum("nohwij,ocij->nchw", patches(gradient), turned, optimize=True)
    return of_input, of_weight, gradient.sum((0, 2, 3))


def gradients(weights, x, labels):
    """Returns the gradients of the mean cross entropy of a batch."""
    conv1, bias1, conv2, bias2, linear, bias3 = weights
    before1 = convolve(x, conv1, bias1)
    blocks = np.maximum(before1, 0).reshape(len(x), 8, 4, 2, 4, 2)
    pooled = blocks.max((3, 5))
    before2 = convolve(pooled, conv2, bias2)
    flat = np.maximum(before2, 0).reshape(len(x), -1)
    logits = flat @ linear + bias3

    exp = np.exp(logits - logits.max(1, keepdims=True))
    of_logits = exp / exp.sum(1, keepdims=True)
    of_logits[np.arange(len(x)), labels] -= 1
    of_logits /= len(x)
    of_before2 = (of_logits @ linear.T).reshape(before2.shape) * (before2 > 0)
    of_pooled, of_conv2, of_bias2 = convolve_backward(pooled, conv2, of_before2)
    is_largest = blocks == pooled[:, :, :, None, :, None]
    of_before1 = (is_largest * of_pooled[:, :, :, None, :, None]).reshape(before1.shape)
    _, of_conv1, of_bias1 = convolve_backward(x, conv1, of_before1 * (before1 > 0))
    return [of_conv1, of_bias1, of_conv2, of_bias2, flat.T @ of_logits, of_logits.sum(0)]


def train(images, labels, rng):
    """Trains the CNN with Adam on images whose mean is 0, and returns its weights."""
    shapes = [(8, 1, 3, 3), (8,), (16, 8, 3, 3), (16,), (256, 10), (10,)]
    inputs = [9, None, 72, None, 256, None]
    weights = [
        rng.normal(0, (2 / n) ** 0.5, shape) if n else np.zeros(shape)
        for shape, n in zip(shapes, inputs)
    ]
    means = [np.zeros(shape) for shape in shapes]
    squares = [np.zeros(shape) for shape in shapes]
    step = 0
    for _ in range(15):
        order = rng.permutation(len(images))
        for batch in order.reshape(-1, 64):
            step += 1
            for i, g in enumerate(gradients(weights, images[batch], labels[batch])):
                means[i] = 0.9 * means[i] + 0.1 * g
                squares[i] = 0.999 * squares[i] + 0.001 * g * g
                mean = means[i] / (1 - 0.9**step)
                root = np.sqrt(squares[i] / (1 - 0.999**step))
                weights[i] = weights[i] - 3e-3 * mean / (root + 1e-8)
    return [w.astype(np.float32) for w in weights]


def cnn(images, labels, rng):
    """A batch norm with the statistics of the training digits, then two convolutions."""
    mean, variance = images.mean(), images.var()
    normal = (images - mean) / np.sqrt(variance + 1e-5)
    conv1, bias1, conv2, bias2, linear, bias3 = train(normal, labels, rng)
    g = Graph()
    norm = [("scale", 1), ("shift", 0), ("mean", mean), ("variance", variance)]
    norm = [g.weight(name, np.array([value], np.float32)) for name, value in norm]
    x = g.node("BatchNormalization", ["images", *norm], "normal", epsilon=1e-5)
    parameters = [g.weight("conv1", conv1), g.weight("bias1", bias1)]
    x = g.node("Conv", [x, *parameters], "first", kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    x = g.node("Relu", [x], "first_relu")
    x = g.node("MaxPool", [x], "pooled", kernel_shape=[2, 2], strides=[2, 2])
    parameters = [g.weight("conv2", conv2), g.weight("bias2", bias2)]
    x = g.node("Conv", [x, *parameters], "second", kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    x = g.node("Relu", [x], "second_relu")
    x = g.node("Flatten", [x], "flat", axis=1)
    parameters = [g.weight("linear", linear.T), g.weight("bias3", bias3)]
    x = g.node("Gemm", [x, *parameters], "logits", transB=1)
    g.node("ArgMax", [x], "digit", axis=1, keepdims=0)
    outputs = [("logits", TensorProto.FLOAT, ["n", 10]), ("digit", TensorProto.INT64, ["n"])]
    return g.save("cnn", [("images", TensorProto.FLOAT, ["n", 1, 8, 8])], outputs)


def attention(g, x, bias, name, rng):
    """Multi-head attention of `x` to itself; `bias` is added to the scores."""
    size = WIDTH // HEADS

    def project(x, what):
        weight = rng.normal(0, WIDTH**-0.5, (WIDTH, WIDTH)).astype(np.float32)
        x = g.node("MatMul", [x, g.weight(f"{name}_{what}_weight", weight)], f"{name}_{what}")
        offset = rng.normal(0, 0.1, WIDTH).astype(np.float32)
        return g.node("Add", [x, g.weight(f"{name}_{what}_bias", offset)], f"{name}_{what}_out")

    def heads(x, what, order):
        x = g.node("Reshape", [project(x, what), "split_heads"], f"{name}_{what}_split")
        return g.node("Transpose", [x], f"{name}_{what}_heads", perm=order)

    query, value = heads(x, "query", [0, 2, 1, 3]), heads(x, "value", [0, 2, 1, 3])
    scores = g.node("MatMul", [query, heads(x, "key", [0, 2, 3, 1])], f"{name}_products")
    root = g.weight(f"{name}_root", np.array(size**0.5, np.float32))
    scores = g.node("Div", [scores, root], f"{name}_scaled")
    scores = g.node("Add", [scores, bias], f"{name}_scores")
    scores = g.node("Softmax", [scores], f"{name}_softmax", axis=-1)
    x = g.node("MatMul", [scores, value], f"{name}_mixed")
    x = g.node("Transpose", [x], f"{name}_together", perm=[0, 2, 1, 3])
    x = g.node("Reshape", [x, "join_heads"], f"{name}_joined")
    return project(x, "output")


def layer_norm(g, x, name, rng):
    scale = g.weight(f"{name}_scale", rng.normal(1, 0.1, WIDTH).astype(np.float32))
    shift = g.weight(f"{name}_shift", rng.normal(0, 0.1, WIDTH).astype(np.float32))
    return g.node("LayerNormalization", [x, scale, shift], name, axis=-1, epsilon=1e-5)


def feed_forward(g, x, name, rng):
    def linear(x, what, rows, columns):
        weight = rng.normal(0, rows**-0.5, (rows, columns)).astype(np.float32)
        x = g.node("MatMul", [x, g.weight(f"{name}_{what}_weight", weight)], f"{name}_{what}")
        bias = g.weight(f"{name}_{what}_bias", rng.normal(0, 0.1, columns).astype(np.float32))
        return g.node("Add", [x, bias], f"{name}_{what}_out")

    x = linear(x, "wide", WIDTH, 2 * WIDTH)
    x = g.node("Gelu", [x], f"{name}_gelu")
    return linear(x, "narrow", 2 * WIDTH, WIDTH)


def encoder(rng):
    """Token ids and a mask, as exported text encoders have them: both int64."""
    g = Graph()
    g.weight("split_heads", np.array([0, LENGTH, HEADS, WIDTH // HEADS]))
    g.weight("join_heads", np.array([0, LENGTH, WIDTH]))
    table = g.weight("tokens", rng.normal(0, 1, (VOCABULARY, WIDTH)).astype(np.float32))
    positions = g.weight("positions", rng.normal(0, 1, (LENGTH, WIDTH)).astype(np.float32))
    x = g.node("Gather", [table, "ids"], "embedded", axis=0)
    x = g.node("Add", [x, positions], "placed")
    x = layer_norm(g, x, "norm0", rng)
    # 0 where there is a token, and a large negative number where there is padding.
    real = g.node("Cast", ["mask"], "real", to=TensorProto.FLOAT)
    padding = g.node("Sub", [g.weight("one", np.array(1, np.float32)), real], "padding")
    bias = g.node("Mul", [padding, g.weight("least", np.array(-1e4, np.float32))], "flat_bias")
    bias = g.node("Unsqueeze", [bias, g.weight("bias_axes", np.array([1, 2]))], "bias")
    for layer in range(1, LAYERS + 1):
        y = attention(g, x, bias, f"attention{layer}", rng)
        x = layer_norm(g, g.node("Add", [x, y], f"sum{layer}a"), f"norm{layer}a", rng)
        y = feed_forward(g, x, f"forward{layer}", rng)
        x = layer_norm(g, g.node("Add", [x, y], f"sum{layer}b"), f"norm{layer}b", rng)
    # The mean over the tokens that are not padding.
    axis = g.weight("last_axis", np.array([2]))
    weight = g.node("Unsqueeze", [real, axis], "weight")
    total = g.node("ReduceSum", [g.node("Mul", [x, weight], "weighted"), "tokens_axis"], "total")
    g.weight("tokens_axis", np.array([1]))
    count = g.node("ReduceSum", [weight, "tokens_axis"], "count")
    x = g.node("Div", [total, count], "mean")
    g.node("Reshape", [x, g.weight("pooled_shape", np.array([0, WIDTH]))], "pooled")
    shape = ["n", LENGTH]
    inputs = [("ids", TensorProto.INT64, shape), ("mask", TensorProto.INT64, shape)]
    return g.save("encoder", inputs, [("pooled", TensorProto.FLOAT, ["n", WIDTH])])


def models_for_tests():
    """Models whose generated code casts integers."""
    shape = ["n"]
    # Casts that do nothing on a device whose integers are int64.
    g = Graph()
    two = g.weight("two", np.array([2]))
    g.nodes.append(helper.make_node("TopK", ["x", two], ["largest", "places"], name="largest"))
    g.node("ArgMin", ["x"], "smallest", axis=1, keepdims=0)
    g.node("Cast", ["x"], "whole", to=TensorProto.INT64)
    small = g.weight("small", np.array([-4, 0, 2, 127], np.int8))
    factor = g.weight("factor", np.array(0.5, np.float32))
    g.node("Add", ["x", g.node("DequantizeLinear", [small, factor], "addend")], "sum")
    outputs = [
        ("places", TensorProto.INT64, ["n", 2]),
        ("smallest", TensorProto.INT64, ["n"]),
        ("whole", TensorProto.INT64, ["n", 4]),
        ("sum", TensorProto.FLOAT, ["n", 4]),
    ]
    g.save("integers", [("x", TensorProto.FLOAT, ["n", 4])], outputs)
    # Casts from one type of integers to another, which end the connection to the device.
    g = Graph()
    g.node("Cast", ["ids"], "narrow", to=TensorProto.INT32)
    g.save("cast", [("ids", TensorProto.INT64, shape)], [("narrow", TensorProto.INT32, shape)])
    g = Graph()
    scale = g.weight("scale", np.array(0.5, np.float32))
    zero = g.weight("zero", np.array(10, np.uint8))
    g.node("QuantizeLinear", ["x", scale, zero], "small")
    g.node("DequantizeLinear", ["small", scale, zero], "y")
    g.save("quantized", [("x", TensorProto.FLOAT, shape)], [("y", TensorProto.FLOAT, shape)])


def main():
    rng = np.random.default_rng(42)
    images, labels = digits()
    classify = ReferenceEvaluator(cnn(images[:TRAIN], labels[:TRAIN], rng))
    logits, guesses = classify.run(None, {"images": images[TRAIN:]})
    print(f"cnn: {100 * np.mean(guesses == labels[TRAIN:]):.1f} % of the test digits right")
    encode = ReferenceEvaluator(encoder(rng))
    ids = rng.integers(0, VOCABULARY, (SEQUENCES, LENGTH))
    lengths = LENGTH - 3 * np.arange(SEQUENCES)
    mask = (np.arange(LENGTH) < lengths[:, None]).astype(np.int64)
    (pooled,) = encode.run(None, {"ids": ids, "mask": mask})
    models_for_tests()
    expected = {
        "logits": logits[:DIGITS].tolist(),
        "ids": ids.tolist(),
        "mask": mask.tolist(),
        "pooled": pooled.tolist(),
    }
    lines = (f'"{key}": {json.dumps(value)}' for key, value in expected.items())
    (HERE / "expected.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


main()
