"""From released shares to secrets, each checked against what its owner published.

Masking gives no integrity, so nothing is believed: a self-seed must open its commitment, a
mask key must have the advertised public half. One false share is found by leaving it out.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np

from fedlearn.core.messages import ClientId
from fedlearn.core.randomness import SecretBytes
from fedlearn.errors import AggregationAborted
from fedlearn.secagg import keys, masking, shamir
from fedlearn.secagg.client import pair_keys
from fedlearn.secagg.session import Session, Stage


@dataclass(frozen=True, eq=False)
class Recovered:
    """The secrets of all that shared.

    Attributes:
        seeds: Self-seeds of the survivors.
        mask_keys: Mask keys of those that dropped after they shared.
        suspects: Holders with a false share: they lied, or its owner dealt it. None of their
            shares is used.
    """

    seeds: Mapping[ClientId, SecretBytes]
    mask_keys: Mapping[ClientId, SecretBytes]
    suspects: frozenset[ClientId]


@dataclass(eq=False)
class ShareBox:
    """Released shares, by owner and holder.

    Attributes:
        session: Terms and roster.
        owners: All that shared.
    """

    session: Session
    owners: Sequence[ClientId]
    _shares: dict[ClientId, dict[ClientId, SecretBytes]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._shares = {owner: {} for owner in self.owners}

    def put(self, holder: ClientId, shares: Mapping[ClientId, SecretBytes]) -> None:
        """Keep what a holder released; it is expected to hold shares of each of these owners."""
        for owner, share in shares.items():
            self._shares[owner][holder] = share

    @property
    def shortest(self) -> int:
        """The number of shares of the owner that has the fewest."""
        return min(len(of_owner) for of_owner in self._shares.values())

    def recover(
        self, survivors: AbstractSet[ClientId], commitments: Mapping[ClientId, bytes]
    ) -> Recovered:
        """Return the secrets.

        Raises:
            AggregationAborted: An owner has fewer than t shares, or what they give is not what
                it published, whichever single holder is left out.
        """

        def is_genuine(owner: ClientId, secret: SecretBytes) -> bool:
            if owner in survivors:
                opened = keys.commitment(secret, session=self.session.id, client_id=owner)
                return opened == commitments[owner]
            return keys.KeyAgreement(secret).public_key == self.session.by_id[owner].mask_key

        found, suspects = self._recover(is_genuine)
        return Recovered(
            seeds={owner: found[owner] for owner in self.owners if owner in survivors},
            mask_keys={owner: found[owner] for owner in self.owners if owner not in survivors},
            suspects=frozenset(suspects),
        )

    def _recover(
        self, is_genuine: Callable[[ClientId, SecretBytes], bool]
    ) -> tuple[dict[ClientId, SecretBytes], set[ClientId]]:
        found: dict[ClientId, SecretBytes] = {}
        suspects: set[ClientId] = set()
        left = list(self.owners)
        while left:
            secrets = self._combine(left, [self._holders(owner, suspects) for owner in left])
            found |= {
                owner: secret
                for owner, secret in zip(left, secrets, strict=True)
                if secret is not None and is_genuine(owner, secret)
            }
            left = [owner for owner in left if owner not in found]
            if left:
                suspects.add(self._suspect(left[0], suspects, is_genuine))
        return found, suspects

    def _holders(self, owner: ClientId, without: Iterable[ClientId]) -> list[ClientId]:
        """Return t holders of an owner's shares."""
        threshold, excluded = self.session.terms.threshold, set(without)
        held = [holder for holder in sorted(self._shares[owner]) if holder not in excluded]
        if len(held) < threshold:
            raise AggregationAborted(
                stage=Stage.UNMASK,
                reason=f"{len(held)} shares of client {owner}, the threshold is {threshold}"
                + (f" (false ones of {sorted(excluded)} left out)" if excluded else ""),
            )
        return held[:threshold]

    def _suspect(
        self,
        owner: ClientId,
        suspects: AbstractSet[ClientId],
        is_genuine: Callable[[ClientId, SecretBytes], bool],
    ) -> ClientId:
        """Return the holder without whose share an owner's secret is genuine."""
        used = self._holders(owner, suspects)
        if len(self._shares[owner].keys() - suspects) > len(used):
            trials = [self._holders(owner, {*suspects, holder}) for holder in used]
            secrets = self._combine([owner] * len(trials), trials)
            for holder, secret in zip(used, secrets, strict=True):
                if secret is not None and is_genuine(owner, secret):
                    return holder
        raise AggregationAborted(
            stage=Stage.UNMASK,
            reason=f"the shares of client {owner} do not give the secret it published: it, or "
            "more than one holder, lied",
        )

    def _combine(
        self, owners: Sequence[ClientId], holders: Sequence[Sequence[ClientId]]
    ) -> list[SecretBytes | None]:
        points = self.session.points
        at = np.array([[points[holder] for holder in row] for row in holders], np.int64)
        joined = b"".join(
            self._shares[owner][holder].reveal()
            for owner, row in zip(owners, holders, strict=True)
            for holder in row
        )
        shares = shamir.from_bytes(joined).reshape(*at.shape, shamir.NUM_LIMBS)
        return shamir.combine(at, shares)


def leftover_masks(recovered: Recovered, *, session: Session) -> masking.MaskKeys:
    """Return the masks that take those out of the sum that are still in it.

    The self-masks of the survivors are subtracted. For each dropped client the masks are
    added that it would have added itself: they cancel those of its surviving neighbours.
    """
    plus: list[SecretBytes] = []
    minus: list[SecretBytes] = []
    for client_id, seed in recovered.seeds.items():
        minus.append(keys.self_mask_key(seed, session=session.id, client_id=client_id))
    for client_id, secret in recovered.mask_keys.items():
        partners = [v for v in session.neighbours(client_id) if v in recovered.seeds]
        pairs = pair_keys(keys.KeyAgreement(secret), client_id, partners, session=session)
        plus.extend(pairs.plus)
        minus.extend(pairs.minus)
    return masking.MaskKeys(plus=plus, minus=minus)
