"""What a client's owner says about bundles: which are approved by rule, and what they may use."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, get_args

from annotated_types import Gt, Le, doc
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from fedlearn.core.ranges import Count, Positive, describe_out_of_range
from fedlearn.errors import ConfigError

if TYPE_CHECKING:  # it takes the package of cryptography
    from fedlearn.identity.bundles import Bundle

Isolation: TypeAlias = Literal["required", "where possible"]
GpuShare: TypeAlias = Annotated[float, Gt(0), Le(1)]
"""A share of a GPU's memory, in (0, 1]."""

_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class BundlePolicy:
    """Which bundles run without asking the owner, and with which limits all of them run.

    A bundle that no rule approves waits for `fedlearn approve`.

    Raises:
        ConfigError: A value is out of range or malformed.

    Example:
        >>> BundlePolicy(signers=("ab" * 32,), packages=("numpy>=2,<3",)).isolation
        'required'
    """

    signers: Annotated[
        tuple[str, ...],
        doc(
            "Public keys of researchers, 64 hexadecimal digits each: a bundle that one of them has"
            " signed is approved, if `packages` allows all its requirements."
        ),
    ] = ()
    packages: Annotated[
        tuple[str, ...],
        doc(
            'Requirements that such a bundle may have, as names and versions: "numpy>=2,<3". '
            "Others make it wait for `fedlearn approve`."
        ),
    ] = ()
    parameter_changes: Annotated[
        bool,
        doc(
            "Whether a bundle is approved that differs from one that `fedlearn approve` approved "
            "only in its version and in the files declared as parameters; the signer is the same."
        ),
    ] = False
    data: Annotated[
        tuple[str, ...],
        doc(
            "Files and folders of data that bundles may read. They may write to none. In a file, "
            "relative paths are relative to it."
        ),
    ] = ()
    variables: Annotated[
        tuple[str, ...],
        doc("Names of the environment variables that bundles see, such as those that name data."),
    ] = ("FEDLEARN_DATA", "FEDLEARN_PART")
    isolation: Annotated[
        Isolation,
        doc(
            "What to do where the system cannot isolate bundles from network, keys and files: "
            '"required" runs none, "where possible" runs them all the same.'
        ),
    ] = "required"
    max_memory_bytes: Annotated[
        Count, doc("Most memory of all processes of a bundle together, in bytes, >= 1.")
    ] = 8 << 30
    max_processes: Annotated[
        Count, doc("Most processes and threads of a bundle at a time, >= 1.")
    ] = 512
    max_wall_s: Annotated[Positive, doc("Most seconds of one training or evaluation, > 0.")] = (
        3600.0
    )
    max_cpu_s: Annotated[
        Positive, doc("Most seconds of processor time of one training or evaluation, > 0.")
    ] = 14_400.0
    num_cores: Annotated[Count | None, doc("Processor cores to run on, >= 1; not set: all.")] = None
    gpu_share: Annotated[
        GpuShare | None,
        doc("Largest share of a GPU's memory, (0, 1]; not set: bundles see no GPU."),
    ] = None

    def __post_init__(self) -> None:
        wrong = describe_out_of_range(self)
        if self.isolation not in get_args(Isolation):
            known = " or ".join(map(repr, get_args(Isolation)))
            wrong = f"isolation is {self.isolation!r}; it is {known}"
        for each in self.signers:
            if not _KEY.fullmatch(each):
                wrong = f"signers has {each!r}, which is not 64 hexadecimal digits"
        for each in self.packages:
            try:
                Requirement(each)
            except InvalidRequirement as error:
                wrong = f'packages has {each!r}, which is not like "numpy>=2,<3": {error}'
        for each in self.data:
            if not Path(each).is_absolute():
                wrong = f"data has {each!r}, which is not an absolute path"
        if wrong:
            raise ConfigError(f"policy.bundles.{wrong}")

    def list_missing_data(self) -> list[str]:
        """List what ``data`` names and cannot be read now."""
        return [each for each in self.data if not os.access(each, os.R_OK)]

    def find_rule(
        self, bundle: "Bundle", *, approved: "Iterable[Bundle]"
    ) -> tuple[str | None, str]:
        """Find the rule that approves a bundle.

        Args:
            bundle: The bundle.
            approved: Those that the owner has approved.

        Returns:
            The rule, or ``None`` if none approves it; and why, in words.
        """
        if self.parameter_changes:
            for each in approved:
                if differs_only_in_parameters(each, bundle):
                    return "parameter_changes", f"it has other parameters than {each.digest[:12]}"
        if bundle.manifest.signer not in self.signers:
            return None, "its signer is not among policy.bundles.signers"
        if outside := [str(r) for r in bundle.manifest.requirements if not self._allows(r)]:
            return None, f"policy.bundles.packages does not allow {', '.join(outside)}"
        return "signers", f"it is signed by {bundle.manifest.signer[:12]}"

    def _allows(self, wanted: object) -> bool:
        name, _, rest = str(wanted).partition("==")
        version = rest.partition(" ;")[0]
        return any(
            canonicalize_name(each.name) == name
            and each.specifier.contains(version, prereleases=True)
            for each in map(Requirement, self.packages)
        )


def differs_only_in_parameters(old: "Bundle", new: "Bundle") -> bool:
    """Whether the same signer has changed nothing but the version and the declared parameters."""

    def list_fixed(bundle: "Bundle") -> tuple[object, ...]:
        m = bundle.manifest
        return m.name, m.entry_point, m.signer, m.code, m.parameters, m.requirements

    return list_fixed(old) == list_fixed(new)
