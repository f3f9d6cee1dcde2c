"""How fast slot images are encrypted and decrypted on this machine.

    python benchmarks/encryption.py [--block-mib 2] [--threads 1 2 4]

Prints one line for each operation and number of threads: GB/s of payload, the median of several rounds.  A disk tier
with a key is limited by the smaller of this and of the disk.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable

import numpy as np

from kvcache_factory.block.envelope import Header, checksum, pack_header
from kvcache_factory.block.spec import BlockSpec, KVDtype
from kvcache_factory.codec.aesgcm import AesGcm

ROUNDS = 5
BYTES_PER_ROUND = 256 << 20


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-mib", type=int, default=2, help="size of a payload in MiB (2)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4], help="numbers of threads (1 2 4)")
    options = parser.parse_args()
    spec = BlockSpec(KVDtype.BF16, num_layers=8 * options.block_mib, num_kv_heads=8, head_dim=64)
    print(f"{'op':<8}{'threads':>8}{'block_bytes':>13}{'GB/s':>8}")
    for threads in options.threads:
        for op, rates in measure(spec, threads).items():
            print(f"{op:<8}{threads:>8}{spec.payload_bytes:>13}{statistics.median(rates):>8.2f}")


def measure(spec: BlockSpec, threads: int) -> dict[str, list[float]]:
    """Rates in GB/s of each round, all threads together; every round is checked to have come back unchanged."""
    codec = AesGcm(lambda: os.urandom(32))
    codec.open()
    image = random_image(spec)
    outs = [np.zeros(spec.slot_bytes, np.uint8) for _ in range(threads)]
    turns = max(BYTES_PER_ROUND // spec.payload_bytes // threads, 1)
    total = threads * turns * spec.payload_bytes
    rates: dict[str, list[float]] = {"encode": [], "decode": []}
    for _ in range(ROUNDS):
        encoding = decoding = 0.0
        for _ in range(turns):  # an image is decoded in place, so that every turn encodes first
            encoding += together([lambda out=out: codec.encode(spec, image, out) for out in outs])
            decoding += together([lambda out=out: codec.decode(spec, out) for out in outs])
        assert all(np.array_equal(out, image) for out in outs)
        rates["encode"].append(total / encoding / 1e9)
        rates["decode"].append(total / decoding / 1e9)
    codec.close()
    return rates


def together(jobs: list[Callable[[], object]]) -> float:
    """Seconds from the first beginning to the last end of *jobs*, each in a thread that was ready before."""
    gate = threading.Barrier(len(jobs))
    spans: list[tuple[float, float]] = []

    def run(job: Callable[[], object]) -> None:
        gate.wait()
        start = time.perf_counter()
        job()
        spans.append((start, time.perf_counter()))

    workers = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return max(end for _, end in spans) - min(start for start, _ in spans)


def random_image(spec: BlockSpec) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """A sealed plain image with a random payload."""
    image = np.zeros(spec.slot_bytes, np.uint8)
    payload = image[spec.header_bytes : spec.header_bytes + spec.payload_bytes]
    payload[:] = np.random.default_rng(0).integers(0, 256, spec.payload_bytes, np.uint8)
    header = Header(
        identity_digest=bytes(16),
        key=bytes(16),
        parent_key=bytes(16),
        tokens=np.arange(spec.block_tokens, dtype=np.uint32),
        layout="LCND",
        payload_bytes=spec.payload_bytes,
        payload_checksum=checksum(payload.data),
    )
    pack_header(header, spec.header_bytes, image.data)
    return image


if __name__ == "__main__":
    main()
