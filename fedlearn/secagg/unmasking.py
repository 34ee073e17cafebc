"""Recovers secrets from released shares, and checks each against what its owner published.

Masking gives no integrity, so no share is trusted: a self-seed must open its commitment, and a
mask key must have the advertised public half. If one does not, decoding finds the false shares, up
to (M - t) / 2 of M. If no client lies, that costs nothing.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedlearn.core.messages import ClientId
from fedlearn.core.secret_bytes import SecretBytes
from fedlearn.errors import AggregationAborted
from fedlearn.secagg import keys, masking, shamir
from fedlearn.secagg.client import derive_pair_keys
from fedlearn.secagg.error_correction import find_false_shares
from fedlearn.secagg.session import Session, Stage

#: Most owners whose shares are decoded before false ones must be found. A holder that lies about
#: one owner usually lies about many, and liars must not keep the coordinator busy.
_MOST_DECODED = 8


@dataclass(frozen=True, eq=False)
class RecoveredSecrets:
    """The secrets of all clients that shared them.

    Attributes:
        seeds: Self-seeds of the survivors.
        mask_keys: Mask keys of the clients that dropped after they shared.
        suspects: Holders with a false share: either they lied, or its owner sent it to them. None
            of their shares is used.
    """

    seeds: Mapping[ClientId, SecretBytes]
    mask_keys: Mapping[ClientId, SecretBytes]
    suspects: frozenset[ClientId]


@dataclass(eq=False)
class ShareBox:
    """Released shares, by owner and holder.

    Attributes:
        session: Terms and roster.
        commitments: Commitments to the self-seeds of all clients that shared: the owners.
        survivors: Owners whose self-seed is to be recovered; of the others, it is the mask key.
    """

    session: Session
    commitments: Mapping[ClientId, bytes]
    survivors: AbstractSet[ClientId]
    _shares: dict[ClientId, dict[ClientId, SecretBytes]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._shares = {owner: {} for owner in sorted(self.commitments)}

    def put(self, holder: ClientId, shares: Mapping[ClientId, SecretBytes]) -> None:
        """Store the shares that a holder released; it must hold shares of each of these owners."""
        for owner, share in shares.items():
            self._shares[owner][holder] = share

    @property
    def fewest_shares(self) -> int:
        """Number of shares of the owner that has the fewest."""
        return min(len(of_owner) for of_owner in self._shares.values())

    def recover(self) -> RecoveredSecrets:
        """Recover all secrets; abort if they are not what their owners published.

        That happens if an owner has fewer than t shares, or too many false ones to identify. If the
        secrets of other owners were recovered, the owner is the culprit: it sent false shares, or
        published another secret.
        """
        found: dict[ClientId, SecretBytes] = {}
        suspects: set[ClientId] = set()
        left = list(self._shares)
        while left:
            # Any t holders do; if none lies, this first pass recovers everything.
            secrets = self._combine(left, [self._choose_holders(owner, suspects) for owner in left])
            found |= {
                owner: secret
                for owner, secret in zip(left, secrets, strict=True)
                if secret is not None and self._is_genuine(owner, secret)
            }
            # What is left failed its check: some share of it is false.
            left = [owner for owner in left if owner not in found]
            if left:
                decoded = (
                    self._find_false_holders(owner, suspects) for owner in left[:_MOST_DECODED]
                )
                # Lazy: the liars that one owner exposes are usually those of all owners.
                more = next(filter(None, decoded), None)
                if more is None:
                    raise self._build_error(left, is_alone=bool(found))
                suspects |= more
        return RecoveredSecrets(
            seeds={owner: found[owner] for owner in self._shares if owner in self.survivors},
            mask_keys={
                owner: found[owner] for owner in self._shares if owner not in self.survivors
            },
            suspects=frozenset(suspects),
        )

    def _is_genuine(self, owner: ClientId, secret: SecretBytes) -> bool:
        if owner in self.survivors:
            opened = keys.commit_to_seed(secret, session=self.session.id, client_id=owner)
            return opened == self.commitments[owner]
        return keys.KeyAgreement(secret).public_key == self.session.by_id[owner].mask_key

    def _choose_holders(self, owner: ClientId, without: AbstractSet[ClientId]) -> list[ClientId]:
        threshold = self.session.terms.threshold
        held = sorted(self._shares[owner].keys() - without)
        if len(held) < threshold:
            raise AggregationAborted(
                stage=Stage.UNMASK,
                reason=f"{len(held)} shares of client {owner}, the threshold is {threshold}"
                + (f" (false ones of {sorted(without)} left out)" if without else ""),
            )
        return held[:threshold]

    def _find_false_holders(
        self, owner: ClientId, suspects: AbstractSet[ClientId]
    ) -> set[ClientId]:
        """Return the holders with a false share of an owner's secret; empty if it is unclear."""
        threshold = self.session.terms.threshold
        held = sorted(self._shares[owner].keys() - suspects)
        points = [self.session.points[holder] for holder in held]
        if found := find_false_shares(points, self._read_limbs(owner, held), threshold=threshold):
            return {held[place] for place in found}
        # One share more than t is too few to decode, but the published value tells which to drop.
        if len(held) == threshold + 1:
            trials = [[each for each in held if each != holder] for holder in held]
            secrets = self._combine([owner] * len(trials), trials)
            for holder, secret in zip(held, secrets, strict=True):
                if secret is not None and self._is_genuine(owner, secret):
                    return {holder}
        return set()

    def _build_error(self, failed: Sequence[ClientId], *, is_alone: bool) -> AggregationAborted:
        """Build the error; the owners are at fault if ``is_alone``: other secrets came out."""
        owners = ", ".join(map(str, failed))
        received = min(len(self._shares[owner]) for owner in failed)
        most = (received - self.session.terms.threshold) // 2
        return AggregationAborted(
            stage=Stage.UNMASK,
            reason=f"the shares of client {owners} do not give the secret it published: it lied, "
            f"or more than {most} of {received} holders did",
            culprits=failed if is_alone else (),
        )

    def _read_limbs(self, owner: ClientId, holders: Sequence[ClientId]) -> NDArray[np.uint32]:
        joined = b"".join(self._shares[owner][holder].reveal() for holder in holders)
        # Shape [holders, limbs].
        return shamir.from_bytes(joined).reshape(len(holders), shamir.NUM_LIMBS)

    def _combine(
        self, owners: Sequence[ClientId], holders: Sequence[Sequence[ClientId]]
    ) -> list[SecretBytes | None]:
        points = self.session.points
        at = np.array([[points[holder] for holder in row] for row in holders], np.int64)
        rows = zip(owners, holders, strict=True)
        return shamir.combine(at, np.stack([self._read_limbs(owner, row) for owner, row in rows]))


def find_leftover_masks(recovered: RecoveredSecrets, *, session: Session) -> masking.MaskKeys:
    """Return the keys of the masks to fold into the sum so that none are left in it.

    The self-masks of the survivors are subtracted. For each dropped client, its pairwise masks are
    folded in as it would have done itself: they cancel those of its surviving neighbors.
    """
    plus: list[SecretBytes] = []
    minus = [
        keys.derive_self_mask_key(seed, session=session.id, client_id=client_id)
        for client_id, seed in recovered.seeds.items()
    ]
    for client_id, secret in recovered.mask_keys.items():
        # Only masks with survivors are in the sum: other dropouts sent no vector.
        partners = [v for v in session.neighbors(client_id) if v in recovered.seeds]
        pairs = derive_pair_keys(keys.KeyAgreement(secret), client_id, partners, session=session)
        plus.extend(pairs.plus)
        minus.extend(pairs.minus)
    return masking.MaskKeys(plus=plus, minus=minus)
