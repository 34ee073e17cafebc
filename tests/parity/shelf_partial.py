"""Cases of the shelf: parts of the model that clients keep for themselves."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fedlearn.algorithms.local_parts import KeepLocal
from fedlearn.algorithms.partial_models import FedPer, LGFedAvg
from fedlearn.algorithms.recipes import FedAvg, FedProx
from tests.parity.shelf import COHORTS, SGD, Case, shares, train, weighted

#: Of the 75 parameters of the shelf's model, those of its first layer come first.
NUM_FIRST = 48


def keep(x: Tensor, *, first: bool, proximal: float = 0.0) -> Iterator[Tensor]:
    """Average one layer; each client trains its own copy of the other, from its last round on."""
    is_local = torch.arange(len(x)) < NUM_FIRST
    is_local = is_local if first else ~is_local
    own = dict[int, Tensor]()
    for round_num, cohort in enumerate(COHORTS):
        trained = list[Tensor]()
        for client in cohort:
            begin = torch.where(is_local, own.get(client, x), x)

            def pull(g: Tensor, y: Tensor, begin: Tensor = begin) -> Tensor:
                return g + proximal * (y - begin)

            own[client], _ = train(begin, client, round_num, direction=pull)
            trained.append(own[client])
        x = torch.where(is_local, x, weighted(shares(cohort), trained))
        yield x


CASES: Mapping[str, Case] = {
    "fedper": Case(
        FedPer(SGD, personal_layers=("2.*",)),
        lambda x: keep(x, first=False),
        control=FedAvg(SGD),
        protected=FedPer(SGD, personal_layers=("2.*",), weight_by_examples=False),
    ),
    "lgfedavg": Case(
        LGFedAvg(SGD, representation_layers=("0.*",)),
        lambda x: keep(x, first=True),
        control=FedAvg(SGD),
        protected=LGFedAvg(SGD, representation_layers=("0.*",), weight_by_examples=False),
    ),
    "fedprox with a personal head": Case(
        KeepLocal(FedProx(SGD, proximal=0.5), ("2.*",)),
        lambda x: keep(x, first=False, proximal=0.5),
        control=KeepLocal(FedAvg(SGD), ("2.*",)),
        protected=None,
    ),
}
