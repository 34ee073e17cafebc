"""The bare loop of the peers, behind a gate if there is one: see ``sequential.py``."""

import os
from pathlib import Path

from ours import load_workload

if __name__ == "__main__":
    load_workload(Path(os.environ["PEERS_DIR"])).main()
