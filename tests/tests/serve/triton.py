"""Requests inferences with NVIDIA's client, unchanged: triton.py ADDRESS CERTIFICATE

The token is in SERVE_TOKEN. Prints `done` after the last check.
"""

import os
import sys

import gevent.ssl
import grpc
import numpy as np
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

ADDRESS, CERTIFICATE = sys.argv[1:]


def headers():
    """New ones for each call: the client adds to those that it gets."""
    return {"authorization": f"Bearer {os.environ['SERVE_TOKEN']}"}


def http():
    return tritonclient.http.InferenceServerClient(
        ADDRESS,
        ssl=True,
        ssl_context_factory=lambda: gevent.ssl.create_default_context(cafile=CERTIFICATE),
    )


def grpc_client():
    return tritonclient.grpc.InferenceServerClient(ADDRESS, ssl=True, root_certificates=CERTIFICATE)


def inputs_of(triton, rows):
    """Three inputs, of which the floats differ by row."""
    floats = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3) / 4
    integers = np.array([[2, -4, (1 << 31) - 2]] * rows, dtype=np.int64)
    mask = np.array([[True, True, False]] * rows)
    inputs = []
    for name, values, datatype in [("floats", floats, "FP32"), ("integers", integers, "INT64"), ("mask", mask, "BOOL")]:
        tensor = triton.InferInput(name, values.shape, datatype)
        tensor.set_data_from_numpy(values)
        inputs.append(tensor)
    expected = (floats[:, 0] * 2 - floats[:, 1] * 4).reshape(rows, 1)
    return inputs, expected, integers + 1


def check_answer(answer, expected, following):
    np.testing.assert_array_equal(answer.as_numpy("sum"), expected)
    np.testing.assert_array_equal(answer.as_numpy("next"), following)
    assert answer.as_numpy("sum").dtype == np.float32
    assert answer.as_numpy("next").dtype == np.int64


def check_error(call, *expected):
    try:
        call()
    except InferenceServerException as error:
        assert all(str(it) in f"{error.status()} {error.message()}" for it in expected), f"{error} has not {expected}"
    else:
        raise AssertionError(f"no error, but {expected} was expected")


def check_health_and_metadata(client, is_json):
    assert client.is_server_live(headers=headers())
    assert client.is_server_ready(headers=headers())
    assert client.is_model_ready("several", headers=headers())
    options = {} if is_json else {"as_json": True}
    server = client.get_server_metadata(headers=headers(), **options)
    assert server["name"] == "tensord-serve", server
    model = client.get_model_metadata("several", headers=headers(), **options)
    assert model["versions"] == ["1"], model
    shapes = {it["name"]: ([int(size) for size in it["shape"]], it["datatype"]) for it in model["inputs"]}
    assert shapes == {"floats": ([-1, 3], "FP32"), "integers": ([-1, 3], "INT64"), "mask": ([-1, 3], "BOOL")}, shapes


def check_inferences(triton, client, compressions):
    for rows in [1, 3]:
        inputs, expected, following = inputs_of(triton, rows)
        answer = client.infer("several", inputs, headers=headers(), request_id=f"id-{rows}")
        check_answer(answer, expected, following)
        response = answer.get_response()
        identity = response["id"] if isinstance(response, dict) else response.id
        assert identity == f"id-{rows}", identity
        for options in compressions:
            check_answer(client.infer("several", inputs, headers=headers(), **options), expected, following)
    inputs, expected, _ = inputs_of(triton, 2)
    outputs = [triton.InferRequestedOutput("sum")]
    answer = client.infer("several", inputs, outputs=outputs, headers=headers(), model_version="1")
    np.testing.assert_array_equal(answer.as_numpy("sum"), expected)
    assert answer.as_numpy("next") is None


def check_errors(triton, client, not_found, invalid, unauthorized):
    inputs, _, _ = inputs_of(triton, 1)
    check_error(lambda: client.infer("none", inputs, headers=headers()), not_found, "there is no model `none`")
    check_error(lambda: client.infer("several", inputs[:2], headers=headers()), invalid, "lacks input `mask`")
    wrong = triton.InferInput("floats", [1, 2], "FP32")
    wrong.set_data_from_numpy(np.zeros((1, 2), dtype=np.float32))
    request = [wrong, *inputs[1:]]
    check_error(lambda: client.infer("several", request, headers=headers()), invalid, "it must be [-1, 3]")
    wrong = triton.InferInput("floats", [1, 3], "FP64")
    wrong.set_data_from_numpy(np.zeros((1, 3)))
    request = [wrong, *inputs[1:]]
    check_error(lambda: client.infer("several", request, headers=headers()), invalid, "has type FP64; it must be FP32")
    wide = triton.InferInput("integers", [1, 3], "INT64")
    wide.set_data_from_numpy(np.array([[0, 0, 1 << 40]]))
    request = [inputs[0], wide, inputs[2]]
    check_error(lambda: client.infer("several", request, headers=headers()), invalid, "has 1099511627776 at index 2")
    check_error(lambda: client.infer("several", inputs), unauthorized, "no valid token")


def check_json(client):
    """The same without binary data."""
    inputs, expected, _ = inputs_of(tritonclient.http, 2)
    floats = np.arange(6, dtype=np.float32).reshape(2, 3) / 4
    inputs[0].set_data_from_numpy(floats, binary_data=False)
    outputs = [tritonclient.http.InferRequestedOutput("sum", binary_data=False)]
    answer = client.infer("several", inputs, outputs=outputs, headers=headers())
    np.testing.assert_array_equal(answer.as_numpy("sum"), expected)


def main():
    with http() as client:
        check_health_and_metadata(client, is_json=True)
        compressions = [
            {"request_compression_algorithm": name, "response_compression_algorithm": name} for name in ["gzip", "deflate"]
        ]
        check_inferences(tritonclient.http, client, compressions)
        check_json(client)
        check_errors(tritonclient.http, client, "404", "400", "401")
    with grpc_client() as client:
        check_health_and_metadata(client, is_json=False)
        compressions = [{"compression_algorithm": name} for name in ["gzip", "deflate"]]
        check_inferences(tritonclient.grpc, client, [*compressions, {"client_timeout": 30}])
        codes = [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED]
        check_errors(tritonclient.grpc, client, *codes)
    print("done")


main()
