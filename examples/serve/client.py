#!/usr/bin/env python3
"""Sends digits to the server with NVIDIA's client for Triton: pip install 'tritonclient[http,grpc]'

    SERVE_TOKEN=... client.py URL [--grpc]
"""

import argparse
import os

import numpy as np


def digit_seven():
    """An image of 8 x 8 pixels from 0 to 1."""
    rows = ["########", "########", "......##", ".....##.", "....##..", "...##...", "..##....", "..##...."]
    return np.array([[float(pixel == "#") for pixel in row] for row in rows], dtype=np.float32)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="such as http://localhost:8000")
    parser.add_argument("--grpc", action="store_true", help="by gRPC instead of HTTP")
    arguments = parser.parse_args()
    scheme, address = arguments.url.split("://")
    if arguments.grpc:
        import tritonclient.grpc as triton
    else:
        import tritonclient.http as triton
    client = triton.InferenceServerClient(address.rstrip("/"), ssl=scheme == "https")
    # Names of headers are in small letters in gRPC.
    headers = {"authorization": f"Bearer {os.environ['SERVE_TOKEN']}"}
    images = np.stack([digit_seven(), np.roll(digit_seven(), 1, axis=1)])
    image = triton.InferInput("image", images.shape, "FP32")
    image.set_data_from_numpy(images)
    answer = client.infer("digits", [image], headers=headers)
    for probabilities in answer.as_numpy("probabilities"):
        best = int(probabilities.argmax())
        print(f"digit {best}, probability {probabilities[best]:.3f}")


if __name__ == "__main__":
    main()
