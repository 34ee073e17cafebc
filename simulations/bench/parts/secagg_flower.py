"""The work of one client and of the server in Flower's SecAgg+, with Flower's own functions.

``secagg.py`` runs this in an interpreter that has flwr 1.41. It reads JSON lines, does the work
that each names, and answers with seconds of processor time and of wall-clock time, and bytes of
upload. The functions are called in the order of ``secaggplus_mod`` and ``SecAggPlusWorkflow``,
without their messages and records. Only the measured client is computed: its shares stand in for
those of all clients, which costs the server the same.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter, process_time  # noqa: TID251 - runs where fedlearn need not be

import numpy as np
from flwr.common import bytes_to_ndarray, ndarray_to_bytes
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import (
    decrypt,
    encrypt,
    generate_shared_key,
)
from flwr.common.secure_aggregation.ndarrays_arithmetic import (
    factor_combine,
    factor_extract,
    get_parameters_shape,
    parameters_addition,
    parameters_mod,
    parameters_multiply,
    parameters_subtraction,
)
from flwr.common.secure_aggregation.quantization import dequantize, quantize
from flwr.common.secure_aggregation.secaggplus_utils import (
    pseudo_rand_gen,
    share_keys_plaintext_concat,
    share_keys_plaintext_separate,
)
from flwr.supercore.primitives.asymmetric import (
    bytes_to_private_key,
    bytes_to_public_key,
    generate_key_pairs,
    private_key_to_bytes,
    public_key_to_bytes,
)
from numpy.typing import NDArray

#: Flower's own defaults: clipping_range, quantization_range, modulus_range.
_CLIP, _TARGET, _MODULUS = 8.0, 1 << 22, 1 << 32

Vectors = list[NDArray[np.int64]]


@dataclass(frozen=True)
class Cohort:
    """A cohort in which all clients are neighbors; the measured client has the middle id.

    Attributes:
        size: n.
        threshold: t.
        dimension: d.
        dropped: Number of clients that drop out before sending their vector.
        peers: By id, the public key for masks, the one for packets, and a packet to the client.
        private: The client's two private keys, for masks and packets.
        shares: Shares of the client's self-mask seed and of its mask key.
        secrets: The client's self-mask seed and its mask key.
        update: The client's update.
    """

    size: int
    threshold: int
    dimension: int
    dropped: int
    peers: Mapping[int, tuple[bytes, bytes, bytes]]
    private: tuple[bytes, bytes]
    shares: tuple[list[bytes], list[bytes]]
    secrets: tuple[bytes, bytes]
    update: NDArray[np.float32]

    @classmethod
    def of(cls, size: int, threshold: int, dimension: int, dropped: int) -> "Cohort":
        """Create a cohort with fresh keys."""
        mask_key, _ = generate_key_pairs()
        packet_key, packet_public = generate_key_pairs()
        secrets = os.urandom(32), private_key_to_bytes(mask_key)
        shares = tuple(create_shares(secret, threshold, size) for secret in secrets)
        own, peers = size // 2, {}
        for peer in range(size):
            if peer == own:
                continue
            (_, theirs), (sealing, sealing_public) = generate_key_pairs(), generate_key_pairs()
            plain = share_keys_plaintext_concat(peer, own, shares[0][0], shares[1][0])
            packet = encrypt(generate_shared_key(sealing, packet_public), plain)
            peers[peer] = public_key_to_bytes(theirs), public_key_to_bytes(sealing_public), packet
        return cls(
            size=size,
            threshold=threshold,
            dimension=dimension,
            dropped=dropped,
            peers=peers,
            private=(secrets[1], private_key_to_bytes(packet_key)),
            shares=(shares[0], shares[1]),
            secrets=secrets,
            update=np.random.default_rng(0).standard_normal(dimension, np.float32),
        )

    @property
    def own(self) -> int:
        """Id of the measured client."""
        return self.size // 2

    def fold(self) -> int:
        """Add the masks of all neighbors to a vector."""
        vector: Vectors = [np.zeros(self.dimension, np.int64)]
        for peer in self.peers:
            mask = pseudo_rand_gen(os.urandom(32), _MODULUS, get_parameters_shape(vector))
            fold = parameters_addition if self.own > peer else parameters_subtraction
            vector = fold(vector, mask)
        parameters_mod(vector, _MODULUS)
        return 0

    def client(self) -> int:
        """Do all work of a client in a round, and return the bytes that it uploads."""
        keys = [generate_key_pairs() for _ in range(2)]
        up = sum(len(public_key_to_bytes(public)) for _, public in keys)
        for private, _ in keys:
            private_key_to_bytes(private)
        seed = os.urandom(32)
        seed_shares = create_shares(seed, self.threshold, self.size)
        key_shares = create_shares(self.secrets[1], self.threshold, self.size)
        shared = {}
        for peer, (_, packet_public, _) in self.peers.items():
            shared[peer] = generate_shared_key(
                bytes_to_private_key(self.private[1]), bytes_to_public_key(packet_public)
            )
            pair = seed_shares[peer], key_shares[peer]
            plain = share_keys_plaintext_concat(self.own, peer, *pair)
            up += len(encrypt(shared[peer], plain))
        held = {}
        for peer, (_, _, packet) in self.peers.items():
            _, _, *held[peer] = share_keys_plaintext_separate(decrypt(shared[peer], packet))
        up += sum(map(len, self._masked_vector(seed)))
        # For each neighbor one share: of its key if it dropped out, else of its seed.
        return up + sum(len(held[peer][peer < self.dropped]) for peer in held)

    def _masked_vector(self, seed: bytes) -> list[bytes]:
        scaled = parameters_multiply([self.update], 0.5)
        vector = factor_combine(_TARGET // 2, quantize(scaled, _CLIP, _TARGET))
        shapes = get_parameters_shape(vector)
        vector = parameters_addition(vector, pseudo_rand_gen(seed, _MODULUS, shapes))
        for peer, (mask_public, _, _) in self.peers.items():
            key = generate_shared_key(
                bytes_to_private_key(self.private[0]), bytes_to_public_key(mask_public)
            )
            mask = pseudo_rand_gen(key, _MODULUS, shapes)
            fold = parameters_addition if self.own > peer else parameters_subtraction
            vector = fold(vector, mask)
        return [ndarray_to_bytes(each) for each in parameters_mod(vector, _MODULUS)]

    def server(self) -> int:
        """Add the survivors' vectors, recover all secrets, remove the masks, dequantize."""
        survivors = self.size - self.dropped
        sent = [ndarray_to_bytes(np.ones(1, np.int64)), self._levels]
        total = [bytes_to_ndarray(data) for data in sent]
        for _ in range(survivors - 1):
            total = parameters_addition(total, [bytes_to_ndarray(data) for data in sent])
        total = parameters_mod(total, _MODULUS)
        shapes = get_parameters_shape(total)
        for _ in range(survivors):
            seed = combine_shares(self.shares[0][:survivors])
            total = parameters_subtraction(total, pseudo_rand_gen(seed, _MODULUS, shapes))
        for _ in range(self.dropped):
            secret = combine_shares(self.shares[1][:survivors])
            for mask_public, _, _ in self.peers.values():
                key = generate_shared_key(
                    bytes_to_private_key(secret), bytes_to_public_key(mask_public)
                )
                total = parameters_addition(total, pseudo_rand_gen(key, _MODULUS, shapes))
        _, rest = factor_extract(parameters_mod(total, _MODULUS))
        for vector in dequantize(rest, _CLIP, _TARGET):
            np.add(vector, -(survivors - 1) * _CLIP, out=vector)
            np.multiply(vector, 2.0, out=vector)
        return 0

    @property
    def _levels(self) -> bytes:
        return ndarray_to_bytes(np.full(self.dimension, _TARGET // 2, np.int64))


def main() -> None:
    """Answer lines until standard input ends."""
    cohort = Cohort.of(*map(int, sys.argv[1:]))
    parts: dict[str, Callable[[], int]] = {
        "fold": cohort.fold,
        "client": cohort.client,
        "server": cohort.server,
    }
    for line in sys.stdin:
        before_s, clock_s = process_time(), perf_counter()
        num_bytes = parts[json.loads(line)["do"]]()
        answer = {
            "seconds": process_time() - before_s,
            "clock_s": perf_counter() - clock_s,
            "num_bytes": num_bytes,
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
