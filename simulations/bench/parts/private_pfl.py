"""Run pfl-research on the benchmark's workload with its central Gaussian mechanism.

Runs in an environment with pfl, and takes the arguments of the peer's script. It runs that script
with one more postprocessor, which clips to norm 1 and adds noise of standard deviation 1 to the
sum, as in our private rounds.
"""

import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any


def main() -> None:
    """Run the peer with privacy."""
    simulate: Any = importlib.import_module("pfl.aggregate.simulate")  # it has no types
    mechanism: Any = importlib.import_module("pfl.privacy.gaussian_mechanism")
    privacy: Any = importlib.import_module("pfl.privacy.privacy_mechanism")
    backend = simulate.SimulatedBackend

    def private(*, postprocessors: list[object], **settings: object) -> object:
        gaussian = mechanism.GaussianMechanism(1.0, 1.0)
        noise = privacy.CentrallyAppliedPrivacyMechanism(gaussian)
        return backend(postprocessors=[*postprocessors, noise], **settings)

    simulate.SimulatedBackend = private
    script = Path(os.environ["PEERS_DIR"]) / "peer_pfl.py"
    spec = importlib.util.spec_from_file_location("peer_pfl", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()


if __name__ == "__main__":
    main()
